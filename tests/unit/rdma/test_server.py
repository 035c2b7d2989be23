"""What an owner answers to requests over a stream, and what it forgets when the stream ends.

The reactor is a list of callbacks, which a test runs in its own thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch import _spi
from monarch._engine.runtime.proc.side_stream import Via
from monarch.rdma import RDMABuffer, registry
from monarch.rdma.memory import Memory
from monarch.rdma.routes.stream import connection as stream_connection
from monarch.rdma.routes.stream import message, server
from monarch.rdma.routes.stream.message import REPLY, REQUEST, hello
from monarch.rdma.table import PeerTable

SIZE = 8 << 20
"""More than a socket takes at once, so such a range is in use until the peer reads it."""


class Reactor:
    """Runs nothing by itself; `timers` are what it is asked to call later."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []
        self.scratch = memoryview(bytearray(1 << 16))
        self.reads = True

    def call_later(self, _: float, callback: Callable[[], None]) -> None:
        self.timers.append(callback)

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        callback(*args)

    def register(self, fd: int, ready: Callable[[int], None]) -> None:
        self.ready = ready

    def watch(self, fd: int, *, reads: bool, writes: bool) -> None:
        self.reads = reads

    def unregister(self, fd: int) -> None:
        pass


class Peer:
    """A peer in this process, its session at the owner, and the buffer it asks for."""

    def __init__(self, buffer: RDMABuffer, reactor: Reactor) -> None:
        self.handle = buffer._handle
        self.reactor = reactor
        self.server = server.Server()
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(0)
        self.server.serve(theirs, _spi.Caller(1, None), 1)
        self.send(hello(self.handle.identity))

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)
        self.reactor.ready(select.POLLIN)

    def ask(self, operation: int, offset: int, length: int, first: int = 0) -> None:
        number, token = self.handle.number, self.handle.token
        self.send(REQUEST.pack(9, operation, 0, number, token, offset, length, first, 0))

    def answer(self) -> tuple[int, int, bytes]:
        """Return kind, status and content of the next reply. Raises BlockingIOError for none."""
        ident, kind, status, length = REPLY.unpack(self.sock.recv(REPLY.size))
        assert ident == 9
        return kind, status, self.sock.recv(length) if length else b""


@pytest.fixture
def memory() -> bytearray:
    return bytearray(SIZE)


