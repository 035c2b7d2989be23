"""Metrics: what instruments gather, how it is collected, and the rows that it becomes."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import warnings
from itertools import pairwise

import pytest

from monarch import _telemetry
from monarch._spi import UNITS, statistics
from monarch._telemetry import collection, engine_metrics, get_meter, metrics, points, resource
from monarch._telemetry.metrics import LIMIT, Meter
from monarch._telemetry.points import Distribution, Identity, Point, canonical, to_row


class Receiver:
    """Keeps the points of all collections."""

    def __init__(self):
        self.points = []
        self.arrived = threading.Event()

    def __call__(self, found):
        self.points.extend(found)
        if found:
            self.arrived.set()

    def values(self, name):
        """Return {attributes: value} of an instrument since the last call, last points winning."""
        mine = {p.attributes: p.value for p in self.points if p.identity.name == name}
        self.points = [p for p in self.points if p.identity.name != name]
        return mine


@pytest.fixture
def meter(monkeypatch):
    """A meter of its own; what it made is forgotten afterwards."""
    engine_metrics.EndpointStatistics(str)  # whose instruments are made once in a process, and stay
    monkeypatch.setattr(metrics, "_instruments", [])
    return Meter("test")


@pytest.fixture
def receiver(meter):
    """A receiver of points, that the collection's thread never calls during a test."""
    found = Receiver()
    collection.subscribe(found, 3600.0)
    yield found
    collection.unsubscribe(found)


def test_counters_keep_types_of_amounts_and_attributes(meter, receiver):
    counter = meter.create_counter("c", unit="1", description="d")
    counter.add(2)
    counter.add(2.5, {"k": 1})
    counter.add(1, {"k": 1.0})
    counter.add(1, {"k": True})
    counter.add(1, {"k": "1"})
    counter.add(1, {"k": [1, 2]})
    collection.collect()
    found = [(type(v), p.value, *p.attributes) for p in receiver.points for v in [p.value]]
    assert (int, 2) in found
    assert (float, 2.5, ("k", 1)) in found
    kinds = {type(p.attributes[0][1]) for p in receiver.points if p.attributes}
    assert kinds == {int, float, bool, str, tuple}
    assert {p.identity for p in receiver.points} == {Identity("c", "counter", "1", "d", "test")}


def test_a_counter_has_deltas_and_an_up_down_counter_sums(meter, receiver):
    counter, level = meter.create_counter("c"), meter.create_up_down_counter("u")
    for _ in range(2):
        counter.add(3)
        level.add(3)
        collection.collect()
        assert receiver.values("c") == {(): 3}
    level.add(-1)
    collection.collect()
    assert (receiver.values("c"), receiver.values("u")) == ({}, {(): 5})


def test_intervals_follow_each_other(meter, receiver):
    counter = meter.create_counter("c")
    for _ in range(3):
        counter.add(1)
        collection.collect()
    first, second, third = receiver.points
    assert first.start_us <= first.time_us == second.start_us <= second.time_us == third.start_us


def test_two_orders_of_attributes_are_one_series(meter, receiver):
    counter, histogram, gauge = (
        meter.create_counter("c"),
        meter.create_histogram("h", explicit_bucket_boundaries_advisory=[1]),
        meter.create_gauge("g"),
    )
    for n, attributes in enumerate([{"a": 1, "b": 2}, {"b": 2, "a": 1}]):
        counter.add(1, attributes)
        histogram.record(n, attributes)
        gauge.set(n, attributes)
    collection.collect()
    series = (("a", 1), ("b", 2))
    assert receiver.values("c") == {series: 2}
    assert receiver.values("h") == {series: Distribution(2, 1, 0, 1, (1.0,), (2, 0))}
    assert receiver.values("g") == {series: 1}


