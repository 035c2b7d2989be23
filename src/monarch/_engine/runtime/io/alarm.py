"""`Alarm`: the timer that calls a state machine at its deadline.

Deadlines mostly move later, with each message that arrives. So a timer that fires too early stays,
and costs one needless tick; only an earlier deadline needs a new timer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from monarch._engine.runtime.io.reactor import Timer

__all__ = ["Alarm", "CallAt"]

CallAt: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""A function that calls its argument at a moment, such as `Reactor.call_at`."""


class Alarm:
    """Calls `tick` by a deadline; `tick` has to set the next one."""

    __slots__ = ("_at", "_call_at", "_tick", "_timer")

    def __init__(self, call_at: CallAt, tick: Callable[[], None]) -> None:
        self._call_at = call_at
        self._tick = tick
        self._timer: Timer | None = None
        self._at = math.inf

    def set(self, deadline: float | None) -> None:
        """Call `tick` at `deadline` at the latest; None changes nothing."""
        if deadline is not None and deadline < self._at:
            self.cancel()
            self._at = deadline
            self._timer = self._call_at(deadline, self._fire)

    def cancel(self) -> None:
        """Do not call `tick` until the next `set`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._at = math.inf

    def _fire(self) -> None:
        self._timer = None
        self._at = math.inf
        self._tick()
