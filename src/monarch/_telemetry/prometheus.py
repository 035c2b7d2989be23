"""The text that Prometheus scrapes, from rows of the metric tables. Pure.

Prometheus wants sums since a start, and the rows of counters and histograms hold those of one
interval, so an `Exposition` adds them up, row by row. `prometheus_text` is the same for rows that
are all there.

Names follow OpenTelemetry's rules for Prometheus, so a dashboard works with a scrape and with a
collector alike: ``monarch.endpoint.duration`` in ``s`` is ``monarch_endpoint_duration_seconds``,
and a counter ends in ``_total``. Labels are the attributes of the series and, of its process,
``job`` (the service's name), ``instance``, ``host_name``, ``monarch_proc``, ``monarch_mesh`` and
``monarch_rank``.

A gauge of a process that has reported nothing for five minutes is left out. The number of series is
bounded; further ones are counted in ``monarch_prometheus_left_out_series``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

__all__ = ["Exposition", "Scrape", "metric_name", "prometheus_text"]

_LIMIT = 100_000  # series
_STALE_US = 300_000_000
_OVERLAP_US = 60_000_000  # how late a row may come
_UNITS = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
    "By": "bytes",
    "%": "percent",
}
_RESOURCE = {
    "service.name": "job",
    "service.instance.id": "instance",
    "host.name": "host_name",
    "monarch.proc": "monarch_proc",
    "monarch.mesh": "monarch_mesh",
    "monarch.rank": "monarch_rank",
}

_Labels = tuple[tuple[str, str], ...]


def metric_name(name: str, unit: str, kind: str) -> str:
    """Return the name of a metric in Prometheus; ``kind``: counter, gauge or histogram.

    >>> metric_name("monarch.endpoint.duration", "s", "histogram")
    'monarch_endpoint_duration_seconds'
    >>> metric_name("monarch.endpoint.calls", "{call}", "counter")
    'monarch_endpoint_calls_total'
    """
    found = re.sub(r"[^a-zA-Z0-9_:]+", "_", name).strip("_")
    if not found or found[0].isdigit():
        found = f"_{found}"
    suffix = _UNITS.get(unit, "")
    tokens = found.split("_")
    if suffix and suffix not in tokens:
        found = f"{found}_{suffix}"
    if kind == "counter" and not found.endswith("_total"):
        found = f"{found}_total"
    return found


class _Histogram:
    """A distribution since the start."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: list[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0


