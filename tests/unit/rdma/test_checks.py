"""The checks that RDMA makes before and after a transfer."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monarch import _spi
from monarch.rdma.errors import RdmaBufferDropped
from monarch.rdma.routes import process_vm
from monarch.rdma.routes.copying import READ
from monarch.rdma.routes.stream.server import Server, Session
from monarch.rdma.table import PeerTable, Table

IDENTITY = b"identity of ours"
TOKEN = b"a token of sixtn"


@pytest.fixture
def sessions() -> Iterator[Any]:
    """Yield a function that connects callers to one server."""
    server = Server()
    socks: list[socket.socket] = []

    def make(uid: int) -> Session:
        near, far = socket.socketpair()
        socks.extend((near, far))
        number = server.number()
        made = server.sessions[number] = Session(server, far, _spi.Caller(uid, None), number)
        return made

    yield make
    for sock in socks:
        sock.close()


def test_a_caller_recalls_its_own_connections_and_nobody_elses(sessions: Any) -> None:
    mine, also_mine, others = sessions(7), sessions(7), sessions(8)
    mine._on_recall(1, others._number)
    assert not others.connection.over
    mine._on_recall(2, also_mine._number)
    assert also_mine.connection.over
    assert not mine.connection.over


@pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv")
def test_what_was_read_while_its_registration_ended_is_not_given_out() -> None:
    """The memory may have been reused during the read."""
    table = Table(IDENTITY)
    slot = table.publish(7, TOKEN, 0x1000, 8, True)
    handle: Any = SimpleNamespace(slot=slot, number=7, address=0x1000, size=8, owner="the owner")
    route: Any = process_vm._VmRoute.__new__(process_vm._VmRoute)
    route._alive = os.pidfd_open(os.getpid())
    route._pid = os.getpid()
    route._known = {7: handle}
    route._table = PeerTable(os.open(f"/proc/self/fd/{table.fd}", os.O_RDWR), IDENTITY)
    local = SimpleNamespace(address=0x2000)
    pieces: Any = [(SimpleNamespace(handle=handle, local=local, offset=0), 0, 8)]
    route._readv = lambda *_: 8
    route.copy(READ, pieces)

    def ends_meanwhile(*_: Any) -> int:
        assert table.revoke(slot)
        return 8

    route._readv = ends_meanwhile
    with pytest.raises(RdmaBufferDropped):
        route.copy(READ, pieces)
    table.close()
