"""Observation of an async actor's event loop: long awaits, and loops that are blocked.

`Awaits` reports the long await of the actor's serving task to the proc's `Watch`. At each check of
the watch it inspects the suspended coroutines, on the actor's loop, so an await only pays for the
test of one slot.

`Pulse` reports a loop that does not turn: no message, task or supervision of the actor makes
progress, without any error. While the actor has work, `Pulse` posts a callback to its loop and
checks for it four times in the time allowed. A blocked loop is reported and not failed: the actor
may be computing a result, although with the wrong means.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import traceback
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._engine.base.crash import is_runtime_frame
from monarch._engine.base.errors import DeadlockError, is_engine_frame
from monarch._engine.base.settings import settings
from monarch._engine.runtime.actor.cell import DEAD, Cell
from monarch._engine.runtime.actor.deadlock_watch import AWAITING, Answer, LongWait, place_of
from monarch._engine.runtime.io import environment as environments
from monarch._engine.wire.call_meta import route

if TYPE_CHECKING:
    from monarch._engine.runtime.io.bridge import LoopGate

__all__ = ["Awaits", "Pulse"]


# -- long awaits ---------------------------------------------------------------------------------


class _Await(NamedTuple):
    answer: Answer
    arrived: asyncio.Future[None]  # a new one for each await
    place: str


class Awaits:
    """See the module.

    Args:
        cell: the actor.
        gate: the gate of its loop; it reports awaits while `on_wait` is set.
        task: the task that serves the mailbox.
    """

    def __init__(self, cell: Cell, gate: LoopGate, task: asyncio.Task[Any]) -> None:
        self._cell = cell
        self._gate = gate
        self._task = task
        self._seen: asyncio.Future[None] | None = None  # found at the last check
        self._told: asyncio.Future[None] | None = None  # reported to the watch
        gate.on_wait = self._await

    def _await(self, arrived: asyncio.Future[None]) -> None:
        self._gate.on_wait = None
        self._seen = arrived
        self._cell.proc.watch.look_at(self._ask)

    def _ask(self) -> None:
        self._gate.post(self._look, None)

    def _look(self, _: None) -> None:
        found = _awaited(self._task)
        if self._cell.state is DEAD:
            return
        if found is not None and found.arrived not in (self._seen, self._told):
            self._seen = found.arrived  # the await may be new
            self._cell.proc.watch.look_at(self._ask)
            return
        self._gate.on_wait = self._await
        self._seen = None
        # Any process may send to a port, so a wait for its message proves no deadlock.
        if found is None or not hasattr(found.answer, "_unanswered"):
            return
        if found.arrived is not self._told and not _is_limited(self._task):
            self._told = found.arrived
            self._cell.proc.watch.begin(_Suspended(self._cell, found, self._gate))


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
    step: Any = task.get_coro()
    place = ""
    while step is not None:
        frame: FrameType | None = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)
        if frame is None:
            return None
        if frame.f_code in AWAITING:
            local = frame.f_locals
            return _Await(local["self"], local["arrived"], place)
        if not is_engine_frame(frame.f_code.co_filename):
            place = place_of(frame)
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
    return None


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


# -- standstill ----------------------------------------------------------------------------------

_CHECKS = 4  # in the time allowed


class Pulse:
    """See the module. `resting`: no check is due, so new work for the actor must call `start`."""

    def __init__(self, cell: Cell, gate: LoopGate) -> None:
        self._cell = cell
        self._gate = gate
        self._limit = settings.loop_stall_timeout if environments.current.loops_stall else 0.0
        self._due = False  # a check is scheduled
        self._asked: float | None = None  # time of the posted callback, while it has not run
        self._looks = 0  # checks since then, since a stopped process makes none
        self._told = False
        self.resting = self._limit > 0

    def start(self) -> None:
        """Begin to check, since the actor has work; from any thread."""
        self.resting = False
        self._cell.proc.watch.clock.call_later(0.0, self._later)

    def _later(self) -> None:
        if not self._due:
            self._due = True
            self._cell.proc.watch.clock.call_later(self._limit / _CHECKS, self._look)

    def _look(self) -> None:
        self._due = False
        cell = self._cell
        if cell.finished.is_set():
            return
        asked = self._asked
        if asked is None:
            self.resting = True  # set first: work that arrives from here on starts the checks again
            if cell.idle and not cell.aside:
                return
            self.resting = False
            self._looks = 0
            self._asked = environments.current.now()
            self._gate.post(self._turned, None)
        elif not self._told:
            self._looks += 1
            if self._looks == _CHECKS:
                self._told = True
                self._report(environments.current.now() - asked)
        self._later()

    def _turned(self, _: None) -> None:
        """Note on the loop that it turns."""
        asked, self._asked = self._asked, None
        if self._told and asked is not None:
            self._told = False
            seconds = environments.current.now() - asked
            _say(f"the event loop of {self._name} turns again, after {seconds:.1f} s")

    @property
    def _name(self) -> str:
        return f"{self._cell.identity.display} (pid {self._cell.proc.pid})"

    def _report(self, seconds: float) -> None:
        current = self._cell.current
        doing = f", in endpoint {route(current[1].meta)[0]!r}" if current is not None else ""
        stack: list[tuple[str, int, str, None]] = []
        frame = sys._current_frames().get(self._cell.thread_id)
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None))
            frame = frame.f_back
        while stack and is_runtime_frame(stack[-1][0]):
            stack.pop()
        text = (
            f"the event loop of {self._name} has not turned for {seconds:.1f} s{doing}; "
            "meanwhile this actor answers no message and none of its tasks runs. It is here:\n"
        )
        hint = (
            "Long work belongs into an actor whose endpoints are plain functions, or into `await "
            "asyncio.to_thread(...)`. (Configuration key: loop_stall_timeout, 0 for no report.)"
        )
        # A thread of its own, since reading source lines and writing to a terminal may block.
        tell = functools.partial(_say_stack, text, stack[::-1], hint)
        environments.current.start_thread("monarch-stall", tell)


def _say_stack(text: str, stack: list[tuple[str, int, str, None]], hint: str) -> None:
    _say(text + "".join(traceback.StackSummary.from_list(stack).format()) + hint)


def _say(text: str) -> None:
    print(f"monarch: {text}", file=sys.stderr, flush=True)