class Exposition:
    """Adds up rows, and writes them as Prometheus reads them."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._values: dict[tuple[str, _Labels], Any] = {}
        self._times: dict[tuple[str, _Labels], int] = {}
        self._left_out = 0

    def add(self, table: str, row: Sequence[Any]) -> None:
        """Take a row of ``metric_sums``, ``metric_gauges`` or ``metric_histograms``.

        Rows of one series come in the order of their times; one that is not newer than the last one
        is left out, so rows may be read twice.
        """
        if table == "metric_sums":
            name, time, _, _, unit, _, monotonic, attributes, resource, *values = row
            kind = "counter" if monotonic else "gauge"
        elif table == "metric_gauges":
            name, time, _, _, unit, attributes, resource, *values = row
            kind = "gauge"
        elif table == "metric_histograms":
            name, time, _, _, unit, _, attributes, resource, _, *values = row
            kind = "histogram"
        else:
            raise ValueError(f"{table} is no table of metrics")
        key = self._key(metric_name(name, unit, kind), kind, attributes, resource)
        if key is None or time <= self._times.get(key, -1):
            return
        self._times[key] = time
        if kind == "histogram":
            self._add_distribution(key, row)
            return
        value = next((value for value in values if value is not None), 0)
        if kind == "counter":
            value += self._values.get(key, 0)
        self._values[key] = value

    def _key(
        self, name: str, kind: str, attributes: str, resource: str
    ) -> tuple[str, _Labels] | None:
        """Return the key of a series; None if there is no room for it, or its name is taken."""
        if self._kinds.setdefault(name, kind) != kind:
            return None
        key = name, _labels(attributes, resource)
        if key not in self._times and len(self._times) >= _LIMIT:
            self._left_out += 1
            return None
        return key

    def _add_distribution(self, key: tuple[str, _Labels], row: Sequence[Any]) -> None:
        bounds, counts = json.loads(row[-2]), json.loads(row[-1])
        known = self._values.get(key)
        if known is None or known.bounds != bounds:
            known = self._values[key] = _Histogram(bounds)
        known.count += row[8]
        known.sum += next((value for value in row[9:12] if value is not None), 0)
        known.counts = [before + now for before, now in zip(known.counts, counts, strict=True)]

    def text(self, now_us: int) -> str:
        """Return the exposition, in the text format 0.0.4."""
        lines: list[str] = []
        families: dict[str, list[tuple[str, _Labels]]] = {}
        for key in self._values:
            families.setdefault(key[0], []).append(key)
        for name, keys in sorted(families.items()):
            kind = self._kinds[name]
            found: list[str] = []
            for key in keys:
                if kind == "gauge" and self._times[key] < now_us - _STALE_US:
                    continue
                found += _samples(name, key[1], self._values[key])
            if found:
                lines += [f"# TYPE {name} {kind}", *found]
        lines.append("# TYPE monarch_prometheus_left_out_series counter")
        lines.append(f"monarch_prometheus_left_out_series {self._left_out}")
        return "\n".join(lines) + "\n"


def prometheus_text(rows: Iterable[tuple[str, Sequence[Any]]], now_us: int) -> str:
    """Return the exposition of rows, each with the name of its table."""
    exposition = Exposition()
    for table, row in rows:
        exposition.add(table, row)
    return exposition.text(now_us)


def _labels(attributes: str, resource: str) -> _Labels:
    labels: dict[str, str] = {}
    about = json.loads(resource)
    for name, label in _RESOURCE.items():
        if name in about:
            labels[label] = _plain(about[name])
    for name, value in json.loads(attributes).items():
        label = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        labels[f"_{label}" if label[:1].isdigit() else label] = _plain(value)
    return tuple(sorted(labels.items()))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _samples(name: str, labels: _Labels, value: Any) -> list[str]:
    if not isinstance(value, _Histogram):
        return [f"{name}{_braces(labels)} {value}"]
    found: list[str] = []
    below = 0
    for bound, count in zip([*value.bounds, float("inf")], value.counts, strict=True):
        below += count
        le = "+Inf" if bound == float("inf") else f"{bound:g}"
        found.append(f"{name}_bucket{_braces((*labels, ('le', le)))} {below}")
    found.append(f"{name}_sum{_braces(labels)} {value.sum}")
    found.append(f"{name}_count{_braces(labels)} {value.count}")
    return found


def _braces(labels: _Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


# -- from a store --------------------------------------------------------------------------------


class _Queries(Protocol):
    def query(self, sql: str) -> Any: ...


_COLUMNS = {
    "metric_sums": "name, timestamp_us, start_timestamp_us, scope_name, unit, temporality, "
    "is_monotonic, attributes_json, resource_attributes_json, sum_f64, sum_i64, sum_u64",
    "metric_gauges": "name, timestamp_us, start_timestamp_us, scope_name, unit, attributes_json, "
    "resource_attributes_json, value_f64, value_i64, value_u64",
    "metric_histograms": "name, timestamp_us, start_timestamp_us, scope_name, unit, temporality, "
    "attributes_json, resource_attributes_json, count, sum_f64, sum_i64, sum_u64, bounds_json, "
    "bucket_counts_json",
}


class Scrape:
    """The exposition of a telemetry store: each `text` reads the rows that are new.

    For one thread at a time. Raises what the queries raise.
    """

    def __init__(self, queries: _Queries) -> None:
        self._queries = queries
        self._exposition = Exposition()
        self._newest = dict.fromkeys(_COLUMNS, 0)

    def text(self, now_us: int) -> str:
        """Return the exposition at this time, in microseconds since the epoch of Unix."""
        for table, columns in _COLUMNS.items():
            since = self._newest[table] - _OVERLAP_US
            rows = self._queries.query(
                f"SELECT {columns} FROM {table} WHERE timestamp_us > {since} "  # noqa: S608
                "ORDER BY timestamp_us"
            ).rows
            for row in rows:
                self._exposition.add(table, row)
                self._newest[table] = max(self._newest[table], row[1])
        return self._exposition.text(now_us)
