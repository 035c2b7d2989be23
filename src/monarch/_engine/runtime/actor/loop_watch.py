"""Observation of an async actor's event loop: `Pulse` reports a loop that does not turn.

Then no message, task or supervision of the actor makes progress, without any error. While the actor
has work, `Pulse` posts a callback to its loop and checks for it four times in the time allowed. A
blocked loop is reported and not failed: the actor may be computing a result, although with the
wrong means. A loop that a debugger has stopped is not reported.
"""

from __future__ import annotations

import functools
import sys
import traceback
from typing import TYPE_CHECKING

from monarch._engine.base.crash import is_runtime_frame
from monarch._engine.base.features import find
from monarch._engine.base.settings import settings
from monarch._engine.runtime.actor.cell import Cell
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.stacks import stack_of_thread
from monarch._engine.wire.call_meta import route

if TYPE_CHECKING:
    from monarch._engine.runtime.io.bridge import LoopGate

__all__ = ["Pulse"]


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
        self._cell.proc.clock.call_later(0.0, self._later)

    def _later(self) -> None:
        if not self._due:
            self._due = True
            self._cell.proc.clock.call_later(self._limit / _CHECKS, self._look)

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
            if self._looks == _CHECKS and self._is_debugged():
                self._looks = 0
                self._asked = environments.current.now()
            elif self._looks == _CHECKS:
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

    def _is_debugged(self) -> bool:
        stopped_at = find("stopped_at")
        if stopped_at is None:
            return False
        return stopped_at(stack_of_thread(self._cell.thread_id).steps) is not None

    @property
    def _name(self) -> str:
        return f"{self._cell.identity.display} (pid {self._cell.proc.pid})"

    def _report(self, seconds: float) -> None:
        current = self._cell.current
        doing = f", in endpoint {route(current[1].meta)[0]!r}" if current is not None else ""
        steps = stack_of_thread(self._cell.thread_id).steps
        stack = [(step.file, step.line, step.name, None) for step in steps]
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
