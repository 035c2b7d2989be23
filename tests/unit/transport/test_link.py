"""A link over a real socket pair: order, limits, descriptors, loss."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import socket
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from monarch._engine.base.errors import ProtocolError
from monarch._engine.transport.link import Link
from monarch._engine.wire.frame import CALL, pack

from .conftest import SCRATCH, End, open_fds

Ends = Callable[..., tuple[End, End]]


def frame(number: int, size: int = 8, nfd: int = 0) -> bytes:
    return pack(CALL, number, 0, 0, b"", bytes(size), 0, nfd)


def settle(sender: End, receiver: End) -> None:
    """Move bytes until neither side has any left."""
    idle = 0
    while idle < 2:
        moved = receiver.read()
        sender.flush()
        idle = 0 if moved or sender.waits else idle + 1


def test_frames_arrive_in_the_order_they_were_sent(ends: Ends) -> None:
    left, right = ends(buffer=4096)
    sizes = [1, 100_000, 0, 70_000, 3, 65_536, 65_537, 10, 300_000, 1] * 3
    for number, size in enumerate(sizes):
        assert left.link.send(frame(number, size))
    settle(left, right)
    assert [(f.dest, len(f.body)) for f in right.frames] == list(enumerate(sizes))
    assert left.link.queued == 0


def test_both_directions_at_once(ends: Ends) -> None:
    left, right = ends(buffer=4096)
    for number in range(50):
        left.link.send(frame(number, 5000))
        right.link.send(frame(number, 7000))
    for _ in range(10_000):
        left.read(), right.read()
        left.flush(), right.flush()
        if len(left.frames) == len(right.frames) == 50:
            break
    assert [f.dest for f in left.frames] == [f.dest for f in right.frames] == list(range(50))


def test_the_reactor_is_asked_once_per_queue(ends: Ends) -> None:
    left, right = ends(buffer=4096)
    for number in range(20):
        left.link.send(frame(number, 50_000))
    assert left.wants == 1
    settle(left, right)
    for number in range(20):
        left.link.send(frame(number, 50_000))
    assert left.wants == 2


def test_room_is_awaited_and_given(ends: Ends) -> None:
    left, right = ends(queue_limit=100_000, buffer=4096)
    while left.link.queued <= left.link.queue_limit:
        left.link.send(frame(0, 50_000))
    assert not left.link.wait_room(0)
    woken = threading.Event()
    thread = threading.Thread(target=lambda: left.link.wait_room(60) and woken.set())
    thread.start()
    settle(left, right)
    assert woken.wait(60)
    thread.join()


def test_a_peer_that_is_slow_is_waited_for(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit restarts whenever the peer has taken some bytes."""
    left, right = ends(queue_limit=100_000, buffer=4096)
    while left.link.queued <= 2 * left.link.queue_limit:
        left.link.send(frame(0, 50_000))
    waits: list[float] = []

    class Waiter:
        """A lock that is never released in time."""

        def acquire(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                waits.append(timeout)
                if len(waits) < 3:
                    right.read()
                    left.flush()
            return timeout is None

        def release(self) -> None:
            pass

    monkeypatch.setattr("monarch._engine.transport.link.threading", SimpleNamespace(Lock=Waiter))
    assert not left.link.wait_room(60)
    assert len(waits) == 3


@pytest.mark.parametrize("how", ["lose", "peer"])
def test_loss_wakes_those_who_wait_for_room(ends: Ends, how: str) -> None:
    left, right = ends(queue_limit=10, buffer=4096)
    while left.link.queued <= left.link.queue_limit:
        left.link.send(frame(0, 50_000))
    woken = threading.Event()
    thread = threading.Thread(target=lambda: left.link.wait_room(60) and woken.set())
    thread.start()
    if how == "lose":
        left.link.lose("told so")
    else:
        right.link.close("gone")
        left.link.flush()
    assert woken.wait(60)
    thread.join()
    assert left.link.lost
    assert left.link.queued == 0
    assert not left.link.send(frame(1))


def marked(number: int) -> int:
    """Return a descriptor of an empty memory file whose size is `number`."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, number)
    return fd


def test_descriptors_follow_their_frames(ends: Ends) -> None:
    left, right = ends(buffer=4096)
    before = open_fds()
    counts = [0, 1, 3, 0, 2, 1, 250, 0, 1] * 3
    number = 0
    for index, count in enumerate(counts):
        fds = [marked(number := number + 1) for _ in range(count)]
        assert left.link.send(frame(index, 20_000, nfd=count), fds)
        for fd in fds:
            os.close(fd)
    settle(left, right)
    seen = []
    for f in right.frames:
        fds = right.link.take_fds(f.nfd)
        seen += [os.fstat(fd).st_size for fd in fds]
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
        for fd in fds:
            os.close(fd)
    assert [f.nfd for f in right.frames] == counts
    assert seen == list(range(1, number + 1))
    assert open_fds() == before


def test_loss_closes_descriptors_on_both_sides(ends: Ends) -> None:
    left, right = ends(buffer=4096)
    before = open_fds()
    fd = marked(1)
    for number in range(40):  # the first few arrive and are not taken, the others stay queued
        left.link.send(frame(number, 3000, nfd=1), [fd])
    os.close(fd)
    right.read()
    right.link.lose("enough")
    left.link.lose("enough")
    assert open_fds() == before


def test_a_frame_that_claims_more_descriptors_than_came(ends: Ends) -> None:
    left, right = ends()
    left.link.send(frame(0, nfd=2))
    right.read()
    with pytest.raises(ProtocolError, match=r"proc b.*2 descriptors, 0 arrived"):
        right.link.take_fds(right.frames[0].nfd)


def test_end_of_file_is_loss(ends: Ends) -> None:
    left, right = ends()
    left.link.send(frame(7))
    left.link.close("done")
    right.read()
    assert [f.dest for f in right.frames] == [7]
    assert right.link.lost is None
    right.read()
    assert right.link.lost == "proc b closed the connection"


def test_end_of_file_inside_a_message_says_so(ends: Ends) -> None:
    left, right = ends()
    left.link.sock.send(frame(7)[:-1])
    left.link.close("done")
    right.read()
    right.read()
    assert right.link.lost == "proc b closed the connection in the middle of a message"


def test_a_failed_write_is_loss(ends: Ends) -> None:
    left, right = ends()
    right.link.close("gone")
    assert not left.link.send(frame(1))
    assert "proc a" in (left.link.lost or "")
    assert not left.link.send(frame(1))


def test_garbage_loses_the_link_and_names_the_peer(ends: Ends) -> None:
    left, right = ends()
    left.link.sock.send(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
    with pytest.raises(ProtocolError, match="proc b"):
        right.link.receive(SCRATCH)
    assert "protocol error" in (right.link.lost or "")


def test_the_first_reason_is_kept(ends: Ends) -> None:
    left, _ = ends()
    left.link.lose("first")
    left.link.lose("second")
    left.link.close("third")
    assert left.link.lost == "first"


def test_senders_in_many_threads_keep_frames_whole_and_each_in_order(ends: Ends) -> None:
    left, right = ends(buffer=8192, queue_limit=1 << 30)
    per_thread, threads = 200, 6

    def send(who: int) -> None:
        for number in range(per_thread):
            left.link.send(frame(who << 32 | number, (number * 977) % 20_000))

    senders = [threading.Thread(target=send, args=(who,)) for who in range(threads)]
    for thread in senders:
        thread.start()
    while len(right.frames) < per_thread * threads:
        right.read()
        left.flush()
    for thread in senders:
        thread.join()
    for who in range(threads):
        mine = [f.dest & 0xFFFFFFFF for f in right.frames if f.dest >> 32 == who]
        assert mine == list(range(per_thread))


def test_a_finaliser_that_sends_while_the_link_is_sending(ends: Ends) -> None:
    """The collector may run anywhere, so `__del__` of user objects may send on a busy link."""
    left, right = ends(buffer=4096, queue_limit=1 << 30)
    before = open_fds()
    fd = marked(1)

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            left.link.send(frame(1 << 40, nfd=1), [fd])

    class Collecting(list[int]):
        """A list of descriptors whose use runs the collector, as any allocation may."""

        def __bool__(self) -> bool:
            gc.collect()
            return bool(len(self))

    def send() -> None:
        for number in range(20):
            Cycle()
            left.link.send(frame(number, 3000, nfd=1), Collecting([fd]))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(60)
    stuck = thread.is_alive()
    if stuck:  # free the thread, or the fixtures wait for the same lock
        left.link._lock.release()
        thread.join(60)
    os.close(fd)
    assert not stuck, "a send inside a send waits for itself"
    settle(left, right)
    assert [f.dest for f in right.frames if f.dest < 1 << 40] == list(range(20))
    right.link.lose("enough")
    assert open_fds() == before


def test_a_link_that_is_given_up_in_a_forked_child_takes_nothing_more(ends: Ends) -> None:
    """The fork came from a finaliser, while its thread was sending: the child has that thread."""
    left, _ = ends()
    left.link._lock.acquire()
    left.link._owner = threading.get_ident()
    left.link.abandon("the process was forked")
    before = open_fds()
    assert not left.link.send(frame(1, nfd=1), [0])
    assert open_fds() == before
    assert left.link._nested == []
    left.link.close("over")  # the lock is free


def test_a_link_is_collected(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, "proc a", lambda link, on: None, 1000, 1000)
    dead = weakref.ref(link)
    link.close("over")
    theirs.close()
    del link
    assert dead() is None


def test_descriptors_that_do_not_fit_are_missing_and_leave_none_open(ends: Ends) -> None:
    """A process at its limit gets some of the descriptors; the other data is intact."""
    left, right = ends()
    gc.collect()
    before = open_fds()
    fds = [os.dup(0) for _ in range(8)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in (1, 2):
        left.link.send(frame(number, nfd=8), fds)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 3, hard))
    try:
        while len(right.frames) < 2:
            right.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert right.link.lost is None
    assert right.link.take_fds_if_any(8) is None
    with pytest.raises(ProtocolError, match="more descriptors than this process may open"):
        right.link.take_fds(8)
    left.link.send(frame(3, nfd=8), fds)
    right.read()
    for fd in [*fds, *right.link.take_fds(8)]:
        os.close(fd)
    right.link.close("over")
    left.link.close("over")
    assert len(open_fds()) <= len(before)
