"""Long awaits: what the task that serves an async actor waits for.

At each check of the watch the suspended coroutines of the task are inspected on the actor's loop,
where they cannot change meanwhile. So an await only pays for the test of one slot of the gate.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._deadlock.long_wait import Answer, LongWait, place_of
from monarch._spi import Future, is_engine_frame, stack_of_task

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from monarch._spi import Cell, DeadlockError, LoopGate

__all__ = ["Awaits"]

_AWAIT = vars(Future)["_await"].__code__
"""Code of the generator that awaits ``self``, until it has ``arrived``."""


class _Await(NamedTuple):
    answer: Answer
    arrived: asyncio.Future[None]  # a new one for each await
    place: str


class Awaits:
    """Watches the serving task of one actor.

    Args:
        cell: the actor.
        gate: the gate of its loop; it reports awaits while `on_wait` is set.
        task: the task that serves the mailbox.
        look_at: makes the watch call a function at its next check.
        begin: reports a long wait.
    """

    def __init__(
        self,
        cell: Cell,
        gate: LoopGate,
        task: asyncio.Task[Any],
        look_at: Callable[[Callable[[], None]], None],
        begin: Callable[[LongWait], None],
    ) -> None:
        self._cell = cell
        self._gate = gate
        self._task = task
        self._look_at = look_at
        self._begin = begin
        self._seen: asyncio.Future[None] | None = None  # found at the last check
        self._told: asyncio.Future[None] | None = None  # reported to the watch
        gate.on_wait = self._await

    def _await(self, arrived: asyncio.Future[None]) -> None:
        self._gate.on_wait = None
        self._seen = arrived
        self._look_at(self._ask)

    def _ask(self) -> None:
        self._gate.post(self._look, None)

    def _look(self, _: None) -> None:
        found = _awaited(self._task)
        if self._cell.grave is not None:
            return
        if found is not None and found.arrived not in (self._seen, self._told):
            self._seen = found.arrived  # the await may be new
            self._look_at(self._ask)
            return
        self._gate.on_wait = self._await
        self._seen = None
        # Any process may send to a port, so a wait for its message proves no deadlock.
        if found is None or not hasattr(found.answer, "_unanswered"):
            return
        if found.arrived is not self._told and not _is_limited(self._task):
            self._told = found.arrived
            self._begin(_Suspended(self._cell, found, self._gate))


class _Suspended(LongWait):
    """A serving task that waits."""

    def __init__(self, cell: Cell, found: _Await, gate: LoopGate) -> None:
        super().__init__(cell, found.answer, found.place)
        self._arrived = weakref.ref(found.arrived)
        self._gate = gate

    @property
    def standing(self) -> bool:
        arrived = self._arrived()
        return arrived is not None and not arrived.done() and super().standing

    def fail(self, error: DeadlockError) -> None:
        arrived = self._arrived()
        if arrived is not None:
            self._gate.post(_raise, (arrived, error))


def _raise(wait: tuple[asyncio.Future[None], DeadlockError]) -> None:
    arrived, error = wait
    if not arrived.done():
        arrived.set_exception(error)


def _awaited(task: asyncio.Task[Any]) -> _Await | None:
    """Return the answer that a suspended task waits for, or None if it waits for something else."""
    stack = stack_of_task(task, _AWAIT)
    if not stack.variables:
        return None
    place = ""
    for step in stack.steps:  # the outermost first
        if step.code is _AWAIT:
            break
        if not is_engine_frame(step.file):
            place = place_of(step.code, step.line)
    local = stack.variables[0]
    return _Await(local["self"], local["arrived"], place)


def _is_limited(task: asyncio.Task[Any]) -> bool:
    """Whether a timer will cancel `task`: `asyncio.timeout`, its relatives, a plain call_later.

    Their timers call a method of the task, or of an object that holds it. A loop that hides its
    timers is assumed to have one.
    """
    timers = getattr(task.get_loop(), "_scheduled", None)
    if timers is None:
        return True
    for timer in timers:
        owner = getattr(timer._callback, "__self__", None)
        if owner is not None and not timer.cancelled():
            held = [owner, *gc.get_referents(owner), *getattr(owner, "__dict__", {}).values()]
            if any(thing is task for thing in held):
                return True
    return False
