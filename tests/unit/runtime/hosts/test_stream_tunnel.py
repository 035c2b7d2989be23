"""A stream of bytes between procs of two hosts: it ends once, when both ends are closed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.hosts.stream_tunnel import StreamTunnel
from monarch._engine.runtime.io.reactor import READ

LANE = 5


class Tunnel:
    """A tunnel; the session with the other host, and the reactor, record what they are told."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.closed: list[Any] = []
        self.watched: list[tuple[bool, bool]] = []  # for reads, for writes
        self.has_room = True
        reactor: Any = SimpleNamespace(
            scratch=bytearray(1 << 16),
            register=lambda *_: None,
            unregister=lambda _: None,
            watch=lambda _, *, reads, writes: self.watched.append((reads, writes)),
        )
        session: Any = SimpleNamespace(send=self._send, pause=lambda _: None, resume=lambda _: None)
        self.itself = StreamTunnel(reactor, session, LANE, 1, 2, self.closed.append)
        ours, self.proc = socket.socketpair()
        self.itself.attach(ours)

    def _send(self, lane: int, buffers: list[bytes]) -> bool:
        assert lane == LANE
        self.said += buffers
        return self.has_room


@pytest.fixture
def tunnel() -> Iterator[Tunnel]:
    made = Tunnel()
    yield made
    made.itself.close("the test is over")
    made.proc.close()


def test_it_is_closed_when_both_procs_have_closed_their_ends(tunnel: Tunnel) -> None:
    tunnel.proc.close()
    tunnel.itself._ready(READ)
    assert tunnel.said == [b""]
    assert tunnel.closed == []
    tunnel.itself.deliver(b"for nobody")
    for _ in range(2):
        tunnel.itself.deliver(b"")
    assert tunnel.closed == [tunnel.itself]
    assert tunnel.said == [b""]


def test_room_on_the_lane_after_the_end_is_not_used(tunnel: Tunnel) -> None:
    tunnel.has_room = False
    tunnel.proc.send(b"the last words")
    tunnel.itself._ready(READ)
    assert tunnel.watched == [(False, False)]
    tunnel.itself.close("the other proc closed its end")
    tunnel.itself.room()
    assert tunnel.watched == [(False, False)]
    assert tunnel.said == [b"the last words", b""]
