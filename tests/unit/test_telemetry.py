"""Spans: which sinks receive them, and their cost without a sink. (Metrics: test_metrics.py.)"""

import asyncio
import inspect
import logging
import subprocess
import sys
from contextlib import contextmanager

import pytest

import monarch.actor
from monarch import _telemetry
from monarch._engine.base import instrument
from monarch._telemetry import span, spans, traced
from monarch._telemetry.events import instant_event


class Recorder:
    """A sink that records what it receives."""

    def __init__(self):
        self.heard = []

    def begin_span(self, name):
        self.heard.append(("begin", name))
        return name

    def end_span(self, token, error):
        self.heard.append(("end", token, error))

    def count(self, name, amount, attributes):
        self.heard.append(("count", name, amount, attributes))

    def measure(self, name, value, attributes):
        self.heard.append(("measure", name, value, attributes))

    def event(self, name, attributes):
        self.heard.append(("event", name, attributes))


@pytest.fixture
def sink():
    recorder = Recorder()
    replaced = instrument.install(recorder)
    yield recorder
    assert instrument.install(replaced) is recorder


@pytest.fixture
def alone(monkeypatch):
    """Simulate that OpenTelemetry is not installed."""
    monkeypatch.setattr(spans, "_tracer", None)


class TestSpan:
    def test_unheard_span_is_one_shared_object(self, alone):
        assert span("a") is span("b")
        with span("a") as entered:
            assert entered is span("b")

    def test_sink_hears_begin_and_end(self, sink):
        with span("outer"), span("inner"):
            pass
        assert sink.heard == [
            ("begin", "outer"),
            ("begin", "inner"),
            ("end", "inner", None),
            ("end", "outer", None),
        ]

    def test_exception_passes_and_marks_the_span(self, sink):
        error = ValueError("x")
        with pytest.raises(ValueError, match="x") as raised, span("bad"):
            raise error
        assert raised.value is error
        assert sink.heard == [("begin", "bad"), ("end", "bad", error)]

    def test_a_span_ends_where_it_began_though_the_sink_is_taken_away(self, sink):
        with span("a"):
            instrument.install(None)
        instrument.install(sink)
        assert sink.heard == [("begin", "a"), ("end", "a", None)]

    def test_opentelemetry_hears_too(self, sink, monkeypatch):
        seen = []

        class Tracer:
            @contextmanager
            def start_as_current_span(self, name):
                seen.append(name)
                yield
                seen.append("end")

        monkeypatch.setattr(spans, "_tracer", Tracer())
        with span("a"):
            pass
        assert seen == ["a", "end"]
        assert sink.heard == [("begin", "a"), ("end", "a", None)]


class TestTraced:
    def test_plain_function(self, sink):
        @traced
        def f(x: int) -> int:
            """Double it."""
            return 2 * x

        assert f(2) == 4
        assert (f.__name__, f.__doc__) == ("f", "Double it.")
        assert list(inspect.signature(f).parameters) == ["x"]
        assert sink.heard == [("begin", "f"), ("end", "f", None)]

    def test_coroutine_function(self, sink):
        @traced(name="wait")
        async def f(x):
            sink.heard.append("in")
            await asyncio.sleep(0)
            return x

        assert inspect.iscoroutinefunction(f)
        call = f(3)
        assert sink.heard == []
        assert asyncio.run(call) == 3
        assert sink.heard == [("begin", "wait"), "in", ("end", "wait", None)]


def test_log_records_become_events(sink, monkeypatch):
    # An earlier test may have made this process a client, which puts the actor's name into logs.
    monkeypatch.setattr(monarch.actor.config, "prefix_python_logs_with_actor", False)
    logger = logging.getLogger("test_telemetry.forward")
    logger.propagate = False
    handler = _telemetry.TracingForwarder(level=logging.INFO)
    logger.addHandler(handler)
    try:
        logger.warning("lost %d", 3)
        logger.debug("too fine")
    finally:
        logger.removeHandler(handler)
    ((kind, name, attributes),) = sink.heard
    assert (kind, name) == ("event", "lost 3")
    assert (attributes["logger"], attributes["level"]) == (logger.name, "WARNING")


def test_an_instant_event_goes_to_the_sink_and_the_current_span(sink, monkeypatch):
    added = []

    class Trace:
        def get_current_span(self):
            return self

        def add_event(self, name, attributes):
            added.append(name)

    monkeypatch.setattr(spans, "_trace", Trace())
    instant_event("restarted")
    assert sink.heard == [("event", "restarted", {"level": "INFO"})]
    assert added == ["restarted"]


def test_tracer_is_opentelemetrys():
    trace = pytest.importorskip("opentelemetry.trace")
    assert isinstance(_telemetry.get_monarch_tracer(), trace.Tracer)


def test_without_opentelemetry():
    """Spans and counters work; the error of an API that needs the package says how to get it."""
    program = """
import sys
sys.modules["opentelemetry"] = None
from monarch._telemetry import get_meter, get_monarch_tracer, span, traced, TracingForwarder
with span("a"):
    get_meter().create_counter("c").add(1)
    get_meter().create_histogram("h").record(1)
import logging
logging.getLogger().addHandler(TracingForwarder())
logging.warning("x")
try:
    get_monarch_tracer()
except ModuleNotFoundError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stderr == ""
    assert "pip install 'pymonarch[telemetry]'" in run.stdout
