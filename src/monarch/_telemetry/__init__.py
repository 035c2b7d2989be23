"""Spans and metrics for user code: `span`, `traced`, `get_meter`.

Everything said through these reaches two listeners, each of which may be absent:

- the *instrument slot* of the process (`monarch._spi.instrument`), which this project's own sinks
  fill, and
- *OpenTelemetry*, where ``opentelemetry-api`` is installed (``pip install pymonarch[telemetry]``).
  The API alone records nothing; with an SDK configured, the data goes where the SDK sends it.

With neither, a span is one shared object with empty methods, and a counter checks its argument
and returns. Nothing is buffered in the hope of a listener that comes later. The slot is looked at
with each use; whether OpenTelemetry is there is found out once, when this package is loaded.
"""

from monarch._telemetry.forward import TracingForwarder
from monarch._telemetry.metrics import (
    METER,
    Counter,
    Histogram,
    Meter,
    UpDownCounter,
    get_meter,
)
from monarch._telemetry.spans import get_monarch_tracer, span, traced

__all__ = [
    "METER",
    "Counter",
    "Histogram",
    "Meter",
    "TracingForwarder",
    "UpDownCounter",
    "get_meter",
    "get_monarch_tracer",
    "span",
    "traced",
]
