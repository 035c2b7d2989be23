"""A clock for looks that are in no hurry, on a thread of its own.

While a timer of the reactor or of an event loop is pending, each of its sleeps has a time limit,
and that costs the kernel 1 µs per wake-up: per message, that is. Whoever only wants to look in a
few times a second has its timer here, where nobody else sleeps. The thread is started by the first.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from monarch._engine.runtime.reactor import report_error

__all__ = ["SlowClock"]


class SlowClock:
    """See the module."""

    def __init__(self) -> None:
        self._soon: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._order = itertools.count()
        self._changed = threading.Event()
        self._started = False
        self._lock = threading.Lock()

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Run `callback()` on the clock's thread, after `delay` seconds; from any thread."""
        self._soon.append((time.monotonic() + delay, next(self._order), callback))
        self._changed.set()
        if not self._started:
            with self._lock:
                started, self._started = self._started, True
            if not started:
                try:
                    threading.Thread(target=self._run, name="monarch-clock", daemon=True).start()
                except RuntimeError:  # there can be none, of a limit or at the interpreter's end
                    self._started = False  # the next look tries again

    def _run(self) -> None:
        timers: list[tuple[float, int, Callable[[], None]]] = []
        while True:
            self._changed.clear()  # first: who adds a timer from here on sets it again
            while self._soon:
                heapq.heappush(timers, self._soon.popleft())
            self._changed.wait(timers[0][0] - time.monotonic() if timers else None)
            while timers and timers[0][0] <= time.monotonic():
                try:
                    heapq.heappop(timers)[2]()
                except Exception:
                    report_error()
