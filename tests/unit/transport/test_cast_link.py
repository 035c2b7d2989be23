"""Links to procs that casts also reach: marks are sent where the path changes, and only there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from monarch._engine.transport.link import CastLink, Link
from monarch._engine.wire.frame import CALL, MARK, pack


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    left, right = (
        Link(sock, "peer", lambda link, on: None, 1 << 20, 1 << 20) for sock in socket.socketpair()
    )
    yield left, right
    left.close("as a test")
    right.close("as a test")


def sent(link: Link) -> list[tuple[int, int]]:
    """Return the kind and destination of each frame that has arrived."""
    frames = link.receive(memoryview(bytearray(1 << 16)))
    return [(frame.kind, frame.dest) for frame in frames]


def call(number: int) -> bytes:
    return pack(CALL, number, 0, 0, b"", b"")


def cast(link: Link, number: int) -> bool:
    """Treat a link as `Casting.send` does; return whether the cast waits for a mark."""
    tied = link.used
    link.casts = number
    if tied:
        link.mark(number)
    return tied


def test_a_link_that_no_cast_reaches_is_a_plain_one(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.send(call(1))
    assert type(left) is Link
    assert sent(right) == [(CALL, 1)]


def test_marks_come_with_changes_of_the_path(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.send(call(1))
    assert [cast(left, 1), cast(left, 2)] == [True, False]
    assert type(left) is CastLink
    left.send(call(2))
    left.send(call(3))
    assert cast(left, 3)
    left.send(call(4))
    assert sent(right) == [
        (CALL, 1),
        (MARK, 1),
        (MARK, 2),
        (CALL, 2),
        (CALL, 3),
        (MARK, 3),
        (CALL, 4),
    ]


def test_who_sends_while_another_thread_casts_marks_for_it(ends: tuple[Link, Link]) -> None:
    """The sent call follows that mark, so the sender's own next cast needs a new mark."""
    left, right = ends
    left.await_casts()
    left.send(call(1))
    assert left.used
    left.casts = 1  # the cast is on its way to the agent
    left.send(call(2))
    left.mark(1)
    assert cast(left, 2)
    assert sent(right) == [(CALL, 1), (MARK, 1), (CALL, 2), (MARK, 2)]


def test_a_new_link_needs_no_mark_for_its_first_cast(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.await_casts()
    assert not cast(left, 7)
    left.send(call(1))
    assert sent(right) == [(MARK, 7), (CALL, 1)]


def test_a_finaliser_that_sends_while_a_mark_is_written(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.await_casts()
    left.casts = 1

    class Collecting:
        """A socket whose use runs a finaliser, as a garbage collection may."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

        def send(self, data: bytes) -> int:
            left.sock = self.sock
            left.send(call(7))
            return self.sock.send(data)

    left.sock = Collecting(left.sock)  # type: ignore[assignment]
    thread = threading.Thread(target=left.mark, args=(1,), daemon=True)
    thread.start()
    thread.join(20)
    stuck = thread.is_alive()
    if stuck:  # free the thread, or the fixture waits for the same lock
        left._lock.release()
    assert not stuck, "it waits for itself"
    assert sent(right) == [(MARK, 1), (CALL, 7)]


def test_what_a_finaliser_sends_after_a_cast_is_marked(ends: tuple[Link, Link]) -> None:
    left, right = ends
    left.await_casts()
    left.casts = 1
    with left._holding():
        left.send(call(7))
    assert left.used
    assert sent(right) == [(MARK, 1), (CALL, 7)]
