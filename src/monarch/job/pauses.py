"""Pauses between two questions to a scheduler, which become longer with the time waited."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["pauses"]

_SHORTEST = 0.1  # seconds between two questions, at first
_SHARE = 20  # a pause is this part of the time waited so far, so that long waits ask seldom


def pauses(longest: float = 2.0) -> Iterator[float]:
    """Yield the seconds waited so far, again and again, after pauses of up to `longest` seconds."""
    start = time.monotonic()
    wait: Callable[[float], object] = threading.Event().wait
    while True:
        began = time.monotonic()
        yield began - start
        taken = time.monotonic() - began  # an answer that takes long is asked for less often
        wait(min(longest, max(_SHORTEST, taken, (time.monotonic() - start) / _SHARE)))
