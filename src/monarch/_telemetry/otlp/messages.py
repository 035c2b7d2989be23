"""Messages: points and rows as the protobuf messages of OTLP.

Rows are those of the kinds ``spans`` and ``events`` of the recorder, in the order of their columns.
A value that a message cannot hold becomes text; no row fails.

A span's trace is the one that its fields name (``trace_id``, as W3C's trace context writes it): the
number of the message that an actor handles, or of the outermost span. Messages are spans, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
    KeyValueList,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from monarch._telemetry.points import COUNTER, GAUGE, HISTOGRAM, Point
from monarch._telemetry.recorder import ENDPOINT

__all__ = ["logs", "metrics", "traces"]

_I64 = 1 << 63
_SEVERITIES = {
    "TRACE": 1,
    "DEBUG": 5,
    "INFO": 9,
    "WARN": 13,
    "WARNING": 13,
    "ERROR": 17,
    "CRITICAL": 21,
    "FATAL": 21,
}


# -- metrics -------------------------------------------------------------------------------------


def metrics(
    points: Iterable[Point], resource: Mapping[str, Any], *, delta: bool
) -> ExportMetricsServiceRequest:
    """Return the request that exports points; `delta`: what counters and histograms hold."""
    scopes: dict[str, ScopeMetrics] = {}
    found: dict[Any, Metric] = {}
    for point in points:
        identity = point.identity
        metric = found.get(identity)
        if metric is None:
            scope = scopes.get(identity.scope)
            if scope is None:
                scope = scopes[identity.scope] = ScopeMetrics(
                    scope=InstrumentationScope(name=identity.scope)
                )
            metric = found[identity] = scope.metrics.add(
                name=identity.name, unit=identity.unit, description=identity.description
            )
        _add_point(metric, point, delta=delta)
    whole = ResourceMetrics(resource=_resource(resource), scope_metrics=scopes.values())
    return ExportMetricsServiceRequest(resource_metrics=[whole])


def _add_point(metric: Metric, point: Point, *, delta: bool) -> None:
    kind, value = point.identity.kind, point.value
    attributes = [_pair(*pair) for pair in point.attributes]
    start, time = point.start_us * 1000, point.time_us * 1000
    temporality = (
        AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
        if delta and kind in (COUNTER, HISTOGRAM)
        else AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    )
    if kind == HISTOGRAM:
        metric.histogram.aggregation_temporality = temporality
        metric.histogram.data_points.append(
            HistogramDataPoint(
                attributes=attributes,
                start_time_unix_nano=start,
                time_unix_nano=time,
                count=value.count,
                sum=value.sum,
                min=value.min,
                max=value.max,
                explicit_bounds=value.bounds,
                bucket_counts=value.counts,
            )
        )
        return
    number = NumberDataPoint(attributes=attributes, time_unix_nano=time)
    if isinstance(value, int) and -_I64 <= value < _I64:
        number.as_int = value
    else:
        number.as_double = value
    if kind == GAUGE:
        metric.gauge.data_points.append(number)
        return
    number.start_time_unix_nano = start
    metric.sum.is_monotonic = kind == COUNTER
    metric.sum.aggregation_temporality = temporality
    metric.sum.data_points.append(number)


# -- traces --------------------------------------------------------------------------------------


def traces(rows: Iterable[Sequence[Any]], resource: Mapping[str, Any]) -> ExportTraceServiceRequest:
    """Return the request that exports rows of ``spans``."""
    spans = ScopeSpans(scope=InstrumentationScope(name="monarch"))
    for row in rows:
        spans.spans.append(_span(row))
    whole = ResourceSpans(resource=_resource(resource), scope_spans=[spans])
    return ExportTraceServiceRequest(resource_spans=[whole])


def _span(row: Sequence[Any]) -> Span:
    number, name, target, _, fields_json, begin, end, parent, thread, file, line = row
    fields = _fields(fields_json)
    if name == "python_user_span":  # as the tables have it
        name = fields.pop("name", name)
    error = fields.pop("error", None)
    trace = _trace_id(fields.pop("trace_id", None), parent or number)
    about = {"code.namespace": target, "thread.name": thread}
    about |= {"code.filepath": file, "code.lineno": line, "error.type": error}
    kind = Span.SpanKind.SPAN_KIND_INTERNAL
    if target == ENDPOINT:
        kind = Span.SpanKind.SPAN_KIND_SERVER
    span = Span(
        trace_id=trace,
        span_id=_span_id(number),
        name=str(name),
        kind=kind,
        start_time_unix_nano=begin * 1000,
        end_time_unix_nano=max(begin, end) * 1000,
        attributes=_pairs({**fields, **about}),
    )
    if parent:
        span.parent_span_id = _span_id(parent)
    if error is not None:
        span.status.code = Status.StatusCode.STATUS_CODE_ERROR
        span.status.message = str(error)
    return span


def _span_id(number: int) -> bytes:
    return (number & (1 << 64) - 1).to_bytes(8, "big")


def _trace_id(text: Any, root: int) -> bytes:
    try:
        found = bytes.fromhex(text)
        if len(found) == 16:
            return found
    except (TypeError, ValueError):
        pass  # there is none, or that of another notation
    return b"monarch\0" + _span_id(root)


# -- logs ----------------------------------------------------------------------------------------


def logs(rows: Iterable[Sequence[Any]], resource: Mapping[str, Any]) -> ExportLogsServiceRequest:
    """Return the request that exports rows of ``events``."""
    records = ScopeLogs(scope=InstrumentationScope(name="monarch"))
    for row in rows:
        records.log_records.append(_record(row))
    whole = ResourceLogs(resource=_resource(resource), scope_logs=[records])
    return ExportLogsServiceRequest(resource_logs=[whole])


def _record(row: Sequence[Any]) -> LogRecord:
    name, target, level, fields_json, time, parent, thread_id, thread, module, file, line = row
    fields = _fields(fields_json)
    trace_id = fields.pop("trace_id", None)
    body = fields.pop("message", name)
    about = {
        "event_type": "instant_event",
        "name": name,
        "level": level,
        "target": target,
        "thread_id": thread_id,
        "thread_name": thread,
        "module_path": module,
        "file": file,
        "line": line,
    }
    record = LogRecord(
        time_unix_nano=time * 1000,
        observed_time_unix_nano=time * 1000,
        severity_number=_SEVERITIES.get(str(level).upper(), 0),  # type: ignore[arg-type]
        severity_text=str(level),
        body=_any(body),
        attributes=_pairs({**about, **fields}),
    )
    if parent:
        record.span_id = _span_id(parent)
        record.trace_id = _trace_id(trace_id, parent)
    return record


# -- parts of all --------------------------------------------------------------------------------


def _fields(text: str) -> dict[str, Any]:
    try:
        fields: Any = json.loads(text)
    except ValueError:
        return {"fields": text}
    return cast("dict[str, Any]", fields) if isinstance(fields, dict) else {"fields": fields}


def _resource(attributes: Mapping[str, Any]) -> Resource:
    return Resource(attributes=_pairs(attributes))


def _pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [_pair(name, value) for name, value in attributes.items() if value is not None]


def _pair(name: str, value: Any) -> KeyValue:
    return KeyValue(key=name, value=_any(value))


def _any(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int) and -_I64 <= value < _I64:
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, (list, tuple)):
        return AnyValue(array_value=ArrayValue(values=map(_any, cast("list[Any]", value))))
    if isinstance(value, dict):
        return AnyValue(kvlist_value=KeyValueList(values=_pairs(cast("dict[str, Any]", value))))
    # Protobuf refuses text with lone surrogates, as file names may have them.
    return AnyValue(string_value=str(value).encode("utf-8", "replace").decode())
