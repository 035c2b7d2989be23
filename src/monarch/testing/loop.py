"""Event loops in virtual time, without descriptors.

A `SimLoop` is asyncio's own `BaseEventLoop`, with the scheduler's clock and an empty selector. The
loop of an async actor is *stepped*: each round of its callbacks is one step of the simulation, and
between rounds the loop is a heap entry, not a thread. A loop that user code runs itself
(`asyncio.run` in the script or in a sync actor) waits like any other strand.

Known limits: the loop overrides private methods of `BaseEventLoop`, so its tests run on each
Python. There are no sockets, pipes, subprocesses or signal handlers; user code that asks a loop for
them gets NotImplementedError.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import sys
import threading
import weakref
from asyncio import events
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings
from monarch._engine.runtime.actor.dispatch_async import _serve
from monarch._engine.runtime.io import bridge
from monarch.testing.scheduler import Entry, Place, Scheduler, Strand, Unwound, Wait
from monarch.testing.stacks import describe_tasks

if TYPE_CHECKING:
    from monarch._engine.runtime.actor.cell import Cell

__all__ = ["ActorLoop", "SimLoop", "discard_tasks"]

_SPIN = 8  # rounds that a loop takes without waiting, before other strands have a turn
_SPIN_TIME = 1e-6  # virtual seconds that pass when a loop has taken _SPIN rounds


class SimGate:
    """Runs callbacks on a loop for other strands; has the interface of `LoopGate`."""

    def __init__(self, loop: SimLoop) -> None:
        self.on_wait: Callable[[asyncio.Future[None]], None] | None = None
        self._loop = loop
        self._context = contextvars.copy_context()

    def post(self, callback: Callable[[Any], None], argument: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon(callback, argument, context=self._context)
            self._loop._write_to_self()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class SimLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time.

    `wake` is called when another strand gives the loop something to do.
    """

    if TYPE_CHECKING:  # attributes of the base class that its type stubs omit
        _asyncgen_finalizer_hook: Any
        _asyncgen_firstiter_hook: Any
        _ready: deque[Any]
        _run_once: Callable[[], None]
        _scheduled: list[Any]
        _thread_id: int | None
        _timer_cancelled_count: int

    def __init__(self, scheduler: Scheduler, start_thread: Callable[..., Any]) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._start_thread = start_thread
        self._selector = self
        self._clock_resolution = 1e-9
        self._wait: Wait | None = None
        self._spins = 0
        # asyncio keeps one set of tasks for all loops: with thousands of loops, slow to search.
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.wake: Callable[[], None] = self._release
        bridge._gates[self] = SimGate(self)  # type: ignore[assignment]

    def create_task(self, *args: Any, **kwargs: Any) -> Any:
        task = super().create_task(*args, **kwargs)
        self.tasks.add(task)
        return task

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that are not done, in no particular order."""
        return [task for task in self.tasks if not task.done()]

    def time(self) -> float:
        return self._scheduler.now

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there are no descriptors, so there are no events."""

    def _write_to_self(self) -> None:
        self.wake()

    def _release(self) -> None:
        if self._wait is not None:
            self._wait.release()

    def select(self, timeout: float | None) -> list[Any]:
        """Wait until there is something to do, as a selector. A stepped loop does not wait."""
        if self.wake != self._release:
            return []
        if timeout == 0:
            self._spins += 1
            if self._spins < _SPIN:
                return []
            timeout = _SPIN_TIME
        self._spins = 0
        self._wait = Wait(self._scheduler)
        try:
            self._scheduler.wait(self._wait, timeout)
        finally:
            self._wait = None
        return []

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Run `func` in a strand of its own, whatever the executor."""
        future = self.create_future()

        def settle(method: str, outcome: Any) -> None:
            if not future.done():
                getattr(future, method)(outcome)

        def run() -> None:
            try:
                result = func(*args)
            except Unwound:
                raise
            except BaseException as error:
                self.call_soon_threadsafe(settle, "set_exception", error)
            else:
                self.call_soon_threadsafe(settle, "set_result", result)

        self._start_thread("executor", run)
        return future


class ActorLoop(Strand):
    """The strand of an async actor: runs its event loop, one round in each step."""

    __slots__ = ("_cell", "_entry", "_life", "_ready", "_running", "loop", "scheduler")

    def __init__(
        self, cell: Cell, place: Place, scheduler: Scheduler, start_thread: Callable[..., Any]
    ) -> None:
        super().__init__(str(cell.identity.display), place)
        self._cell = cell
        self.scheduler = scheduler
        self._running = False
        self._ready = False  # whether the next step is scheduled for now, not for a timer
        self._entry: Entry | None = None  # the next step
        self.loop = self.context.run(SimLoop, scheduler, start_thread)
        self.loop.wake = self.wake
        self.task_stacks = lambda: describe_tasks(self.loop.unfinished())
        self._life = self.context.run(self.loop.create_task, _live(cell, self.loop))
        self.wake()

    def wake(self) -> None:
        """Schedule a step now, if none is scheduled or running."""
        if not self._running and not self._ready:
            if self._entry is not None:
                self.scheduler.cancel(self._entry)
            self._ready = True
            self._entry = self.scheduler.soon(self.place, self._step)

    def _step(self) -> None:
        scheduler, loop = self.scheduler, self.loop
        self._entry = None
        self._ready = False
        self._running = True
        scheduler.strand = self
        self._cell.thread_id = loop._thread_id = threading.get_ident()
        events._set_running_loop(loop)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(loop._asyncgen_firstiter_hook, loop._asyncgen_finalizer_hook)
        fatal: BaseException | None = None
        try:
            self.context.run(loop._run_once)
        except Unwound:
            raise
        except BaseException as error:  # KeyboardInterrupt or SystemExit, raised in a user's task
            fatal = error
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(None)
            loop._thread_id = None
            self._cell.thread_id = 0  # this thread runs other strands next
            scheduler.strand = None
            self._running = False
        if fatal is not None:
            self._cell.broken_by(fatal)
            self._end()
        else:
            if self.doom is not None:
                scheduler.strand = self
                scheduler.strike(self)
                scheduler.strand = None
            self._book()

    def _book(self) -> None:
        """Schedule the next step, or end the loop if the actor has ended."""
        loop = self.loop
        if loop._ready:
            self.wake()
            return
        if self._life.done():
            self._end()
            return
        timers = loop._scheduled
        while timers and timers[0]._cancelled:
            loop._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False
        if timers:
            when = max(timers[0]._when, self.scheduler.now)
            self._entry = self.scheduler.at(when, self.place, self._step)

    def _end(self) -> None:
        discard_tasks(self.loop)
        self.scheduler.strands.pop(self, None)


async def _live(cell: Cell, loop: SimLoop) -> None:
    """Do what `run_async` does on a thread: serve, then cancel the tasks that the user left."""
    try:
        await _serve(cell, loop)
    except Unwound:
        raise
    except BaseException as error:  # without this, callers would wait for an actor without a loop
        cell.broken_by(error)
    left = [task for task in loop.unfinished() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=settings.cleanup_timeout)
    await loop.shutdown_asyncgens()


def discard_tasks(loop: SimLoop) -> None:
    """Close a loop and the coroutines that still run on it, as the exit of a process would."""
    if loop.is_closed():
        return
    for task in loop.unfinished():
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine: Any = task.get_coro()
        for end in (lambda c=coroutine: c.throw(Unwound), coroutine.close):
            try:
                end()
            except (Unwound, StopIteration, RuntimeError):
                continue
    loop.close()
