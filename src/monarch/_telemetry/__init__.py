"""Spans and metrics for user code: `span`, `traced`, `get_meter`.

Each span is reported to two sinks, either of which may be absent:

- the *instrument slot* of the process (`monarch._spi.instrument`), which this project's own sinks
  fill, and
- *OpenTelemetry*, where ``opentelemetry-api`` is installed (``pip install pymonarch[telemetry]``).
  The API alone records nothing; with an SDK configured, the data goes where the SDK sends it.

Without both, a span is one shared object with empty methods. The slot is read at each use. Whether
OpenTelemetry is installed is checked once, when this package is loaded.

Values of instruments are gathered in the process (`metrics`), and leave it once a second
(`collection`) as `points`, while there is a receiver for them.
"""

from monarch._telemetry.forward import TracingForwarder
from monarch._telemetry.metrics import (
    METER,
    Counter,
    Gauge,
    Histogram,
    Meter,
    ObservableCounter,
    ObservableGauge,
    ObservableUpDownCounter,
    UpDownCounter,
    get_meter,
)
from monarch._telemetry.spans import get_monarch_tracer, span, traced

__all__ = [
    "METER",
    "Counter",
    "Gauge",
    "Histogram",
    "Meter",
    "ObservableCounter",
    "ObservableGauge",
    "ObservableUpDownCounter",
    "TracingForwarder",
    "UpDownCounter",
    "get_meter",
    "get_monarch_tracer",
    "span",
    "traced",
]
