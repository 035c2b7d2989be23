"""Links between simulated processes, with the interface of `transport.link.Link`.

A pair of `SimLink`s stands for a socket pair and two links. Each of the two directions has a kernel
buffer at the receiver's end, and the sender's queue behind it. Data in the buffer outlives the
sender; data in the queue is lost when the sender exits. The receiver is notified after a moment
that there is data, and reads it by the real `FrameReader`. Descriptors are ends of other pairs.
`check_link` (see `conformance`) holds this link and the real one to the same rules.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from monarch._engine.base.errors import ProtocolError
from monarch._engine.runtime.cast.sender import HEADS
from monarch._engine.transport.frame_link import Waiting
from monarch._engine.transport.link import mark
from monarch._engine.wire.frame import CALL, CAST, HEADER, Frame, FrameReader
from monarch.testing.scheduler import Place, Scheduler, Wait

__all__ = ["SimLink", "SimSocket", "socket_pair"]

CAPACITY = 212_992
"""The number of bytes that the kernel buffers for a receiver that does not read."""

LATENCY = 10e-6
"""The average time until data arrives at a process of the same host, in seconds."""


class SimSocket:
    """One end of a pair, before it is attached to a place."""

    __slots__ = ("link",)

    def __init__(self, link: SimLink) -> None:
        self.link = link

    def fileno(self) -> Any:
        """Return what `send` takes as a descriptor: the end itself."""
        return self.link

    def close(self) -> None:
        """Do nothing: the end was passed on, or is dropped with the host that holds it."""


class SimLink:
    """One end of a simulated link. Active once it is `attach`ed to a place."""

    __slots__ = (
        "_closed",
        "_ends",
        "_eof",
        "_inbox",
        "_inbox_size",
        "_noticed",
        "_outbox",
        "_taken",
        "_waiters",
        "born",
        "casts",
        "direct",
        "fileno",
        "lost",
        "marked",
        "on_ready",
        "on_room",
        "other",
        "owner",
        "paused",
        "peer",
        "place",
        "queue_limit",
        "queued",
        "reader",
        "released",
        "scheduler",
        "sock",
        "uid",
        "used",
    )

    other: SimLink

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.place: Place | None = None  # the process or host that holds this end
        self.on_ready: Callable[[SimLink], object] = lambda link: None
        self.on_room: Callable[[SimLink], object] | None = None  # called when the queue has drained
        self.peer = "?"
        self.fileno = 1 << 30  # the reactor's key for it; negative once unregistered
        self.sock = self
        self.uid = 0
        self.born: tuple[int, bool] | None = None
        self.casts = 0
        self.direct: object = None  # simulations have no direct connections
        self.used = True
        self.owner: Any = None
        self.queue_limit = 1 << 62
        self.queued = 0  # bytes in the sender's queue
        self.lost: str | None = None
        self.paused: dict[int, Waiting] = {}
        self.released: deque[int] = deque()
        self.reader = FrameReader(1 << 40, self.peer)
        self._inbox: deque[bytes] = deque()
        self._inbox_size = 0
        self._outbox: deque[tuple[bytes, list[Any]]] = deque()
        self._ends: deque[SimLink] = deque()  # descriptors that came with frames
        self._noticed = False  # whether a step that reads is scheduled
        self._closed = False
        self._eof = False  # whether the other end is closed and its data has arrived
        self._taken = 0  # bytes that have moved from the queue to the receiver
        self._waiters: list[Wait] = []

    def attach(
        self,
        place: Place,
        peer: str,
        on_ready: Callable[[SimLink], object],
        frame_limit: int,
        queue_limit: int,
    ) -> None:
        """Give this end to `place`, where `on_ready(link)` is called when data arrives."""
        self.place = place
        self.peer = self.reader.peer = peer
        self.on_ready = on_ready
        self.reader.limit = frame_limit
        self.queue_limit = queue_limit
        if self._inbox or self._eof:
            self._notice()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, data: bytes, fds: list[Any] | None = None) -> bool:
        """Send whole frames without blocking; return False if the link is lost."""
        scheduler = self.scheduler
        strand = scheduler.strand
        if strand is not None and strand.doom is not None:
            scheduler.strike(strand)
        if scheduler.on_send is not None:
            scheduler.on_send(self, data)
        if scheduler.books is not None:
            scheduler.books(self, data)
        if self.lost is None and self._eof:
            self._lose(f"the connection to {self.peer} broke: Broken pipe")
        if self.lost is not None:
            for end in fds or ():
                end.close("its descriptor could not be passed on")
            return False
        other = self.other
        if self._outbox or other._inbox_size >= CAPACITY:
            self._outbox.append((data, fds or []))
            self.queued += len(data)
        else:
            other._take(data, fds)
        return True

    def mark(self, number: int) -> None:
        """See `transport.link.Link.mark`."""
        self.await_casts()
        self.used = True
        self.mark(number)

    def await_casts(self) -> None:
        """See `transport.link.Link.await_casts`."""
        self.marked = 0
        self.used = False
        itself: Any = self
        itself.__class__ = SimCastLink

    def turn_back(self) -> None:
        """Do nothing: see `direct`."""

    def _take(self, data: bytes, ends: list[Any] | None) -> None:
        self._inbox.append(data)
        self._inbox_size += len(data)
        if ends:
            self._ends.extend(ends)
        if not self._noticed and self.place is not None:
            self._notice()

    def _notice(self) -> None:
        """Schedule a step in which the owner reads, after the latency of the link."""
        place = self.place
        if place is not None and not self._noticed:
            self._noticed = True
            scheduler = self.scheduler
            when = scheduler.now + LATENCY * (0.5 + scheduler.random.random()) + place.lag
            scheduler.at(when, place, self._ready)

    def _ready(self) -> None:
        self._noticed = False
        self.on_ready(self)

    def wait_room(self, timeout: float) -> bool:
        """See `transport.link.Link.wait_room`."""
        scheduler = self.scheduler
        taken, deadline = self._taken, scheduler.now + timeout
        while self.queued > self.queue_limit and self.lost is None:
            wait = Wait(scheduler)
            self._waiters.append(wait)
            if not wait.acquire(timeout=max(0.0, deadline - scheduler.now)):
                if self._taken == taken:
                    return False
                taken, deadline = self._taken, scheduler.now + timeout
        return True

    def _flush(self) -> None:
        """Move data from the sender's queue to the buffer: the receiver has read."""
        other = self.other
        while self._outbox and other._inbox_size < CAPACITY:
            data, ends = self._outbox.popleft()
            self.queued -= len(data)
            self._taken += len(data)
            other._take(data, ends)
        if self.queued <= self.queue_limit // 2:
            while self._waiters:
                self._waiters.pop().release()
        if not self.queued and self.on_room is not None:
            self.on_room(self)

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, scratch: object) -> list[Frame]:
        """Read the data that has arrived, once; return its complete frames. EOF sets `lost`."""
        data = self.read()
        if data is None:
            cut = "" if self.reader.idle else " in the middle of a message"
            self._lose(f"{self.peer} closed the connection{cut}")
        if not data:
            return []
        reader = self.reader
        view = memoryview(data)
        try:
            target = reader.target()
            if target is None:
                return reader.feed(view)
            frames: list[Frame] = []
            while target is not None and view:
                count = min(len(target), len(view))
                target[:count] = view[:count]
                target.release()
                frames += reader.filled(count)
                view = view[count:]
                target = reader.target()
            return frames + reader.feed(view) if view else frames
        except ProtocolError as error:
            self._lose(str(error))
            raise

    def read(self) -> bytes | None:
        """Return the bytes that have arrived, which may be none; None at EOF."""
        inbox = self._inbox
        if not inbox:
            return None if self._eof else b""
        data = inbox.popleft() if len(inbox) == 1 else b"".join(inbox)
        inbox.clear()
        self._inbox_size = 0
        other = self.other
        if other._outbox or other._waiters:
            other._flush()
        elif self._eof:
            self._notice()  # schedules the read that finds the EOF
        return data

    def take_fds(self, count: int) -> list[Any]:
        """Return the next `count` descriptors that came with frames."""
        if count > len(self._ends):
            raise ProtocolError(
                f"protocol error from {self.peer}: a frame names {count} descriptors, "
                f"{len(self._ends)} arrived"
            )
        return [self._ends.popleft() for _ in range(count)]

    take_fds_if_any = take_fds  # simulated processes have no limit on descriptors

    # -- closing ---------------------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """Give the link up: `send` returns False from now on. The other end is not notified."""
        self._lose(reason)

    def close(self, reason: str = "closed") -> None:
        """Give the link up and close this end: the other end sees EOF after the remaining data."""
        self._lose(reason)
        if not self._closed:
            self._closed = True
            self._inbox.clear()
            self._inbox_size = 0
            self.place = None
            self.other.ended()

    def ended(self) -> None:
        """Note that the other end is closed, and that all of its data has arrived."""
        self._eof = True
        self._notice()

    def shutdown(self, how: int) -> None:
        """Close both directions: both ends see EOF."""
        self.ended()
        self.other.ended()

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
        for _, ends in self._outbox:
            for end in ends:
                end.close("its descriptor was never passed on")
        self._outbox.clear()
        self.queued = 0
        while self._ends:
            self._ends.popleft().close("its descriptor was never taken")
        while self._waiters:
            self._waiters.pop().release()


