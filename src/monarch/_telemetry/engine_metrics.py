"""Metrics of the engine: its statistics, and its endpoints, as instruments.

Statistics (`monarch._spi.levels`) are read every `_EVERY` seconds, by the thread of the
collection. A gauge is set when its value has changed, and now and then although it has not: idle
processes cost few rows.

Endpoints are counted from the rows of messages that the recorder has anyway (`EndpointStatistics`),
on the thread that delivers them, so no message pays for them.

Names of the reference are kept beside ours, where the same thing is measured
(``process.memory.rss_bytes``, ``actor.message_queue_size``, ``actor.messages_received``,
``actor.message_receive_errors``, ``actor.message_handler_duration.ns``, ``py_mesages_handled``).
Values of attributes are names of meshes and endpoints and ranks, never addresses or ids of
connections, so the number of series is bounded by the program.
"""

from __future__ import annotations

import time

from monarch._spi import UNITS, current_proc, statistics
from monarch._telemetry import collection
from monarch._telemetry.metrics import Meter

__all__ = ["EndpointStatistics", "start"]

_EVERY = 5.0  # seconds
_STALE = 12  # readings after which a value that did not change is reported all the same

ENGINE = Meter("monarch.engine")
REFERENCE = Meter("hyperactor::metrics")
_PYTHON = Meter("monarch")


class EndpointStatistics:
    """Counts and durations by endpoint; see the module.

    >>> endpoints = EndpointStatistics()
    >>> endpoints.add("train", 0.25, failed=False)
    """

    def __init__(self) -> None:
        self._calls = ENGINE.create_counter(
            "monarch.endpoint.calls", "{call}", "Messages that an endpoint of this process handled"
        )
        self._errors = ENGINE.create_counter(
            "monarch.endpoint.errors", "{call}", "Messages that an endpoint failed to handle"
        )
        self._seconds = ENGINE.create_histogram(
            "monarch.endpoint.duration", "s", "Time from the begin of an endpoint to its end"
        )
        self._waits = ENGINE.create_histogram(
            "monarch.mailbox.wait", "s", "Time that a message waited in a mailbox"
        )
        self._received = REFERENCE.create_counter("actor.messages_received", "{message}")
        self._failed = REFERENCE.create_counter("actor.message_receive_errors", "{error}")
        self._nanoseconds = REFERENCE.create_histogram("actor.message_handler_duration.ns", "ns")
        self._handled = [
            _PYTHON.create_counter(name, "{message}")
            for name in ("py_messages_handled", "py_mesages_handled")
        ]

    def add(self, method: str, seconds: float, failed: bool, waited: float | None = None) -> None:
        """Count one message: its endpoint, how long it took, whether it raised.

        `waited`: how long it was in the mailbox, where that is known.
        """
        attributes = {"method": method}
        self._calls.add(1, attributes)
        self._seconds.record(seconds, attributes)
        self._received.add(1)
        self._nanoseconds.record(seconds * 1e9)
        for counter in self._handled:
            counter.add(1)
        if waited is not None:
            self._waits.record(waited, attributes)
        if failed:
            self._errors.add(1, attributes)
            self._failed.add(1)


class _Sampler:
    """Sets the gauges of the statistics, from time to time."""

    def __init__(self) -> None:
        self._due = 0.0
        self._known: dict[str, tuple[float, int]] = {}
        self._gauges = {name: ENGINE.create_gauge(name, unit) for name, unit in UNITS.items()}
        self._queues = REFERENCE.create_up_down_counter("actor.message_queue_size", "{message}")
        self._depths: dict[tuple[str, int], int] = {}

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EVERY - 0.5
        for name, value in statistics().items():
            known, readings = self._known.get(name, (None, 0))
            if value != known or readings >= _STALE:
                self._gauges[name].set(value)
                readings = 0
            self._known[name] = value, readings + 1
        self._sample_queues()

    def _sample_queues(self) -> None:
        proc = current_proc()
        if proc is None:
            return
        for cell in list(proc.cells.values()):
            which = cell.identity.name, cell.rank
            depth = cell.depth()
            change = depth - self._depths.get(which, 0)
            if change:
                self._queues.add(change, {"actor": which[0], "rank": which[1]})
                self._depths[which] = depth


_sampler: _Sampler | None = None


def start() -> None:
    """Report the statistics of this process from now on, while the collection runs."""
    global _sampler
    if _sampler is None:
        _sampler = _Sampler()
        collection.sample(_sampler)