def test_series_beyond_the_limit_are_counted_together(meter, receiver):
    counter, histogram = meter.create_counter("c"), meter.create_histogram("h")
    level = meter.create_up_down_counter("u")
    for n in range(LIMIT + 500):
        counter.add(1, {"n": n})
        level.add(1, {"n": n})
        histogram.record(1.0, {"n": n})
    collection.collect()
    for name in ("c", "u"):
        values = receiver.values(name)
        assert len(values) == LIMIT
        assert values[points.OVERFLOW] == 501
        assert sum(values.values()) == LIMIT + 500
    assert receiver.values("h")[points.OVERFLOW].count == 501
    for n in range(LIMIT):  # an up-down counter keeps its series
        level.add(1, {"later": n})
    collection.collect()
    assert receiver.values("u") == {points.OVERFLOW: 501 + LIMIT}


def test_histogram_counts_like_a_model(meter, receiver):
    draw = random.Random(7)
    bounds = [-5, 0, 0.5, 10]
    histogram = meter.create_histogram("h", explicit_bucket_boundaries_advisory=bounds)
    values = [draw.choice([draw.uniform(-9, 20), draw.choice(bounds)]) for _ in range(500)]
    for value in values:
        histogram.record(value)
    collection.collect()
    found = receiver.values("h")[()]
    edges = [float("-inf"), *bounds, float("inf")]
    expected = tuple(sum(low < value <= high for value in values) for low, high in pairwise(edges))
    assert found.counts == expected
    assert (found.count, found.min, found.max) == (500, min(values), max(values))
    assert found.sum == pytest.approx(sum(values))


def test_bounds_that_do_not_rise_are_refused(meter):
    with pytest.raises(ValueError, match="must rise"):
        meter.create_histogram("h", explicit_bucket_boundaries_advisory=[1, 1])


@pytest.mark.parametrize(
    ("unit", "value"),
    [("s", 3e-5), ("ms", 0.4), ("us", 7), ("ns", 812_345), ("By", 1 << 30), ("", 40_000_000)],
)
def test_default_bounds_suit_the_unit(meter, receiver, unit, value):
    meter.create_histogram("h", unit).record(value)
    collection.collect()
    found = receiver.values("h")[()]
    at = found.counts.index(1)
    assert 0 < at < len(found.bounds)
    assert found.bounds[at] / found.bounds[at - 1] <= 4


def test_gauges_show_the_last_value_of_an_interval(meter, receiver):
    gauge = meter.create_gauge("g")
    gauge.set(1)
    gauge.set(2.5)
    collection.collect()
    assert receiver.values("g") == {(): 2.5}
    collection.collect()
    assert receiver.values("g") == {}


def test_observables_are_asked_once_per_interval(meter, receiver):
    total = iter([10, 25, 4])
    meter.create_observable_counter("c", [lambda _: [next(total)]])
    meter.create_observable_up_down_counter("u", [lambda _: [(7, {"k": "v"}), (1, {"k": "v"})]])

    def temperatures():
        for n in range(5):
            yield [(n + 0.5, {"room": 1})]

    meter.create_observable_gauge("g", callbacks=[temperatures()])
    seen = []
    for _ in range(3):
        collection.collect()
        seen.append(receiver.values("c"))
    assert seen == [{(): 10}, {(): 15}, {(): 4}]  # the last: it has begun anew
    assert receiver.values("u") == {(("k", "v"),): 8}
    assert receiver.values("g") == {(("room", 1),): 2.5}


def test_opentelemetrys_observations_are_understood(meter, receiver):
    api = pytest.importorskip("opentelemetry.metrics")
    asked = []

    def callback(options):
        asked.append(options)
        return [api.Observation(3, {"k": 1})]

    meter.create_observable_gauge("g", [callback])
    collection.collect()
    assert receiver.values("g") == {(("k", 1),): 3}
    assert isinstance(asked[0], api.CallbackOptions)


