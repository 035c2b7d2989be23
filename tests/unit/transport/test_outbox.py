"""An outbox sends all bytes once and in order, wherever the socket cuts them."""

import errno
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.transport.outbox import Outbox


class Cutting:
    """A socket that takes these numbers of bytes, then all; 0: it is full at that call."""

    def __init__(self, takes: list[int]) -> None:
        self.takes = takes
        self.taken = b""
        self.offered = b""

    def sendmsg(self, buffers: list[memoryview], /) -> int:
        self.offered = b"".join(buffers)
        take = self.takes.pop(0) if self.takes else len(self.offered)
        if not take and self.offered:
            raise BlockingIOError(errno.EAGAIN, "full")
        self.taken += self.offered[:take]
        return min(take, len(self.offered))


def outbox_of(parts: list[bytes]) -> Outbox:
    outbox = Outbox()
    outbox.extend(map(memoryview, parts))
    return outbox


PARTS = [b"abc", b"", b"d", b"efgh", b"", b"ij"]
WHOLE = b"".join(PARTS)


@pytest.mark.parametrize("first", range(1, len(WHOLE)))
def test_a_write_resumes_at_every_cut(first: int) -> None:
    for second in range(len(WHOLE) - first + 1):
        outbox, sock = outbox_of(PARTS), Cutting([first, second, 0])
        sizes = []
        while outbox:
            try:
                sizes.append(outbox.write(sock))
            except BlockingIOError:
                expected = WHOLE[len(sock.taken) :]
                assert expected == sock.offered == b"".join(outbox)
        assert len(WHOLE) == sum(sizes)
        assert sock.taken == WHOLE


@given(st.lists(st.lists(st.binary(max_size=5), max_size=4)), st.lists(st.integers(0, 9)))
def test_what_is_added_between_writes_follows(rounds: list[list[bytes]], takes: list[int]) -> None:
    outbox, sock = Outbox(), Cutting(takes)
    waiting = 0
    for parts in rounds:
        outbox.extend(map(memoryview, parts))
        waiting += sum(map(len, parts))
        if outbox:
            try:
                waiting -= outbox.write(sock)
            except BlockingIOError:
                continue
        assert waiting == sum(map(len, outbox))
    sock.takes = []
    while outbox:
        outbox.write(sock)
    assert sock.taken == b"".join(part for parts in rounds for part in parts)


def test_more_buffers_than_one_call_takes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = outbox_of([b"x"] * 5000)
        while outbox:
            outbox.write(ours)
        ours.close()
        with theirs.makefile("rb") as file:
            assert file.read() == b"x" * 5000


def test_an_error_removes_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        outbox = outbox_of([b"ab", b"c"])
        with pytest.raises(BrokenPipeError):
            outbox.write(ours)
        assert [bytes(part) for part in outbox] == [b"ab", b"c"]
