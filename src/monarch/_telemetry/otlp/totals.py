"""Totals: the points of many intervals as the sums that a collector expects.

The collection gives sums of one second. Collectors want sums since the start of the process
(*cumulative*), unless the environment asks for those since the last export (*delta*). Both are kept
here, per series. Histograms follow counters; up-down counters are always cumulative, and of a gauge
the last value counts.

An export that failed loses nothing: cumulative sums stay, and `restore` puts deltas back. Each
instrument has at most `LIMIT` series, for the whole life of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from monarch._telemetry.metrics import LIMIT
from monarch._telemetry.points import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    OVERFLOW,
    Identity,
    Point,
    Series,
    merged,
    series,
)

__all__ = ["Totals"]


class Totals:
    """See the module. From any thread."""

    def __init__(self, *, delta: bool) -> None:
        self._delta = delta
        self._lock = threading.Lock()
        self._points: dict[Identity, dict[Series, Point]] = {}

    def add(self, points: Iterable[Point]) -> None:
        """Add the points of an interval that follows those added before."""
        with self._lock:
            for point in points:
                self._add(point)

    def _add(self, point: Point) -> None:
        known = self._points.setdefault(point.identity, {})
        which = series(point.attributes)
        if which not in known and len(known) >= LIMIT - 1:
            which = series(OVERFLOW)
            point = point._replace(attributes=OVERFLOW)
        before = known.get(which)
        if before is not None:
            start = min(before.start_us, point.start_us)
            if point.identity.kind in (COUNTER, HISTOGRAM):
                value = merged(before.value, point.value, point.identity.kind)
            else:
                value = point.value
            point = Point(point.identity, point.attributes, value, start, point.time_us)
        known[which] = point

    def take(self, now_us: int) -> list[Point]:
        """Return what is to be exported now. Deltas begin anew; other sums hold until now."""
        with self._lock:
            found = [point for known in self._points.values() for point in known.values()]
            if not self._delta:
                found = [
                    point if point.identity.kind == GAUGE else point._replace(time_us=now_us)
                    for point in found
                ]
            else:
                for identity, known in self._points.items():
                    if identity.kind in (COUNTER, HISTOGRAM, GAUGE):
                        known.clear()
        return found

    def restore(self, points: Iterable[Point]) -> None:
        """Add the points of an export that failed, for the next one."""
        if not self._delta:
            return
        with self._lock:
            for point in points:
                kind = point.identity.kind
                if kind in (COUNTER, HISTOGRAM):
                    self._restore(point)

    def _restore(self, point: Point) -> None:
        known = self._points.setdefault(point.identity, {})
        later = known.pop(series(point.attributes), None)
        self._add(point)
        if later is not None:
            self._add(later)