def test_a_failing_callback_costs_one_warning_and_nothing_else(meter, receiver):
    meter.create_observable_gauge("bad", [lambda _: 1 / 0])
    counter = meter.create_counter("c")
    counter.add(1)
    with pytest.warns(RuntimeWarning, match=r"'bad'.*ZeroDivisionError"):
        collection.collect()
    assert receiver.values("c") == {(): 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collection.collect()


def test_the_same_instrument_is_one_object(meter, receiver):
    assert meter.create_counter("c", "s") is meter.create_counter("c", "s")
    assert meter.create_counter("c", "s") is not meter.create_counter("c", "ms")
    one = meter.create_observable_gauge("g", [lambda _: [(1, {"from": 1})]])
    assert meter.create_observable_gauge("g", [lambda _: [(2, {"from": 2})]]) is one
    collection.collect()
    assert sorted(receiver.values("g").values()) == [1, 2]


def test_amounts_of_other_libraries_become_numbers(meter, receiver):
    numpy = pytest.importorskip("numpy")
    counter = meter.create_counter("c")
    counter.add(numpy.int64(2))
    counter.add(True)
    counter.add(numpy.float32(0.5), {"f": 1})
    collection.collect()
    values = receiver.values("c")
    assert (values[()], type(values[()])) == (3, int)
    assert (values[("f", 1),], type(values[("f", 1),])) == (0.5, float)


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_left_out(meter, receiver, amount):
    for instrument, report in (
        (meter.create_counter("c"), "add"),
        (meter.create_up_down_counter("u"), "add"),
        (meter.create_histogram("h"), "record"),
        (meter.create_gauge("g"), "set"),
    ):
        with pytest.warns(RuntimeWarning, match="not finite"):
            getattr(instrument, report)(amount)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(instrument, report)(amount)
    collection.collect()
    assert receiver.points == []


def test_counter_refuses_to_shrink(meter, receiver):
    for amount in (-1, -0.5):
        with pytest.raises(OverflowError, match="up_down"):
            meter.create_counter("c").add(amount)
    collection.collect()
    assert receiver.values("c") == {}


def test_a_name_is_text(meter):
    for name in ("", None, 3):
        with pytest.raises(ValueError, match="name"):
            meter.create_counter(name)


def test_no_value_is_lost_or_counted_twice_while_it_is_collected(meter, receiver):
    """Threads add while another collects: the sum of all intervals is exact."""
    counter, histogram = meter.create_counter("c"), meter.create_histogram("h")
    done = threading.Event()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def add(n):
        for i in range(2000):
            counter.add(1, {"i": i % 3})
            histogram.record(i)

    def collect():
        while not done.is_set():
            collection.collect()

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    collector = threading.Thread(target=collect)
    try:
        for thread in (collector, *threads):
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        done.set()
        collector.join()
        sys.setswitchinterval(before)
    collection.collect()
    assert sum(p.value for p in receiver.points if p.identity.name == "c") == 8000
    assert sum(p.value.count for p in receiver.points if p.identity.name == "h") == 8000


# -- the collection ------------------------------------------------------------------------------


def test_without_a_receiver_nothing_is_kept_and_no_thread_runs(meter):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "monarch-metrics"]

    for thread in threads():  # of the test before, about to end
        thread.join(60)
    counter = meter.create_counter("c")
    counter.add(1)
    assert counter._cells is None
    receiver = Receiver()
    collection.subscribe(receiver, 0.01)
    counter.add(2)
    assert receiver.arrived.wait(60)
    (thread,) = threads()
    collection.unsubscribe(receiver)
    thread.join(60)
    assert threads() == []
    assert receiver.values("c") == {(): 2}
    assert counter._cells is None


def test_a_defect_of_one_receiver_or_sampler_hurts_no_other(meter, receiver):
    def bad(*_):
        raise LookupError("oops")

    counter = meter.create_counter("c")
    collection.subscribe(bad, 3600.0)
    collection.sample(bad)
    try:
        counter.add(1)
        with pytest.warns(UserWarning, match="oops"):
            collection.collect()
        counter.add(1)
        collection.collect()
    finally:
        collection.unsubscribe(bad)
        collection._samplers.remove(bad)
    assert [p.value for p in receiver.points] == [1, 1]


def test_a_forked_child_gathers_nothing(meter, receiver):
    """Also if another thread held a lock at the fork: the child's next value does not wait."""
    counter = meter.create_counter("c")
    with counter._lock, metrics._making, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads
        pid = os.fork()
        if pid == 0:
            try:
                collection._forget()
                counter.add(1)
                os._exit(0 if counter._cells is None else 3)
            finally:
                os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- OpenTelemetry -------------------------------------------------------------------------------


