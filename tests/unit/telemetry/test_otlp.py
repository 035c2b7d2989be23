"""The export by OTLP: options, totals, messages, and a collector that fails and comes back."""

from __future__ import annotations

import json
import logging
import socket
import time

import pytest

pytest.importorskip("opentelemetry.proto")

from monarch._telemetry.otlp import messages, sender
from monarch._telemetry.otlp.exporter import Exporter
from monarch._telemetry.otlp.options import SIGNALS, Destination, Options, read, wanted
from monarch._telemetry.otlp.sender import FAILED, REFUSED, SENT, Sender
from monarch._telemetry.otlp.totals import Totals
from monarch._telemetry.points import OVERFLOW, Distribution, Identity, Point
from tests.otlp_receiver import OtlpReceiver, attributes

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
BASE = {ENDPOINT: "http://c:4318"}


# -- options -------------------------------------------------------------------------------------


def urls(environ):
    return {signal: to.url for signal, to in read(environ).destinations.items()}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        (BASE, {s: f"http://c:4318/v1/{s}" for s in SIGNALS}),
        ({ENDPOINT: "http://c:4318/x/"}, {s: f"http://c:4318/x/v1/{s}" for s in SIGNALS}),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "https://l/in"}, {"logs": "https://l/in"}),
        ({**BASE, "OTEL_SDK_DISABLED": "true"}, {}),
        (
            {**BASE, "OTEL_TRACES_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "console"},
            {"metrics": "http://c:4318/v1/metrics"},
        ),
        (
            {**BASE, "ENABLE_OTEL_METRICS": "0", "ENABLE_OTEL_TRACING": "0"},
            {"logs": "http://c:4318/v1/logs"},
        ),
        (
            {**BASE, "OTEL_LOGS_EXPORTER": "console,otlp", "ENABLE_OTEL_METRICS": "off"},
            {s: f"http://c:4318/v1/{s}" for s in ("traces", "logs")},
        ),
    ],
)
def test_destinations_follow_the_documented_variables(environ, expected):
    assert urls(environ) == expected
    assert read(environ).problems == ()


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        (ENDPOINT, "collector:4318", "no URL of a collector"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "only http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "traces are not exported"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret-without-name", "left out"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon", "no duration"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-3", "no positive number"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "some", "neither cumulative"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "only gzip"),
    ],
)
def test_a_variable_that_cannot_be_used_is_a_problem_that_names_it(variable, value, text):
    problems = read({**BASE, variable: value}).problems
    assert problems
    assert all(variable in problem and text in problem for problem in problems if text in problem)
    assert any(text in problem for problem in problems)
    assert "secret" not in "".join(problems)


def test_own_variables_of_a_signal_come_first_and_headers_are_decoded():
    found = read(
        {
            **BASE,
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20abc, x=1",
            "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "x=2",
            "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
        }
    ).destinations
    assert found["metrics"].headers == {"authorization": "Bearer abc", "x": "1"}
    assert found["logs"].headers == {"x": "2"}
    assert [found[s].gzip for s in ("metrics", "traces")] == [False, True]
    assert found["logs"].certificate == "/ca.pem"
    assert "abc" not in repr(found)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10000", 10.0), ("10", 10.0), ("1500ms", 1.5), ("0.5", 0.5)]
)
def test_timeouts_of_both_documents(text, seconds):
    found = read({**BASE, "OTEL_EXPORTER_OTLP_TIMEOUT": text}).destinations["logs"]
    assert found.timeout == seconds


@pytest.mark.parametrize(("text", "seconds"), [("500", 0.5), ("1s", 1.0), ("", 1.0), ("2m", 120.0)])
def test_intervals_in_milliseconds_and_as_text(text, seconds):
    assert read({**BASE, "OTEL_METRIC_EXPORT_INTERVAL": text}).interval == seconds


