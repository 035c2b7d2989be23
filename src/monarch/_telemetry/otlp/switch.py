"""The export is switched on: by the environment, when a process gets its part of the runtime.

A process whose environment names a collector begins to export before user code runs in it, and ends
with a last export, which takes `_LAST` seconds at most. A process that is forked by user code
exports nothing: it has no thread, and its parent's data is not its own.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch._spi import is_simulated, when_forked
from monarch._telemetry import collection, resource, sources
from monarch._telemetry.otlp import options as environment

if TYPE_CHECKING:
    from monarch._spi import Proc
    from monarch._telemetry.otlp.exporter import Exporter

__all__ = ["end", "export"]

_LAST = 2.0  # seconds for the last export of a process

_log = logging.getLogger("monarch.telemetry")
_exporter: Exporter | None = None
_undo: list[Callable[[], None]] = []


def export(proc: Proc) -> None:
    """Begin to export, if the environment asks for it and the process does not yet; a hook."""
    global _exporter
    if _exporter is not None or is_simulated() or not environment.wanted(os.environ):
        return
    options = environment.read(os.environ)
    if proc.client:
        for problem in options.problems:
            _log.warning("%s", problem)
    if not options.destinations:
        return
    if not _installed():
        if proc.client:
            _log.warning(
                "the environment asks for an export by OTLP, which needs "
                "pip install 'pymonarch[otlp]'; nothing is exported"
            )
        return
    from monarch._telemetry.otlp.exporter import Exporter

    exporter = Exporter(options, resource.describe(proc, os.environ), speak=proc.client)
    _exporter = exporter
    # Spans of messages come with the collection of metrics, also if metrics are not exported.
    interval = options.interval if exporter.takes("metrics") else options.delay
    points = exporter.add_points if exporter.takes("metrics") else _ignore
    collection.subscribe(points, min(collection.INTERVAL, interval))
    _undo.append(lambda: collection.unsubscribe(points))
    recorder = sources.begin(proc)
    for signal, kind in (("traces", "spans"), ("traces", "messages"), ("logs", "events")):
        if exporter.takes(signal):
            recorder.tap(kind, functools.partial(exporter.add_row, signal))
            _undo.append(functools.partial(recorder.tap, kind, None))
    exporter.start()
    atexit.register(end)
    when_forked(_forget)


def end() -> None:
    """Export what was gathered so far, and end; takes a limited time."""
    global _exporter
    exporter, _exporter = _exporter, None
    if exporter is None:
        return
    atexit.unregister(end)
    sources.last()
    while _undo:
        _undo.pop()()
    exporter.end(_LAST)


def _ignore(points: object) -> None:
    pass


def _forget() -> None:
    """Export nothing in a forked child."""
    global _exporter
    atexit.unregister(end)
    _exporter = None
    while _undo:
        _undo.pop()()


def _installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.proto") is not None
    except ModuleNotFoundError:  # no package of OpenTelemetry at all
        return False