def test_is_a_meter_for_opentelemetry():
    api = pytest.importorskip("opentelemetry.metrics")
    meter = get_meter()
    assert meter is _telemetry.METER
    assert isinstance(meter, api.Meter)
    for kind in ("counter", "up_down_counter", "histogram", "gauge"):
        for prefix in ("", "observable_"):
            if f"{prefix}{kind}" == "observable_histogram":
                continue
            made = getattr(meter, f"create_{prefix}{kind}")(f"isinstance.{prefix}{kind}")
            name = f"{prefix}{kind}".replace("_", " ").title().replace(" ", "")
            abstract = (
                api._Gauge if name == "Gauge" and not hasattr(api, name) else getattr(api, name)
            )
            assert isinstance(made, abstract), name


def test_opentelemetry_gets_the_values(monkeypatch):
    calls = []

    class Twin:
        def __init__(self, kind, *args, **kwargs):
            calls.append((kind, *args, kwargs))

        def __getattr__(self, name):
            return lambda *args: calls.append((name, *args))

    class TwinMeter:
        def __getattr__(self, name):
            return lambda *args, **kwargs: Twin(name, *args, **kwargs)

    monkeypatch.setattr(metrics, "_instruments", [])
    meter = Meter("test", TwinMeter())
    meter.create_counter("c", "s", "d").add(2.5, {"a": 1})
    meter.create_histogram("h", explicit_bucket_boundaries_advisory=[1]).record(2)
    meter.create_gauge("g").set(3)
    plain = {"unit": "", "description": ""}
    assert calls == [
        ("create_counter", "c", {"unit": "s", "description": "d"}),
        ("add", 2.5, {"a": 1}, None),
        ("create_histogram", "h", {**plain, "explicit_bucket_boundaries_advisory": [1]}),
        ("record", 2, None, None),
        ("create_gauge", "g", plain),
        ("set", 3, None, None),
    ]


def test_the_programs_own_sdk_receives_all_kinds():
    """The interface of the twin is the real one: an SDK's provider reads what was reported."""
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    meter = Meter("sdk", provider.get_meter("sdk"))
    meter.create_counter("c").add(1.5)
    meter.create_up_down_counter("u").add(-1)
    meter.create_histogram("h", "s", explicit_bucket_boundaries_advisory=[1, 2]).record(1.5)
    meter.create_gauge("g").set(7)
    api = pytest.importorskip("opentelemetry.metrics")
    for kind in ("counter", "up_down_counter", "gauge"):
        create = getattr(meter, f"create_observable_{kind}")
        create(f"o{kind}", [lambda _: [api.Observation(1)]])
        create(f"o{kind}", [lambda _: [api.Observation(1, {"second": True})]])
    found = {
        metric.name: [getattr(p, "value", getattr(p, "sum", None)) for p in metric.data.data_points]
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    provider.shutdown()
    assert [found[name] for name in "cuhg"] == [[1.5], [-1], [1.5], [7]]
    assert {"ocounter", "oup_down_counter", "ogauge"} <= found.keys()


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "columns"),
    [
        ("counter", 3, (None, None, 3)),
        ("counter", 2.5, (2.5, None, None)),
        ("counter", 1 << 65, (float(1 << 65), None, None)),
        ("up_down", -3, (None, -3, None)),
        ("up_down", 1 << 63, (float(1 << 63), None, None)),
        ("gauge", 3, (None, 3, None)),
        ("gauge", 0.5, (0.5, None, None)),
    ],
)
def test_a_number_is_in_the_column_of_its_type(kind, value, columns):
    point = Point(Identity("n", kind, "s", "d", "sc"), (("k", 1),), value, 5, 9)
    table, row = to_row(point, '{"host.name": "h"}')
    assert row[-3:] == columns
    if kind == "gauge":
        assert table == "metric_gauges"
        assert row[:-3] == ("n", 9, None, "sc", "s", '{"k":1}', '{"host.name": "h"}')
    else:
        assert table == "metric_sums"
        how = ("delta", True) if kind == "counter" else ("cumulative", False)
        assert row[:-3] == ("n", 9, 5, "sc", "s", *how, '{"k":1}', '{"host.name": "h"}')


