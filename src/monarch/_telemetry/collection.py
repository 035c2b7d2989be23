"""The collection: once per interval, what all instruments have gathered becomes points.

Receivers of points (`subscribe`) are the recorder, for SQL, and the export by OTLP. The thread of
the collection exists while there is at least one, and instruments gather values only then. So a
process without telemetry has no thread, and its instruments keep nothing.

*Samplers* are functions that the thread calls before it asks the instruments: they read numbers
that the engine counts anyway (`statistics`), and report them by instruments of their own.

A receiver or a sampler that raises is a defect: the error is a warning, once, and the others go on.
`collect` can be called from any thread, for a last collection before the process exits.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from monarch._spi import is_simulated, start_thread, when_forked
from monarch._telemetry import metrics
from monarch._telemetry.points import Point

__all__ = ["INTERVAL", "collect", "sample", "subscribe", "unsubscribe"]

INTERVAL = 1.0
"""Seconds between two collections, unless a receiver wants them sooner."""

Receiver = Callable[[list[Point]], None]

_receivers: dict[Receiver, float] = {}
_samplers: list[Callable[[], None]] = []
_changing = threading.Lock()  # guards the receivers and the thread
_collecting = threading.Lock()  # one collection at a time
_end: threading.Event | None = None  # set: the thread is to end; None: there is none
_began_us = 0
_warned: set[object] = set()
_watching_forks: list[bool] = []


def subscribe(receiver: Receiver, interval: float = INTERVAL) -> None:
    """Pass the points of each interval to ``receiver(points)`` from now on.

    The receiver is called on the thread of the collection, and must be quick. `interval`: how many
    seconds it wants between two calls; the shortest of all receivers counts, for all.
    """
    global _end, _began_us
    if is_simulated():
        return
    with _changing:
        _receivers[receiver] = interval
        if _end is None:
            _began_us = _now_us()
            metrics.switch(on=True)
            _end = threading.Event()
            end = _end
            start_thread("monarch-metrics", lambda: _run(end))
            if not _watching_forks:
                _watching_forks.append(True)
                when_forked(_forget)


def unsubscribe(receiver: Receiver) -> None:
    """Pass no more points to `receiver`. Without any receiver the thread ends."""
    global _end
    with _changing:
        _receivers.pop(receiver, None)
        if not _receivers and _end is not None:
            _end.set()
            _end = None
            metrics.switch(on=False)


def sample(sampler: Callable[[], None]) -> None:
    """Call `sampler()` before each collection."""
    if sampler not in _samplers:
        _samplers.append(sampler)


def collect() -> None:
    """Pass what was gathered since the last collection to all receivers, now."""
    global _began_us
    with _collecting:
        for sampler in tuple(_samplers):
            _guarded(sampler)
        begun, now = _began_us, _now_us()
        _began_us = now
        points = [
            Point(instrument._identity, attributes, value, begun, now)
            for instrument in metrics.instruments()
            for attributes, value in instrument.values()
        ]
        for receiver in list(_receivers):
            _guarded(receiver, points)


def _guarded(culprit: Callable[..., None], *arguments: Any) -> None:
    try:
        culprit(*arguments)
    except Exception as error:
        if culprit not in _warned:
            _warned.add(culprit)
            warnings.warn(f"metrics are incomplete: {culprit!r} failed: {error!r}", stacklevel=2)


def _run(end: threading.Event) -> None:
    due = time.monotonic()
    while True:
        due += min(_receivers.values(), default=INTERVAL)
        now = time.monotonic()
        due = max(due, now)  # after a stop of the process it does not catch up
        if end.wait(max(0.01, due - now)):
            return
        collect()


def _forget() -> None:
    """Gather nothing in a forked child: it has no thread, and the parent counts for itself."""
    global _end, _changing, _collecting
    _changing, _collecting = threading.Lock(), threading.Lock()
    _receivers.clear()
    _end = None
    metrics.forget()


def _now_us() -> int:
    return time.time_ns() // 1000
