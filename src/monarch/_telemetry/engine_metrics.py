"""Metrics of the engine: its statistics, and its endpoints, as instruments.

Statistics (`monarch._spi.levels`) are read every `_EVERY` seconds, by the thread of the
collection. A gauge is set when its value has changed, and now and then although it has not: idle
processes cost few rows.

Endpoints are counted from the rows of messages that the recorder has anyway (`EndpointStatistics`),
on the thread that delivers them, so no message pays for them. Calls, as their callers see them, are
counted in `monarch._telemetry.calls`.

Names of the reference are kept beside ours, where the same thing is measured
(``process.memory.rss_bytes``, ``actor.message_queue_size``, ``actor.messages_received``,
``actor.message_receive_errors``, ``actor.message_handler_duration.ns``, ``py_mesages_handled``,
``mailbox.posts``, ``mailbox.undeliverable_messages``).
Values of attributes are names of meshes and endpoints and ranks, and for names of the reference
the addresses of actors (``actor_id``), never ids of connections. So the number of series is bounded
by the program.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from monarch._spi import UNITS, current_proc, statistics
from monarch._telemetry import addresses, collection
from monarch._telemetry.metrics import METER, Meter
from monarch._telemetry.points import Distribution, bounds_for

__all__ = ["ENGINE", "REFERENCE", "EndpointStatistics", "Values", "last", "start"]

_EVERY = 5.0  # seconds
_STALE = 12  # readings after which a value that did not change is reported all the same

ENGINE = Meter("monarch.engine")
REFERENCE = Meter("hyperactor::metrics")
_PYTHON = METER
_OF_REFERENCE = ("process.memory.rss_bytes", "process.memory.vm_bytes")


_BOUNDS = bounds_for("s")
_NANOSECONDS = tuple(bound * 1e9 for bound in _BOUNDS)


class _Counts:
    """The messages of one endpoint of one actor since the last report."""

    __slots__ = ("answers", "calls", "durations", "failed", "waits")

    def __init__(self) -> None:
        self.answers = self.calls = self.failed = 0
        self.durations = Values()
        self.waits = Values()


class Values:
    """A distribution that grows; whole nanoseconds."""

    __slots__ = ("counts", "high", "low", "number", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(_NANOSECONDS) + 1)
        self.number = self.sum = self.high = 0
        self.low = 1 << 62

    def add(self, values: list[int]) -> None:
        """Add values; sorts the list. A loop over them would take four times as long."""
        values.sort()
        before = 0
        for bucket, bound in enumerate(_NANOSECONDS):
            upto = bisect_right(values, bound, before)
            self.counts[bucket] += upto - before
            before = upto
        self.counts[-1] += len(values) - before
        self.number += len(values)
        self.sum += sum(values)
        self.low = min(self.low, values[0])
        self.high = max(self.high, values[-1])

    def scaled(self, unit: float, bounds: tuple[float, ...]) -> Distribution:
        """Return the distribution in a unit of so many nanoseconds."""
        low, high = self.low / unit, self.high / unit
        counts = tuple(self.counts)
        return Distribution(self.number, self.sum / unit, low, high, bounds, counts)


class EndpointStatistics:
    """Counts and durations by endpoint; see the module.

    Messages are added in batches, about 0.3 us each, and reported every few seconds.

    Args:
        address: returns the address of an actor by its uid; empty if it is not known.
    """

    def __init__(self, address: Callable[[int], str]) -> None:
        self._lock = threading.Lock()
        self._address = address
        self._counts: dict[tuple[int, str], _Counts] = {}
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
        self._posts = REFERENCE.create_counter("mailbox.posts", "{message}")
        self._failed = REFERENCE.create_counter("actor.message_receive_errors", "{error}")
        self._nanoseconds = REFERENCE.create_histogram(
            "actor.message_handler_duration.ns",
            "ns",
            explicit_bucket_boundaries_advisory=_NANOSECONDS,
        )
        self._handled = [
            _PYTHON.create_counter(name, "{message}")
            for name in ("py_messages_handled", "py_mesages_handled")
        ]

    def add_all(self, messages: Sequence[Sequence[Any]], ended: Sequence[int]) -> None:
        """Count messages, as the recorder has them, and when they ended (in ns)."""
        batches: dict[tuple[int, str], tuple[list[int], list[int], list[bool], list[bool]]] = {}
        for message, end in zip(messages, ended, strict=True):
            _, failed, _, actor, _, port, method, queued, begun, _ = message
            batch = batches.get((actor, method))
            if batch is None:
                batch = batches[actor, method] = [], [], [], []
            batch[0].append(end - begun)
            if queued:
                batch[1].append(begun - queued)
            if failed:
                batch[2].append(True)
            if port:
                batch[3].append(True)
        with self._lock:
            for which, (durations, waits, failures, answers) in batches.items():
                found = self._counts.get(which)
                if found is None:
                    found = self._counts[which] = _Counts()
                found.answers += len(answers)
                found.calls += len(durations)
                found.failed += len(failures)
                found.durations.add(durations)
                if waits:
                    found.waits.add(waits)

    def report(self) -> None:
        """Add what was counted to the instruments."""
        with self._lock:
            counts, self._counts = self._counts, {}
        for (actor, method), found in counts.items():
            attributes, here = {"method": method}, {"actor_id": self._address(actor)}
            self._calls.add(found.calls, attributes)
            if found.failed:
                self._errors.add(found.failed, attributes)
                self._failed.add(found.failed, here)
            if found.answers:
                self._posts.add(found.answers, here)
            self._seconds.merge(found.durations.scaled(1e9, _BOUNDS), attributes)
            self._nanoseconds.merge(found.durations.scaled(1.0, _NANOSECONDS), here)
            if found.waits.number:
                self._waits.merge(found.waits.scaled(1e9, _BOUNDS), attributes)
            self._received.add(found.calls, here)
            for counter in self._handled:
                counter.add(found.calls)


class _Sampler:
    """Sets the gauges of the statistics, from time to time."""

    def __init__(self, *reports: Callable[[], None]) -> None:
        self._reports = reports
        self._due = 0.0
        self._known: dict[str, tuple[float, int]] = {}
        self._gauges = {
            name: (REFERENCE if name in _OF_REFERENCE else ENGINE).create_gauge(name, unit)
            for name, unit in UNITS.items()
        }
        self._undeliverable = REFERENCE.create_counter(
            "mailbox.undeliverable_messages", "{message}"
        )
        self._dead_letters = 0
        self._queues = REFERENCE.create_up_down_counter("actor.message_queue_size", "{message}")
        self._depths: dict[tuple[str, int], int] = {}

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EVERY - 0.5
        self.sample()

    def sample(self) -> None:
        """Set the gauges now."""
        for report in self._reports:
            report()
        for name, value in statistics().items():
            known, readings = self._known.get(name, (None, 0))
            if value != known or readings >= _STALE:
                self._gauges[name].set(value)
                readings = 0
            self._known[name] = value, readings + 1
        self._sample_mailboxes()

    def _sample_mailboxes(self) -> None:
        proc = current_proc()
        if proc is None:
            return
        dead = proc.dead_letters.count
        if dead > self._dead_letters:
            self._undeliverable.add(dead - self._dead_letters)
        self._dead_letters = dead
        for cell in list(proc.cells.values()):
            which = cell.identity.name, cell.rank
            depth = cell.depth()
            change = depth - self._depths.get(which, 0)
            if change:
                here = addresses.of_proc(proc, cell.uid)
                self._queues.add(change, {"actor": which[0], "rank": which[1], "actor_id": here})
                self._depths[which] = depth


_sampler: _Sampler | None = None


def start(*reports: Callable[[], None]) -> None:
    """Report the statistics of this process from now on, while the collection runs.

    `reports` are called as often: they add what they have counted to their instruments.
    """
    global _sampler
    if _sampler is None:
        _sampler = _Sampler(*reports)
        collection.sample(_sampler)


def last() -> None:
    """Report what was counted, before the last collection of a process."""
    if _sampler is not None:
        _sampler.sample()