def test_a_histogram_is_one_row():
    value = Distribution(3, 6, 1, 3, (1.0, 2.5), (1, 1, 1))
    table, row = to_row(Point(Identity("n", "histogram", "s"), (), value, 5, 9), "{}")
    assert table == "metric_histograms"
    assert row[:9] == ("n", 9, 5, "monarch", "s", "delta", "{}", "{}", 3)
    assert row[9:18] == (6.0, None, None, 1.0, None, None, 3.0, None, None)
    assert [json.loads(text) for text in row[18:]] == [[1.0, 2.5], [1, 1, 1]]


def test_odd_attributes_become_text():
    class Odd:
        def __str__(self):
            return "odd"

    assert canonical({3: Odd(), "b": [1, Odd()], "a": None}) == (
        ("3", "odd"),
        ("a", "None"),
        ("b", (1, "odd")),
    )


def test_the_resource_follows_the_environment():
    environ = {
        "OTEL_RESOURCE_ATTRIBUTES": "team=vision, region=eu%20west,=x,service.name=a",
        "OTEL_SERVICE_NAME": "trainer",
    }
    found = resource.describe(None, environ)
    assert found["service.name"] == "trainer"
    assert (found["team"], found["region"], found["process.pid"]) == (
        "vision",
        "eu west",
        os.getpid(),
    )
    assert resource.describe(None, {})["service.name"] == "unknown_service"


# -- endpoints -----------------------------------------------------------------------------------


def test_messages_are_counted_by_endpoint(receiver):
    """As the recorder has them: ended, failed, number, mesh, peer, port, name, queued, begun."""
    endpoints = engine_metrics.EndpointStatistics(lambda actor: f"actor-{actor}")
    for instrument in metrics.instruments():
        instrument.values()  # what other tests left
    metrics._instruments.extend(
        made
        for meter in (engine_metrics.ENGINE, engine_metrics.REFERENCE)
        for made in meter._made.values()
        if made not in metrics._instruments
    )
    metrics.switch(on=True)
    messages = [
        [0, False, 1, 2, 3, 4, "train", 1_000, 2_000, None],
        [0, True, 1, 2, 3, 4, "train", 0, 2_000, None],
        [0, False, 1, 9, 3, 0, "stop", 1_000, 5_000, None],
    ]
    ended = [2_000 + 40_000_000, 2_000 + 3_000, 5_000 + 1_000]
    endpoints.add_all(messages, ended)
    endpoints.add_all([], [])
    endpoints.report()
    endpoints.report()
    collection.collect()
    train, stop = (("method", "train"),), (("method", "stop"),)
    assert receiver.values("monarch.endpoint.calls") == {train: 2, stop: 1}
    assert receiver.values("monarch.endpoint.errors") == {train: 1}
    first, second = (("actor_id", "actor-2"),), (("actor_id", "actor-9"),)
    assert receiver.values("actor.messages_received") == {first: 2, second: 1}
    assert receiver.values("actor.message_receive_errors") == {first: 1}
    assert receiver.values("mailbox.posts") == {first: 2}  # the answers
    handled = receiver.values("actor.message_handler_duration.ns")
    assert {which: found.count for which, found in handled.items()} == {first: 2, second: 1}
    durations = receiver.values("monarch.endpoint.duration")
    found = durations[train]
    assert (found.count, found.min, found.max) == (2, 3e-6, 0.04)
    assert found.sum == pytest.approx(0.040003)
    buckets = dict(zip([*found.bounds, None], found.counts, strict=True))
    assert {bound for bound, count in buckets.items() if count} == {5e-6, 0.05}
    assert durations[stop].counts[0] == 1
    waits = receiver.values("monarch.mailbox.wait")
    assert (waits[train].count, waits[stop].max) == (1, 4e-6)


def test_statistics_have_units():
    found = statistics()
    assert found.keys() <= UNITS.keys()
    assert found["process.memory.rss_bytes"] > 1 << 20
    assert all(value >= 0 for value in found.values())
