"""Pauses between two questions to a scheduler, which become longer with the time waited."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["pauses"]

_PAUSES = 0.1, 2.0  # seconds between two questions: at first, and at most
_SHARE = 20  # a pause is this part of the time waited so far, so that long waits ask seldom


def pauses() -> Iterator[float]:
    """Yield the seconds waited so far, again and again, after pauses that become longer."""
    start = time.monotonic()
    wait: Callable[[float], object] = threading.Event().wait
    shortest, longest = _PAUSES
    while True:
        began = time.monotonic()
        yield began - start
        taken = time.monotonic() - began  # an answer that takes long is asked for less often
        wait(min(longest, max(shortest, taken, (time.monotonic() - start) / _SHARE)))
