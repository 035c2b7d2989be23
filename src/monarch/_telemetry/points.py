"""Points: the values of one series over one interval, as they leave the process.

An instrument (`metrics`) gathers values per set of attributes. Once per interval it gives one
`Point` for each set that changed. Points become rows of the tables ``metric_sums``,
``metric_gauges`` and ``metric_histograms`` (`to_row`), or points of OTLP
(`monarch._telemetry.otlp`).

Kinds and what their points hold:

| kind | value | covers |
|---|---|---|
| `COUNTER` | the sum | the interval (*delta*) |
| `UP_DOWN` | the sum | the time since the process began to count (*cumulative*) |
| `GAUGE` | the last value | a moment |
| `HISTOGRAM` | a `Distribution` | the interval (*delta*) |

Whole numbers stay whole and floats stay floats. In rows, whole sums of counters are unsigned, whole
sums of up-down counters and whole gauges are signed, and sums of histograms are floats: exactly one
column of each group is set, as in the reference.

Bounds of histograms. The default of OpenTelemetry ends at 10,000, so a duration in nanoseconds
falls into the last bucket whatever it is. Here the default follows from the unit (`bounds_for`):
three steps a decade over the range that the unit is used for, so that a percentile is known within
a factor of 2.5. A program that knows better gives ``explicit_bucket_boundaries_advisory``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from monarch._telemetry.kinds import json_text

__all__ = [
    "COUNTER",
    "DROPPED",
    "GAUGE",
    "HISTOGRAM",
    "OVERFLOW",
    "UP_DOWN",
    "Attributes",
    "Distribution",
    "Identity",
    "Point",
    "Series",
    "bounds_for",
    "canonical",
    "merged",
    "series",
    "to_row",
]

COUNTER, UP_DOWN, GAUGE, HISTOGRAM = "counter", "up_down", "gauge", "histogram"

Attributes = tuple[tuple[str, Any], ...]
"""Attributes in the order of their names; values are bool, int, float, str, or tuples of these."""

Series = tuple[Attributes, tuple[type, ...]]
"""The key of a series, from `series`."""

OVERFLOW: Attributes = (("otel.metric.overflow", True),)
"""The attributes of all values beyond the limit of series, as OpenTelemetry has it."""

_I64 = 1 << 63
_PLAIN = (bool, int, float, str)


class Identity(NamedTuple):
    """What an instrument is, apart from its values."""

    name: str
    kind: str
    unit: str = ""
    description: str = ""
    scope: str = "monarch"


DROPPED = Identity("monarch.otlp.dropped", COUNTER, "{record}", "Records that found no room")
"""What the export by OTLP reports about itself."""


@dataclass(frozen=True)
class Distribution:
    """The values of a histogram; ``counts`` has one more element than ``bounds``.

    Bucket ``i`` counts the values above ``bounds[i - 1]`` and up to ``bounds[i]``.
    """

    count: int
    sum: float
    min: float
    max: float
    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    def plus(self, other: Distribution) -> Distribution:
        """Return the distribution of both; both have the same bounds."""
        return Distribution(
            self.count + other.count,
            self.sum + other.sum,
            min(self.min, other.min),
            max(self.max, other.max),
            self.bounds,
            tuple(map(sum, zip(self.counts, other.counts, strict=True))),
        )


class Point(NamedTuple):
    """One series over one interval; times are microseconds since the epoch of Unix."""

    identity: Identity
    attributes: Attributes
    value: Any
    start_us: int
    time_us: int


def canonical(attributes: Any) -> Attributes:
    """Return attributes as a hashable value that does not depend on their order.

    Names become text. Values keep their types, where OpenTelemetry has the type; others become
    text, too.

    >>> canonical({"split": "train", "epoch": 3, "shape": [2, 4]})
    (('epoch', 3), ('shape', (2, 4)), ('split', 'train'))
    """
    if not attributes:
        return ()
    pairs = attributes.items() if hasattr(attributes, "items") else attributes
    return tuple(sorted(((str(name), _value(value)) for name, value in pairs), key=_name))


def series(attributes: Attributes) -> Series:
    """Return the key of a series: 1, 1.0 and True are equal, but they are different attributes."""
    types: list[type] = [value.__class__ for _, value in attributes]
    return attributes, tuple(types)


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


def _value(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_value(item) for item in cast("tuple[Any, ...]", value))
    for kind in _PLAIN:  # a subclass, as of an enumeration of numbers
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def merged(one: Any, two: Any, kind: str) -> Any:
    """Return the value of a series from those of two disjoint parts of it."""
    if kind == HISTOGRAM:
        return one.plus(two)
    return two if kind == GAUGE else one + two


# -- bounds --------------------------------------------------------------------------------------


def _steps(low: int, high: int) -> tuple[float, ...]:
    """Return 1, 2.5, 5 of each decade from ``10**low`` up to ``10**high``."""
    decades = range(low, high)
    found = (float(f"{factor}e{decade}") for decade in decades for factor in (1.0, 2.5, 5.0))
    return (*found, float(f"1e{high}"))


_DEFAULT = (0.0, *_steps(-3, 9))
_BYTES = (0.0, *(float(1 << power) for power in range(6, 41, 2)))
_BOUNDS = {
    "s": _steps(-6, 3),
    "ms": _steps(-3, 6),
    "us": _steps(0, 9),
    "ns": _steps(2, 11),
    "by": _BYTES,
    "bytes": _BYTES,
}
_SAME_UNIT = {"seconds": "s", "milliseconds": "ms", "µs": "us", "microseconds": "us", "b": "by"}


def bounds_for(unit: str) -> tuple[float, ...]:
    """Return the bounds of a histogram whose program gave none.

    >>> bounds_for("s")[:4], bounds_for("s")[-1]
    ((1e-06, 2.5e-06, 5e-06, 1e-05), 1000.0)
    """
    unit = unit.lower()
    return _BOUNDS.get(_SAME_UNIT.get(unit, unit), _DEFAULT)


# -- rows ----------------------------------------------------------------------------------------


def to_row(point: Point, resource_json: str) -> tuple[str, tuple[Any, ...]]:
    """Return the table of a point and its row there; ``resource_json`` describes the process."""
    name, kind, unit, _, scope = point.identity
    attributes = json_text(dict(point.attributes))
    value, start, time = point.value, point.start_us, point.time_us
    if kind == GAUGE:
        row = (
            name,
            time,
            None,
            scope,
            unit,
            attributes,
            resource_json,
            *_typed(value, signed=True),
        )
        return "metric_gauges", row
    if kind == HISTOGRAM:
        whole: tuple[Any, ...] = (None, None)
        return "metric_histograms", (
            *(name, time, start, scope, unit, "delta", attributes, resource_json, value.count),
            *(float(value.sum), *whole, float(value.min), *whole, float(value.max), *whole),
            json_text(value.bounds),
            json_text(value.counts),
        )
    monotonic = kind == COUNTER
    temporality = "delta" if monotonic else "cumulative"
    return "metric_sums", (
        *(name, time, start, scope, unit, temporality, monotonic, attributes, resource_json),
        *_typed(value, signed=not monotonic),
    )


def _typed(value: float, *, signed: bool) -> tuple[float | None, int | None, int | None]:
    """Return a number in the column of its type: float, signed, unsigned."""
    if isinstance(value, int):
        if signed and -_I64 <= value < _I64:
            return None, value, None
        if not signed and 0 <= value < 2 * _I64:
            return None, None, value
    return float(value), None, None
