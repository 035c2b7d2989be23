"""A clock for checks that are in no hurry, on a thread of its own.

While a timer of the reactor or of an event loop is pending, each of its sleeps has a time limit.
That costs the kernel 1 µs per wake-up, which means per message. A check that runs only a few times
a second has its timer here, where it costs no other thread. The first timer starts the thread.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from monarch._engine.runtime.io.reactor import report_error

__all__ = ["SlowClock"]


class SlowClock:
    """Runs callbacks after a delay, on one thread that is shared by all of them."""

    def __init__(self) -> None:
        self._soon: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._order = itertools.count()
        self._changed = threading.Event()
        self._started = False
        self._lock = threading.Lock()

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Run `callback()` on the clock's thread after `delay` seconds. For any thread."""
        self._soon.append((time.monotonic() + delay, next(self._order), callback))
        self._changed.set()
        if not self._started:
            with self._lock:
                started, self._started = self._started, True
            if not started:
                try:
                    threading.Thread(target=self._run, name="monarch-clock", daemon=True).start()
                except RuntimeError:  # a limit is reached, or the interpreter exits
                    self._started = False  # the next call tries again

    def _run(self) -> None:
        timers: list[tuple[float, int, Callable[[], None]]] = []
        while True:
            self._changed.clear()  # before the queue is read, so that no new timer is missed
            while self._soon:
                heapq.heappush(timers, self._soon.popleft())
            self._changed.wait(timers[0][0] - time.monotonic() if timers else None)
            while timers and timers[0][0] <= time.monotonic():
                try:
                    heapq.heappop(timers)[2]()
                except Exception:
                    report_error()
