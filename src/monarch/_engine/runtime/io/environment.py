"""The runtime's environment: threads, waits, sockets, time and chance.

Code in `runtime` and `mesh` that starts or parks a thread, makes a socket pair, reads the clock or
draws a random number asks the environment (`current`). The environment here is the real world. The
simulator of `monarch.testing` installs another, under which the same procs, agents, mailboxes and
dispatch loops run in virtual time, one thread at a time, with chance from a seed.

A few modules use threads or the clock of the real world by themselves: they write to terminals,
dial, or watch real processes, and simulations have none of these. A test lists them with the
reasons.
"""

from __future__ import annotations

import _queue
import functools
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.errors import is_engine_frame
from monarch._engine.runtime.io.fault_file import note_failure
from monarch._engine.runtime.io.reactor import Reactor
from monarch._engine.runtime.io.slow_clock import SlowClock
from monarch._engine.runtime.io.stacks import Stack, stack_of_thread, stacks

if TYPE_CHECKING:
    import asyncio
    from types import CodeType

    from monarch._engine.base.failure import Failure
    from monarch._engine.runtime.actor.cell import Cell

__all__ = ["Clock", "Environment", "Event", "Parker", "Thread", "current", "install"]


_LOOK = 1.0  # seconds for threads and a loop to notice the outcome they wait for
_ARRIVAL = 0.05  # seconds for the answers of a call, which a failure may overtake


class Parker(Protocol):
    """A place where one thread waits once: `release` ends `acquire`, in either order."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


class Event(Protocol):
    """A place where any number of threads wait until `set`."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def set(self) -> None: ...


class Clock(Protocol):
    """A source of timers."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> None: ...


class Thread(Protocol):
    """A thread beside the actors."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Environment:
    """The real world."""

    longest_wait = 0.5
    """Seconds after which a thread that waits looks for signals; -1: no limit."""

    loops_stall = True
    """Whether time passes while an event loop is blocked."""

    has_seats = hasattr(select, "epoll") and hasattr(os, "eventfd")
    """Whether idle actors can read links, see `runtime.actor.seat`."""

    jobs_outlive = True
    """Whether a job can outlive its script and be re-attached by another one."""

    def reactor(self) -> Reactor:
        """Return the object that fires a proc's timers and moves its bytes."""
        return Reactor()

    def mailbox(self) -> Any:
        """Return a queue whose `get` parks the one thread that empties it."""
        queue: type[Any] = _queue.SimpleQueue
        return queue()

    def parker(self) -> Parker:
        """Return a fresh `Parker`."""
        lock = threading.Lock()
        lock.acquire()
        return lock

    def event(self) -> Event:
        """Return a fresh `Event`."""
        return threading.Event()

    def socket_pair(self) -> tuple[socket.socket, socket.socket]:
        """Return two connected sockets; one of them is for another process of this host."""
        return socket.socketpair()

    def socket_of(self, descriptor: int) -> socket.socket:
        """Return the socket of a descriptor, which it owns."""
        return socket.socket(fileno=descriptor)

    def connect(self, address: tuple[str, int], timeout: float) -> socket.socket:
        """Return a TCP connection; blocks. Raises OSError."""
        return socket.create_connection(address, timeout)

    def listen(self, address: str) -> socket.socket:
        """Return a TCP socket that listens at a free port of an IP address. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family)

    def clock(self) -> Clock:
        """Return the source of a proc's timers that are not urgent."""
        return SlowClock()

    def start_actor(self, cell: Cell, run: Callable[[Cell], None]) -> None:
        """Run the loop of an actor on a thread of its own."""
        name = "monarch-actor-event-loop" if cell.is_async else "monarch-actor-driver"

        def serve() -> None:
            cell.thread_id = threading.get_ident()
            run(cell)

        threading.Thread(target=serve, name=name, daemon=True).start()

    def start_thread(self, name: str, run: Callable[[], None]) -> Thread:
        """Run a function on a thread of its own."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def interrupt_main(self) -> bool:
        """Make the user's main thread raise KeyboardInterrupt, also out of a sleep or a join.

        A program that ignores SIGINT, as one does that a shell script started in the background, is
        ended by SIGTERM. Returns False, without an effect, if the main thread has left the program:
        it prints the exception that ended the program (which an interrupt would garble), or the
        interpreter is exiting.
        """
        import signal  # imported late: only an unhandled fault needs it

        main = threading.main_thread().ident or 0
        steps = stack_of_thread(main).steps
        if self.is_traceback_printed() or not steps or is_engine_frame(steps[-1].file):
            return False
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.pthread_kill(main, signal.SIGTERM if ignored else signal.SIGINT)
        return True

    def is_traceback_printed(self) -> bool:
        """Whether the main thread has left the program, to print the exception that ended it."""
        import traceback

        steps = stack_of_thread(threading.main_thread().ident).steps
        return not steps or steps[-1].file == traceback.__file__

    def let_waits_end(self, looks: Callable[[Stack], bool | None], inside: CodeType) -> None:
        """Wait until no thread is about to notice an outcome, at most `_LOOK` seconds.

        `looks` says whether a thread with this stack, which has the variables of the code `inside`,
        is about to; None if it waits for an outcome that is not there, which gets `_ARRIVAL`
        seconds. The event loop of the main thread gets a few turns, for its tasks.
        """
        pause = threading.Event()
        passed, begin = 0.0, time.monotonic()
        while passed < _LOOK:
            found = [*map(looks, stacks(inside).values())]
            if not any(found) and not (None in found and passed < _ARRIVAL):
                break
            pause.wait(0.001)
            passed = time.monotonic() - begin
        loop = _loop_of_main_thread()
        if loop is not None:
            turned = threading.Event()
            step: Callable[[], object] = turned.set
            for _ in range(3):  # the future, its task, and the awaiter of the task
                step = functools.partial(loop.call_soon, step)
            try:
                loop.call_soon_threadsafe(step)
            except RuntimeError:  # the loop is closed
                return
            turned.wait(_LOOK)

    def note_failure(self, failure: Failure) -> None:
        """Note a failure that has reached the root, see `fault_file`."""
        note_failure(failure.root.verdict.when, failure.report())

    now = staticmethod(time.monotonic)
    """Return seconds on a clock that only goes forward. Actors call it for each message."""

    def wall_time(self) -> float:
        """Return seconds since 1970."""
        return time.time()  # noqa: TID251 - the only call of the wall clock

    def chance(self, count: int) -> int:
        """Return a random number below `count`."""
        # No generator with a state: a forked process must not repeat its parent's choices.
        return int.from_bytes(os.urandom(8), "little") % count  # noqa: TID251


def _loop_of_main_thread() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs on the main thread, if one does."""
    events = sys.modules.get("asyncio.base_events")
    if events is None:
        return None
    run_forever = events.BaseEventLoop.run_forever.__code__
    running = stack_of_thread(threading.main_thread().ident, run_forever).variables
    return running[0]["self"] if running else None


current = Environment()


def install(driver: Environment) -> Environment:
    """Make `driver` the current environment and return the former."""
    global current
    former, current = current, driver
    return former