def test_what_is_wanted_is_known_without_reading_the_rest():
    assert not wanted({})
    assert not wanted({"OTEL_EXPORTER_OTLP_HEADERS": "a=b", ENDPOINT: ""})
    assert wanted({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"})


# -- totals --------------------------------------------------------------------------------------

COUNT = Identity("c", "counter")
HIST = Identity("h", "histogram")
GAUGE = Identity("g", "gauge")
LEVEL = Identity("u", "up_down")


def interval(n, value=1):
    dist = Distribution(1, n, n, n, (1.0,), (1, 0))
    return [
        Point(COUNT, (), value, n * 10, n * 10 + 10),
        Point(HIST, (), dist, n * 10, n * 10 + 10),
        Point(GAUGE, (), n, n * 10, n * 10 + 10),
        Point(LEVEL, (), n, n * 10, n * 10 + 10),
    ]


def values(points):
    return {p.identity.name: getattr(p.value, "count", p.value) for p in points}


def test_cumulative_sums_grow_and_hold_until_now():
    totals = Totals(delta=False)
    for n in (1, 2):
        totals.add(interval(n))
        points = totals.take(99)
        assert values(points) == {"c": n, "h": n, "g": n, "u": n}
        assert {(p.start_us, p.time_us) for p in points if p.identity != GAUGE} == {(10, 99)}
    assert values(totals.take(100)) == {"c": 2, "h": 2, "g": 2, "u": 2}


def test_deltas_begin_anew_and_come_back_after_a_failure():
    totals = Totals(delta=True)
    totals.add(interval(1))
    first = totals.take(99)
    totals.add(interval(2, value=5))
    totals.restore(first)
    points = totals.take(99)
    assert values(points) == {"c": 6, "h": 2, "g": 2, "u": 2}
    (count,) = [p for p in points if p.identity == COUNT]
    assert (count.start_us, count.time_us) == (10, 30)
    assert values(totals.take(99)) == {"u": 2}


def test_series_are_bounded_for_the_life_of_the_process():
    totals = Totals(delta=False)
    for n in range(5000):
        totals.add([Point(COUNT, (("n", n),), 1, 0, 1)])
    points = totals.take(1)
    assert len(points) == 2000
    assert {p.attributes: p.value for p in points}[OVERFLOW] == 3001


# -- messages ------------------------------------------------------------------------------------


def test_points_become_the_messages_of_their_kinds():
    request = messages.metrics(interval(3), {"host.name": "h", "process.pid": 7}, delta=False)
    (whole,) = type(request).FromString(request.SerializeToString()).resource_metrics
    assert attributes(whole.resource.attributes) == {"host.name": "h", "process.pid": 7}
    (scope,) = whole.scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    (point,) = found["c"].sum.data_points
    assert (point.as_int, point.start_time_unix_nano, point.time_unix_nano) == (1, 30_000, 40_000)
    assert found["c"].sum.is_monotonic
    assert not found["u"].sum.is_monotonic
    assert {found[n].sum.aggregation_temporality for n in "cu"} == {2}
    assert found["g"].gauge.data_points[0].as_int == 3
    (point,) = found["h"].histogram.data_points
    assert (point.count, point.sum, point.min, list(point.bucket_counts)) == (1, 3, 3, [1, 0])


def test_deltas_are_marked_and_up_down_counters_are_not():
    request = messages.metrics(interval(3), {}, delta=True)
    found = {m.name: m for m in request.resource_metrics[0].scope_metrics[0].metrics}
    kinds = found["c"].sum, found["h"].histogram, found["u"].sum
    assert [kind.aggregation_temporality for kind in kinds] == [1, 1, 2]


SPAN = (
    7,
    "python_user_span",
    "t",
    "INFO",
    json.dumps({"name": "load", "n": 3}),
    5,
    9,
    3,
    "main",
    None,
    12,
)


def test_spans_have_their_names_parents_and_errors():
    failed = (
        8,
        "call",
        "t",
        "INFO",
        json.dumps({"error": "ValueError"}),
        5,
        9,
        None,
        "main",
        "f.py",
        1,
    )
    request = messages.traces([SPAN, failed], {})
    first, second = request.resource_spans[0].scope_spans[0].spans
    assert (first.name, first.span_id, first.parent_span_id) == (
        "load",
        b"\0" * 7 + b"\7",
        b"\0" * 7 + b"\3",
    )
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (5000, 9000)
    assert attributes(first.attributes) == {
        "n": 3,
        "code.namespace": "t",
        "thread.name": "main",
        "code.lineno": 12,
    }
    assert (second.status.code, second.status.message) == (2, "ValueError")
    assert len(first.trace_id) == len(second.trace_id) == 16
    assert first.trace_id != second.trace_id


def test_a_trace_context_is_kept():
    trace = "0af7651916cd43dd8448eb211c80319c"
    row = (*SPAN[:4], json.dumps({"trace_id": trace}), *SPAN[5:])
    (span,) = messages.traces([row], {}).resource_spans[0].scope_spans[0].spans
    assert span.trace_id.hex() == trace


def test_log_records_have_text_severity_and_fields():
    fields = {"message": "lost 3", "rank": 2, "step": 12, "bad": "\ud800"}
    row = ("train", "log_events", "WARN", json.dumps(fields), 5, 7, 99, "main", "m", "f.py", 3)
    (record,) = messages.logs([row], {}).resource_logs[0].scope_logs[0].log_records
    assert (record.body.string_value, record.severity_number, record.severity_text) == (
        "lost 3",
        13,
        "WARN",
    )
    found = attributes(record.attributes)
    assert (found["rank"], found["step"], found["file"], found["line"]) == (2, 12, "f.py", 3)
    assert (found["target"], found["bad"]) == ("log_events", "?")
    assert record.span_id.endswith(b"\7")


# -- sending -------------------------------------------------------------------------------------


def destination(url, **other):
    fields = {"headers": {}, "timeout": 60.0, "gzip": False, "certificate": None}
    fields |= {"client_certificate": None, "client_key": None, **other}
    return Destination(url=url, **fields)


@pytest.fixture
def receiver():
    found = OtlpReceiver()
    yield found
    found.close()


@pytest.fixture
def closed_port():
    """A port of loopback at which nothing listens: bound, and not listening."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_a_request_has_its_headers_and_may_be_compressed(receiver):
    to = destination(receiver.url + "/v1/logs", headers={"Authorization": "Bearer abc"}, gzip=True)
    row = ("n", "t", "INFO", "{}", 5, None, 1, "m", None, None, None)
    data = messages.logs([row], {}).SerializeToString()
    assert Sender("logs", to, speak=False).send(data) == SENT
    (headers,) = receiver.headers
    assert headers["Authorization"] == "Bearer abc"
    assert headers["Content-Type"] == "application/x-protobuf"
    assert headers["Content-Encoding"] == "gzip"
    assert len(receiver.logs()) == 1


def test_an_outage_is_one_warning_and_its_end_another(receiver, caplog, monkeypatch):
    monkeypatch.setattr(sender, "_PAUSES", (1e-9, 1e-9))
    caplog.set_level(logging.DEBUG, "monarch.telemetry")
    mine = Sender("logs", destination(receiver.url + "/v1/logs"), speak=True)
    receiver.status = 503
    assert mine.send(b"") == FAILED
    assert mine.send(b"") == FAILED
    receiver.status = 200
    assert mine.send(b"") == SENT
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert "HTTP 503" in caplog.text
    assert "again" in caplog.records[-1].getMessage()


def test_what_the_collector_refuses_is_not_sent_again(receiver):
    receiver.status = 401
    mine = Sender("logs", destination(receiver.url + "/v1/logs"), speak=False)
    assert mine.send(b"") == REFUSED
    assert not mine.ready()


def test_no_collector_is_a_failure_with_a_pause(closed_port):
    mine = Sender("logs", destination(f"http://127.0.0.1:{closed_port}/"), speak=False)
    assert mine.ready()
    assert mine.send(b"") == FAILED
    assert not mine.ready()


def make_exporter(url, **other):
    fields = {
        "interval": 1.0,
        "delta": False,
        "delay": 1.0,
        "queue": 10,
        "batch": 4,
        "problems": (),
    }
    to = {s: destination(f"{url}/v1/{s}") for s in ("metrics", "traces", "logs")}
    return Exporter(Options(destinations=to, **{**fields, **other}), {"k": "v"}, speak=False)


def log_row(n):
    return (str(n), "t", "INFO", "{}", n, None, 1, "m", None, None, None)


def bodies(receiver):
    return [record.body.string_value for _, record in receiver.logs()]


def test_rows_are_sent_in_order_and_in_batches(receiver):
    exporter = make_exporter(receiver.url)
    for n in range(9):
        exporter.add_row("logs", log_row(n))
    exporter.add_row("traces", SPAN)
    exporter.add_points(interval(1))
    exporter.flush()
    assert bodies(receiver) == [str(n) for n in range(9)]
    assert len(receiver.requests["/v1/logs"]) == 3
    assert [span.name for _, span in receiver.spans()] == ["load"]
    assert {metric.name for _, _, metric in receiver.metrics()} == set("chgu")


def test_queues_drop_the_oldest_and_say_so_and_the_collector_comes_back(receiver):
    exporter = make_exporter(receiver.url)
    receiver.status = 503
    for n in range(14):
        exporter.add_row("logs", log_row(n))
    exporter.add_points(interval(1))
    exporter.flush()
    assert receiver.refused == 2  # logs and metrics; there are no spans
    for n in range(14, 17):
        exporter.add_row("logs", log_row(n))
    receiver.status = 200
    exporter.add_points(interval(2))
    exporter.flush()
    assert bodies(receiver) == [str(n) for n in range(7, 17)]
    exporter.flush()
    found = {m.name: m for _, _, m in receiver.metrics()}
    assert found["c"].sum.data_points[0].as_int == 2  # nothing of the sums is lost
    (dropped,) = found["monarch.otlp.dropped"].sum.data_points
    assert (dropped.as_int, attributes(dropped.attributes)) == (7, {"signal": "logs"})


def test_a_dead_collector_delays_the_end_by_no_request(closed_port):
    exporter = make_exporter(f"http://127.0.0.1:{closed_port}")
    exporter.add_row("logs", log_row(1))
    exporter.flush()
    started = exporter._senders["logs"]._next
    exporter.end(30.0)
    assert exporter._senders["logs"]._next == started  # no further attempt


def test_a_collector_that_never_answers_ends_with_the_limit():
    """The exporter's end takes the limit, though the time-out of a request is longer."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        exporter = make_exporter(f"http://127.0.0.1:{silent.getsockname()[1]}")
        exporter.add_row("logs", log_row(1))
        before = time.monotonic()
        exporter.end(0.2)
        assert time.monotonic() - before < 50  # and not 60 s for each signal


def test_the_thread_sends_and_ends(receiver):
    exporter = make_exporter(receiver.url, interval=0.05, delay=0.05)
    exporter.start()
    exporter.add_row("logs", log_row(1))
    exporter.add_points(interval(1))
    receiver.wait(lambda: receiver.requests["/v1/logs"] and receiver.requests["/v1/metrics"])
    exporter.add_row("logs", log_row(2))
    exporter.end(60.0)
    receiver.wait(lambda: bodies(receiver) == ["1", "2"])
