"""What the runtime takes from the world: threads, waits, time and chance.

Everything in `runtime` and `mesh` that would start a thread, park one, read the clock or draw a
random number asks the driver (`current`). The one here is the real world. The simulator of
`monarch.testing` installs another, under which the very same procs, mailboxes and dispatch loops
run in virtual time, one thread at a time, with chance from a seed.
"""

from __future__ import annotations

import _queue
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.errors import is_engine_frame
from monarch._engine.runtime.reactor import Reactor
from monarch._engine.runtime.slow_clock import SlowClock

if TYPE_CHECKING:
    from monarch._engine.runtime.cell import Cell

__all__ = ["Clock", "Driver", "Event", "Parker", "Thread", "current", "install"]


class Parker(Protocol):
    """Where one thread waits once: `release` lets `acquire` go, whichever comes first."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


class Event(Protocol):
    """Where any number of threads wait until `set`."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def set(self) -> None: ...


class Clock(Protocol):
    """Timers."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> None: ...


class Thread(Protocol):
    """Something that runs aside."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Driver:
    """The real world."""

    loops_stall = True
    """Whether time goes on while an event loop stands still."""

    jobs_outlive = True
    """Whether a job can be kept for another script."""

    def reactor(self) -> Reactor:
        """What fires a proc's timers and moves its bytes."""
        return Reactor()

    def mailbox(self) -> Any:
        """A queue whose `get` parks the one thread that empties it."""
        queue: type[Any] = _queue.SimpleQueue
        return queue()

    def parker(self) -> Parker:
        """A fresh `Parker`."""
        lock = threading.Lock()
        lock.acquire()
        return lock

    def event(self) -> Event:
        """A fresh `Event`."""
        return threading.Event()

    def clock(self) -> Clock:
        """What fires the timers of a proc that are in no hurry."""
        return SlowClock()

    def start_actor(self, cell: Cell, run: Callable[[Cell], None]) -> None:
        """Run the loop of an actor on a thread of its own."""
        name = "monarch-actor-event-loop" if cell.is_async else "monarch-actor-driver"

        def serve() -> None:
            cell.thread_id = threading.get_ident()
            run(cell)

        threading.Thread(target=serve, name=name, daemon=True).start()

    def start_thread(self, name: str, run: Callable[[], None]) -> Thread:
        """Run something aside."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def interrupt_main(self) -> bool:
        """Make the user's main thread raise KeyboardInterrupt, also out of a sleep or a join.

        A program that ignores SIGINT, as those do that a shell script starts in the background, is
        ended by SIGTERM. False, and nothing is done, if the main thread has left the program: an
        exception is being printed that ended it (which an interrupt would garble), or we are at
        its exit.
        """
        import signal  # only an unhandled fault comes here
        import traceback

        main = threading.main_thread().ident or 0
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_back is not None:
            frame = frame.f_back
        if frame is None:
            return False
        began = frame.f_code.co_filename
        if began == traceback.__file__ or is_engine_frame(began):
            return False
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.pthread_kill(main, signal.SIGTERM if ignored else signal.SIGINT)
        return True

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""
        return time.monotonic()

    def wall_time(self) -> float:
        """Seconds since the epoch."""
        return time.time()  # noqa: TID251 - this is where it comes from

    def chance(self, count: int) -> int:
        """A random number below `count`."""
        # Not a generator with a state: a forked process must not repeat its parent's choices.
        return int.from_bytes(os.urandom(8), "little") % count  # noqa: TID251


current = Driver()


def install(driver: Driver) -> Driver:
    """Make `driver` the current one; the former."""
    global current
    former, current = current, driver
    return former