class SimCastLink(SimLink):
    """A link to a process that casts also reach; see `transport.link.CastLink`."""

    __slots__ = ()

    marked: int

    def send(self, data: bytes, fds: list[Any] | None = None) -> bool:
        casts = self.casts
        if self.marked != casts:
            self.marked = casts
            super().send(mark(casts))
        self.used = True
        return super().send(data, fds)

    def mark(self, number: int) -> None:
        self.marked = number
        self.used = False
        super().send(mark(number))


class SentCall(NamedTuple):
    """A call that is being sent."""

    to: int
    actor: int
    port: int
    rank: int
    size: int
    flags: int


def calls_in(link: SimLink, data: bytes) -> Iterator[SentCall]:
    """Yield the calls in a frame: one in a CALL, one for each rank in a CAST of calls."""
    kind = data[4]
    if kind not in (CALL, CAST):
        return
    size, _, flags, meta_size, dest, port, rank, _, _ = HEADER.unpack_from(data)
    if kind == CALL:
        yield SentCall(link.uid, dest, port, rank, size, flags)
    elif rank == CALL:
        start = HEADER.size + meta_size
        new_size, plan_size = HEADS.unpack_from(data, start)
        at = start + HEADS.size
        *_, skip = json.loads(data[at : at + new_size])
        plan = json.loads(data[at + new_size : at + new_size + plan_size])
        sender: Any = link.place
        links = {each.born: each.uid for each in sender.proc.ends}
        size -= HEADS.size + new_size + plan_size
        for _, runs in plan:
            for uid, ours, first, count in runs:
                for step in range(count):
                    if first + step not in skip:
                        to = links[uid + step, bool(ours)]
                        yield SentCall(to, dest, port, first + step, size, flags)


def socket_pair(scheduler: Scheduler) -> tuple[SimSocket, SimSocket]:
    """Return two connected ends that are not attached yet."""
    left, right = SimLink(scheduler), SimLink(scheduler)
    left.other, right.other = right, left
    return SimSocket(left), SimSocket(right)
