"""The environment of a simulation: provides virtual time, simulated threads and randomness.

Calls from an OS thread that does not belong to the simulation go to the environment that was
installed before, since a real runtime may be active in the same process.
"""

from __future__ import annotations

import _queue
import socket
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from monarch._engine.runtime.actor.dispatch import construct, serve_sync
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.reactor import Timer
from monarch._engine.wire.frame import CALL
from monarch.testing.loop import ActorLoop
from monarch.testing.scheduler import JITTER, Entry, Place, Scheduler, Strand, Wait
from monarch.testing.stream import FIRST_DESCRIPTOR, Streams

if TYPE_CHECKING:
    from types import CodeType

    from monarch._engine.base.failure import Failure
    from monarch._engine.runtime.actor.cell import Cell
    from monarch._engine.runtime.io.stacks import Stack
    from monarch.testing.network import Network

__all__ = ["SimEnvironment", "background_reactor"]

EPOCH = 1_700_000_000.0
"""The wall time at which simulations start."""


class _Idle(BaseException):
    """Leaves the loop of a sync actor that has processed its message, or has none."""


class SimReactor:
    """Has the interface of a `Reactor`; callbacks and timers are steps.

    Those of an agent are background steps: its heartbeats go on as long as there are other hosts.
    """

    def __init__(self, streams: Streams, *, background: bool = False) -> None:
        self._streams = streams
        self._scheduler = scheduler = streams.scheduler
        self._book = scheduler.aside if background else scheduler.at
        self.scratch = streams.scratch
        self._soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.place: Place = Place("?")  # a placeholder, replaced by the process's own
        self.on_stop: Callable[[], None] = lambda: None

    @property
    def ident(self) -> int:
        """The thread that it runs on: the current one, unless a strand runs."""
        return get_ident() if self._scheduler.strand is None else 0

    def start(self, name: str) -> None:
        """Do nothing: the scheduler runs it."""

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        if not self._soon:
            scheduler, place = self._scheduler, self.place
            when = scheduler.now + scheduler.random.random() * JITTER + place.lag
            self._book(when, place, self._drain)
        self._soon.append((callback, args))

    def call_later(self, delay: float, callback: Callable[[], None]) -> SimTimer:
        return self.call_at(self._scheduler.now + delay, callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> SimTimer:
        when = max(when, self._scheduler.now)
        entry = self._book(when, self.place, callback)
        return SimTimer(when, callback, self._scheduler, entry)

    def register(self, fd: int, callback: Callable[[int], None]) -> None:
        self._streams.end(fd).watch(self.place, callback)

    def watch_writes(self, fd: int, on: bool) -> None:
        self.watch(fd, reads=True, writes=on)

    def watch(self, fd: int, *, reads: bool, writes: bool) -> None:
        end = self._streams.find(fd)
        if end is not None:
            end.interest(reads=reads, writes=writes)

    def unregister(self, fd: int) -> None:
        end = self._streams.find(fd)
        if end is not None:
            end.unwatch()

    def stop(self) -> None:
        self._scheduler.soon(self.place, self.on_stop)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _drain(self) -> None:
        soon = self._soon
        while soon:
            callback, args = soon.popleft()
            callback(*args)


def background_reactor(streams: Streams, place: Place) -> Any:
    """Return the reactor of an agent or a worker, which is at `place`; see `SimReactor`."""
    reactor = SimReactor(streams, background=True)
    reactor.place = place
    return reactor


class SimTimer(Timer):
    """A timer; after it is cancelled, virtual time does not advance for it."""

    __slots__ = ("_entry", "_scheduler")

    def __init__(
        self, when: float, callback: Callable[[], None], scheduler: Scheduler, entry: Entry
    ) -> None:
        super().__init__(when, callback)
        self._scheduler = scheduler
        self._entry = entry

    def cancel(self) -> None:
        self._scheduler.cancel(self._entry)


class SimMailbox:
    """The mailbox of a sync actor; `get` returns one message in each step."""

    __slots__ = ("items", "strand")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.strand: SyncActor | None = None

    def put(self, item: Any) -> None:
        self.items.append(item)
        strand = self.strand
        if strand is not None and not strand.booked:
            strand.book()

    def get(self) -> Any:
        strand = self.strand
        if strand is None or strand.served or not self.items:
            raise _Idle
        strand.served = True
        item = self.items.popleft()
        if strand.scheduler.on_run is not None and item is not None and item[1].kind == CALL:
            strand.scheduler.on_run(strand._cell, strand)
        return item

    def get_nowait(self) -> Any:
        try:
            return self.items.popleft()
        except IndexError:
            raise _queue.Empty from None

    def qsize(self) -> int:
        return len(self.items)


class AsyncMailbox(deque[Any]):
    """The mailbox of an async actor; its loop takes messages by `popleft`."""

    strand: ActorLoop

    def popleft(self) -> Any:
        item = super().popleft()
        scheduler = self.strand.scheduler
        if scheduler.on_run is not None and item[1].kind == CALL:
            scheduler.on_run(self.strand._cell, self.strand)
        return item


class SyncActor(Strand):
    """The strand of a sync actor: runs the real loop, which it enters anew for each message."""

    __slots__ = ("_begun", "_cell", "booked", "scheduler", "served")

    def __init__(self, cell: Cell, place: Place, scheduler: Scheduler) -> None:
        super().__init__(str(cell.identity.display), place)
        self._cell = cell
        self.scheduler = scheduler
        self._begun = False
        self.booked = False  # whether a step is scheduled or running
        self.served = False  # whether this step has taken its message
        cell.mailbox.strand = self
        self.book()

    def book(self) -> None:
        self.booked = True
        self.scheduler.soon(self.place, self._step)

    def _enter(self) -> None:
        """Do what `run_sync` does, one part in each step."""
        if not self._begun:
            self._begun = True
            if not construct(self._cell):
                return
        serve_sync(self._cell)

    def _step(self) -> None:
        scheduler = self.scheduler
        self.served = False
        scheduler.strand = self
        self._cell.thread_id = get_ident()
        try:
            self.context.run(self._enter)
            scheduler.strands.pop(self, None)  # the actor has ended
        except _Idle:
            pass
        finally:
            scheduler.strand = None
            self._cell.thread_id = 0  # this thread runs other strands next
        if self.doom is not None:
            scheduler.strand = self
            scheduler.strike(self)
            scheduler.strand = None
        self.booked = False
        if self._cell.mailbox.items:
            self.book()


class SimThread(Strand):
    """A strand with the interface of a `Thread`."""

    __slots__ = ("_alive", "_joins", "_run", "_scheduler")

    def __init__(
        self, name: str, place: Place, scheduler: Scheduler, run: Callable[[], None]
    ) -> None:
        super().__init__(f"thread {name!r} of {place.name}", place)
        self._scheduler = scheduler
        self._run = run
        self._alive = True
        self._joins: list[Wait] = []
        scheduler.soon(place, self._step)

    def _step(self) -> None:
        self._scheduler.strand = self
        try:
            self.context.run(self._run)
        finally:
            self._scheduler.strand = None
            self._alive = False
            self._scheduler.strands.pop(self, None)
            for wait in self._joins:
                wait.release()

    def join(self, timeout: float | None = None) -> None:
        if self._alive:
            wait = Wait(self._scheduler)
            self._joins.append(wait)
            self._scheduler.wait(wait, timeout)

    def is_alive(self) -> bool:
        return self._alive


class SimEvent:
    """Has the interface of an `Event`; strands wait for it."""

    __slots__ = ("_scheduler", "_set", "_waits")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waits: list[Wait] = []

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            wait = Wait(self._scheduler)
            self._waits.append(wait)
            self._scheduler.wait(wait, timeout)
        return self._set

    def set(self) -> None:
        self._set = True
        waits, self._waits = self._waits, []
        for wait in waits:
            wait.release()


class SimClock:
    """Timers of the current place whose steps are background steps; see `Scheduler.aside`."""

    def __init__(self, driver: SimEnvironment, scheduler: Scheduler) -> None:
        self._driver = driver
        self._scheduler = scheduler

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        scheduler = self._scheduler
        scheduler.aside(scheduler.now + delay, self._driver._here(), callback)


class SimEnvironment(environments.Environment):
    """The environment of one simulation, see the module.

    Args:
        scheduler: runs the steps.
        chance: the random generator for ids, delays and the endpoint method `choose`.
        former: the environment for threads that do not belong to the simulation.
    """

    loops_stall = False
    longest_wait = -1.0  # virtual time has no signals
    has_seats = False
    jobs_outlive = False

    def __init__(self, scheduler: Scheduler, chance: Any, former: environments.Environment) -> None:
        self._scheduler = scheduler
        self._chance = chance
        self._former = former
        self.streams = Streams(scheduler)
        self.network: Network  # set once there are hosts

    def _foreign(self) -> bool:
        return get_ident() not in self._scheduler.threads

    def _here(self) -> Place:
        """Return the place of the running strand or reactor."""
        strand = self._scheduler.strand
        if strand is not None:
            return strand.place
        place = self._scheduler.place
        assert place is not None, "no process runs"
        return place

    def reactor(self) -> Any:
        return self._former.reactor() if self._foreign() else SimReactor(self.streams)

    def mailbox(self) -> Any:
        return self._former.mailbox() if self._foreign() else SimMailbox()

    def parker(self) -> Any:
        return self._former.parker() if self._foreign() else Wait(self._scheduler)

    def event(self) -> Any:
        return self._former.event() if self._foreign() else SimEvent(self._scheduler)

    def socket_pair(self) -> tuple[socket.socket, socket.socket]:
        return self._former.socket_pair() if self._foreign() else self.streams.pair()

    def socket_of(self, descriptor: int) -> socket.socket:
        if descriptor < FIRST_DESCRIPTOR:
            return self._former.socket_of(descriptor)
        return self.streams.socket(descriptor)

    def connect(self, address: tuple[str, int], timeout: float) -> socket.socket:
        if self._foreign():
            return self._former.connect(address, timeout)
        return self.network.connect(self._here().machine, address, timeout)

    def listen(self, address: str) -> socket.socket:
        if self._foreign():
            return self._former.listen(address)
        return self.network.listen(self._here().machine)

    def clock(self) -> environments.Clock:
        return self._former.clock() if self._foreign() else SimClock(self, self._scheduler)

    def start_actor(self, cell: Cell, run: Callable[[Cell], None]) -> None:
        if self._foreign():
            self._former.start_actor(cell, run)
            return
        proc: Any = cell.proc
        place: Place = proc.place
        strand: Strand
        if cell.is_async:
            mailbox = cell.mailbox = AsyncMailbox(cell.mailbox)
            strand = mailbox.strand = ActorLoop(cell, place, self._scheduler, self.start_thread)
        else:
            strand = SyncActor(cell, place, self._scheduler)
        self._scheduler.strands[strand] = None

    def start_thread(self, name: str, run: Callable[[], None]) -> Any:
        if self._foreign():
            return self._former.start_thread(name, run)
        strand = SimThread(name, self._here(), self._scheduler, run)
        self._scheduler.strands[strand] = None
        return strand

    def interrupt_main(self) -> bool:
        if self._foreign():
            return self._former.interrupt_main()
        self._scheduler.interrupt_main()
        return True

    def is_traceback_printed(self) -> bool:
        return self._foreign() and self._former.is_traceback_printed()

    def let_waits_end(self, looks: Callable[[Stack], bool | None], inside: CodeType) -> None:
        if self._foreign():
            self._former.let_waits_end(looks, inside)
        else:  # every strand that is ready has its turn first
            self.parker().acquire(timeout=2 * JITTER)

    def note_failure(self, failure: Failure) -> None:
        if self._foreign():  # in a simulation the program handles a failure, or `simulate` raises
            self._former.note_failure(failure)

    def now(self) -> float:
        return self._former.now() if self._foreign() else self._scheduler.now

    def wall_time(self) -> float:
        return self._former.wall_time() if self._foreign() else EPOCH + self._scheduler.now

    def chance(self, count: int) -> int:
        if self._foreign():
            return self._former.chance(count)
        below: int = self._chance.randrange(count)
        return below
