"""Time limits, which stand still while a debugger has stopped the program.

Whether it has is examined when a limit has passed by the clock, so a limit that does not pass costs
nothing more than a timer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch._engine.base.features import find
from monarch._engine.runtime.io import environment as environments

if TYPE_CHECKING:
    from monarch._engine.runtime.io.reactor import Reactor, Timer

__all__ = ["TimeLimit", "time_left", "wait_within"]


class TimeLimit:
    """A limit of `limit` seconds since `began`; `over()` is called once, on the reactor thread."""

    def __init__(
        self, reactor: Reactor, limit: float, began: float, over: Callable[[], object]
    ) -> None:
        self._reactor = reactor
        self._limit = limit
        self._began = began
        self._over = over
        self._timer: Timer | None = None
        self._cancelled = False

    def start(self) -> None:
        """Examine the limit when it passes."""
        self._timer = self._reactor.call_at(self._began + self._limit, self.examine)

    def examine(self) -> None:
        """End the limit, which has passed by the clock, or put its end off; on the reactor."""
        settle_limit = find("settle_limit")
        if settle_limit is None:
            self._settle(0.0)
        else:
            settle_limit(self._limit, self._began, self._settle)

    def cancel(self) -> None:
        """Do not call `over` from now on. May be called in any thread."""
        self._cancelled = True
        if self._timer is not None:
            self._timer.cancel()

    def _settle(self, left: float) -> None:
        if self._cancelled:
            return
        if left:
            self._timer = self._reactor.call_at(environments.current.now() + left, self.examine)
        else:
            self._over()


def time_left(limit: float, began: float) -> float:
    """Return the seconds that a limit of `limit` seconds since `began` has left; 0: it is over.

    It has passed by the clock. Blocks for an answer of the client, for 2 seconds at most.
    """
    left = find("time_left")
    return 0.0 if left is None else float(left(limit, began))


def wait_within(limit: float, wait: Callable[[float], bool]) -> bool:
    """Return whether `wait(seconds)` has succeeded within `limit` seconds."""
    began, left = environments.current.now(), limit
    while not wait(left):
        left = time_left(limit, began)
        if not left:
            return False
    return True
