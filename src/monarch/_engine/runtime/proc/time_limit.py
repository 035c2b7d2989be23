"""Time limits that have passed, and stand still while a debugger has stopped the program."""

from __future__ import annotations

from collections.abc import Callable

from monarch._engine.base.features import find
from monarch._engine.runtime.io import environment as environments

__all__ = ["time_left", "wait_within"]


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