@pytest.fixture
def peer(memory: bytearray, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    reactor = Reactor()
    monkeypatch.setattr(server, "data_reactor", lambda: reactor)
    with RDMABuffer(memory) as buffer:
        made = Peer(buffer, reactor)
        yield made
        made.sock.close()
        for session in list(made.server.sessions.values()):
            session.connection.close("the test has ended")


@pytest.mark.skipif(sys.platform != "linux", reason="the table excludes other processes")
def test_an_atomic_operation_waits_for_that_of_another_process(
    peer: Peer, memory: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_RETRIES", 3)
    table, slot = registry.own_registry().table, peer.handle.slot
    assert table is not None
    other = PeerTable(os.open(f"/proc/self/fd/{table.fd}", os.O_RDWR), peer.handle.identity)
    assert other.try_exclusive(slot)
    peer.ask(message.ADD, 0, 0, first=5)
    peer.reactor.timers.pop()()
    with pytest.raises(BlockingIOError):
        peer.answer()
    other.end_exclusive(slot)
    peer.reactor.timers.pop()()
    assert peer.answer() == (message.VALUE, message.OK, bytes(8))
    assert struct.unpack_from("=Q", memory) == (5,)

    assert other.try_exclusive(slot)
    peer.ask(message.ADD, 0, 0, first=1)
    for _ in range(3):
        peer.reactor.timers.pop()()
    kind, status, text = peer.answer()
    assert (kind, status, peer.reactor.timers) == (message.END, message.FAILED, [])
    assert b"another process does not end its atomic operation" in text
    assert struct.unpack_from("=Q", memory) == (5,)


def test_a_peer_that_is_lost_in_the_middle_leaves_nothing(peer: Peer, memory: bytearray) -> None:
    peer.ask(message.READ, 0, SIZE)
    peer.ask(message.WRITE, 0, SIZE)
    peer.send(b"half")
    assert [len(slices) for slices in peer.server.in_use.values()] == [2]
    peer.sock.close()
    peer.reactor.ready(select.POLLIN)
    assert (peer.server.sessions, peer.server.in_use) == ({}, {})


@pytest.mark.parametrize("operation", [message.READ, message.WRITE, message.ADD])
@pytest.mark.parametrize("length", [8, SIZE])
def test_memory_that_was_moved_is_not_served(peer: Peer, operation: int, length: int) -> None:
    class Moved(Memory):
        stale = True

    found = registry.own_registry().find(peer.handle.number, peer.handle.token)
    was = found.memory
    found.memory = Moved(was.address, was.nbytes, True, was.pin)
    peer.ask(operation, 0, length)
    if operation == message.WRITE:
        for _ in range(0, length, 1 << 16):  # the owner reads the bytes, and discards them
            peer.send(bytes(min(length, 1 << 16)))
    kind, status, text = peer.answer()
    assert (kind, status) == (message.END, message.FAILED)
    assert b"was resized or freed by its owner" in text


def test_memory_that_is_dropped_while_it_is_written_is_reported_and_left_alone(
    peer: Peer, memory: bytearray
) -> None:
    peer.ask(message.WRITE, 0, 8)
    peer.send(b"half")
    registry.drop(peer.handle).get(timeout=60)
    peer.send(b"late")
    kind, status, _ = peer.answer()
    assert (kind, status) == (message.END, message.NOT_FOUND)
    assert memory[4:8] == bytes(4)


def test_memory_that_is_dropped_while_it_is_read_is_shown_no_more(
    peer: Peer, memory: bytearray
) -> None:
    memory[:] = b"x" * SIZE
    peer.ask(message.READ, 0, SIZE)
    registry.drop(peer.handle).get(timeout=60)
    received = bytearray()
    while len(received) < REPLY.size + SIZE + REPLY.size:
        with contextlib.suppress(BlockingIOError):
            received += peer.sock.recv(1 << 20)
        peer.reactor.ready(select.POLLOUT)
    assert received[REPLY.size :].startswith(b"x")
    assert received[SIZE - 8 : SIZE] == bytes(8)
    _, kind, status, _ = REPLY.unpack_from(received, REPLY.size + SIZE)
    assert (kind, status) == (message.END, message.NOT_FOUND)


def test_requests_of_a_peer_that_does_not_read_wait(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_connection, "_MOST_QUEUED", 8)
    peer.ask(message.READ, 0, SIZE)  # blocks the socket
    assert peer.reactor.reads
    for _ in range(8):
        peer.ask(message.READ, 0, 8)
    assert not peer.reactor.reads
    left = REPLY.size + SIZE + REPLY.size
    while left > 0 or not peer.reactor.reads:
        with contextlib.suppress(BlockingIOError):
            left -= len(peer.sock.recv(1 << 20))
        peer.reactor.ready(select.POLLOUT)


@pytest.mark.parametrize("at_once", [True, False])
def test_one_thread_at_a_time_sends(peer: Peer, at_once: bool) -> None:
    """Bytes of one thread never stand between those of another."""
    connection = peer.server.sessions[1].connection
    alone: list[bool] = []

    class Watched:
        lock, left = threading.Lock(), 4

        def view(self) -> memoryview:
            alone.append(connection._lock.locked())
            return memoryview(b"data")

        def advance(self, count: int) -> None:
            self.left -= count

        def verdict(self) -> bytes:
            return b"end"

    if at_once:
        connection.send(Watched())
    else:
        connection.queue([Watched()])
        connection.flush()
    assert alone == [True]
    assert peer.sock.recv(7) == b"dataend"


@pytest.mark.parametrize("here", ["10.0.0.1", ""])
def test_a_peer_is_invited_to_the_address_where_its_host_is_connected(
    peer: Peer, here: str
) -> None:
    class Door:
        def invite(self, _: Any) -> Any:
            return types.SimpleNamespace(address=here, port=7, key=b"k", certificate=b"")

    session = peer.server.sessions[1]
    via: Any = Via(here, tls=False)
    session._caller = _spi.Caller(1, via)
    doors: Any = peer.server.doors
    doors[via] = Door()
    invitation = session._invitation()
    if here:
        assert (invitation["address"], invitation["port"]) == (here, 7)
    else:
        assert "has no IP address" in invitation["reason"]
