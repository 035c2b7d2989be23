"""The exporter: bounded queues, and the thread that empties them into requests.

Points come from the collection, rows of spans and log records from the recorder. Adding is an
append; everything else is done on the thread of the exporter: making messages, sending, waiting.
While the collector does not answer, queues fill and drop their oldest rows, which are counted
(``monarch.otlp.dropped``, a metric of the export itself), and sums go on adding up.

`end` sends what waits, within a limit of time, and ends the thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch._spi import start_thread
from monarch._telemetry.otlp import messages
from monarch._telemetry.otlp.options import Options
from monarch._telemetry.otlp.sender import FAILED, Sender
from monarch._telemetry.otlp.totals import Totals
from monarch._telemetry.points import DROPPED, Point

__all__ = ["Exporter"]

_Row = Sequence[Any]


class Exporter:
    """See the module. Methods are for any thread.

    Args:
        options: what to export, and how often.
        resource: describes this process.
        speak: whether this process reports outages of the collector.
    """

    def __init__(self, options: Options, resource: Mapping[str, Any], *, speak: bool) -> None:
        self._options = options
        self._resource = resource
        self._senders = {
            signal: Sender(signal, destination, speak=speak)
            for signal, destination in options.destinations.items()
        }
        self.totals = Totals(delta=options.delta)
        self._queues: dict[str, deque[_Row]] = {
            signal: deque() for signal in ("traces", "logs") if signal in self._senders
        }
        self._lost: dict[str, int] = {}
        self._began_us = time.time_ns() // 1000
        self._adding = threading.Lock()
        self._sending = threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._due: dict[str, float] = {}

    def start(self) -> None:
        """Start the thread."""
        start_thread("monarch-otlp", self._run)

    def takes(self, signal: str) -> bool:
        """Whether this signal is exported."""
        return signal in self._senders

    def add_points(self, points: list[Point]) -> None:
        """Take the points of one interval."""
        self.totals.add(points)

    def add_row(self, signal: str, row: _Row) -> None:
        """Take a row of ``spans`` for ``traces``, or of ``events`` for ``logs``."""
        queue = self._queues[signal]
        with self._adding:
            if len(queue) >= self._options.queue:
                queue.popleft()
                self._lost[signal] = self._lost.get(signal, 0) + 1
            queue.append(row)
        if len(queue) == self._options.batch:
            self._wake.set()

    def end(self, limit: float) -> None:
        """Send what waits, for at most about `limit` seconds, and end the thread."""
        self._ended = True
        self._wake.set()
        until = time.monotonic() + limit
        if self._sending.acquire(timeout=limit):  # else a request is under way, and takes longer
            try:
                self.flush(until)
            finally:
                self._sending.release()

    # -- on the exporter's thread ----------------------------------------------------------------

    def _run(self) -> None:
        wait = min(self._options.interval, self._options.delay)
        while not self._ended:
            self._wake.wait(wait)
            self._wake.clear()
            with self._sending:
                if not self._ended:
                    self._send_due()

    def _send_due(self) -> None:
        now = time.monotonic()
        for signal, sender in self._senders.items():
            period = self._options.interval if signal == "metrics" else self._options.delay
            full = len(self._queues.get(signal, ())) >= self._options.batch
            if sender.ready() and (full or now >= self._due.get(signal, 0.0)):
                self._due[signal] = now + 0.9 * period  # not later because of a late wake-up
                self._send(signal, sender, None)

    def flush(self, until: float | None = None) -> None:
        """Send all that waits, now; `until`: the time of `time.monotonic` at which to give up."""
        for signal, sender in self._senders.items():
            if until is None or (sender.ready() and time.monotonic() < until):
                self._send(signal, sender, until)

    def _send(self, signal: str, sender: Sender, until: float | None) -> None:
        if signal == "metrics":
            self._send_metrics(sender, until)
            return
        queue = self._queues[signal]
        make: Callable[..., Any] = messages.traces if signal == "traces" else messages.logs
        while queue:
            with self._adding:
                rows = [queue.popleft() for _ in range(min(len(queue), self._options.batch))]
            timeout = _left(sender, until)
            if timeout is not None and timeout <= 0:
                return
            message = make(rows, self._resource).SerializeToString()
            if sender.send(message, timeout) == FAILED:
                self._put_back(signal, queue, rows)
                return

    def _put_back(self, signal: str, queue: deque[_Row], rows: list[_Row]) -> None:
        """Keep rows for the next attempt, as far as there is room."""
        with self._adding:
            room = self._options.queue - len(queue)
            kept = rows[-room:] if room > 0 else []
            self._lost[signal] = self._lost.get(signal, 0) + len(rows) - len(kept)
            queue.extendleft(reversed(kept))

    def _send_metrics(self, sender: Sender, until: float | None) -> None:
        now_us = time.time_ns() // 1000
        with self._adding:
            lost, self._lost = self._lost, {}
        self.totals.add(
            Point(DROPPED, (("signal", signal),), count, self._began_us, now_us)
            for signal, count in lost.items()
            if count
        )
        points = self.totals.take(now_us)
        timeout = _left(sender, until)
        if not points or (timeout is not None and timeout <= 0):
            return
        request = messages.metrics(points, self._resource, delta=self._options.delta)
        if sender.send(request.SerializeToString(), timeout) == FAILED:
            self.totals.restore(points)


def _left(sender: Sender, until: float | None) -> float | None:
    """Return the time-out of a request; None: the usual one."""
    if until is None:
        return None
    return min(sender.destination.timeout, until - time.monotonic())
