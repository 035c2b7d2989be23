"""The sources of a process: its recorder, its log records and its metrics, begun once.

Telemetry (`monarch._observer.switch`) and the export by OTLP both need them, in either order, and
each takes what it needs: the delivery takes rows, the export *taps* the rows of spans and log
records as they are added. While nothing delivers the rows, the collection drops them, after it has
counted the messages.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from monarch._spi import instrument, when_forked
from monarch._telemetry import collection, engine_metrics, log_records, recorder, resource
from monarch._telemetry.kinds import json_text
from monarch._telemetry.points import Point, to_row
from monarch._telemetry.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch._spi import Proc

__all__ = ["begin", "last", "metrics_to_rows"]

_undo: list[Callable[[], None]] = []


def begin(proc: Proc) -> Recorder:
    """Return the recorder of this process; the first call makes it and starts all sources."""
    found = recorder.current
    if found is not None:
        return found
    made = Recorder(proc)
    recorder.install(made)
    instrument.watch(made)
    if instrument.sink is None:
        instrument.install(made)
    records = log_records.LogRecords(
        lambda row: made.add("events", row),
        recorder.current_span.get,
        made.trace,
    )
    _undo.append(log_records.install(records))
    engine_metrics.start(made.endpoints.report, made.calls.report)

    def drop() -> None:
        if not made.delivered:
            made.drop()

    collection.sample(drop)
    when_forked(_forget)
    return made


def metrics_to_rows(made: Recorder) -> None:
    """Record the metrics of this process as rows, from now on."""
    found = resource.describe(made.proc, os.environ, "opentelemetry")
    about = json_text(dict(sorted(found.items())))

    def add(points: list[Point]) -> None:
        for point in points:
            made.add(*to_row(point, about))

    collection.subscribe(add)


def last() -> None:
    """Collect the metrics once more, before the process exits."""
    made = recorder.current
    if made is not None and not made.delivered:
        made.drop()
    engine_metrics.last()
    collection.collect()


def _forget() -> None:
    """Record nothing in a forked child, whose rows would be the parent's."""
    while _undo:
        _undo.pop()()
    made = recorder.current
    recorder.install(None)
    instrument.watch(None)
    if instrument.sink is made:
        instrument.install(None)
