"""Calls as their callers see them: outcomes, counts and latencies, without a process."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from monarch._spi import (
    CANCELLED,
    FAILURE,
    RAISED,
    RAW,
    Arrivals,
    PartialReplies,
    Replies,
    Reply,
    hook,
)
from monarch._telemetry import collection, metrics
from monarch._telemetry.calls import ADVERBS, Calls, outcome_of


class Points:
    """The last points of all instruments."""

    def __init__(self):
        self.found = []

    def __call__(self, points):
        self.found.extend(points)

    def values(self, name):
        """Return {attributes: value}, attributes as text without their names."""
        return {
            " ".join(str(value) for _, value in point.attributes): point.value
            for point in self.found
            if point.identity.name == name
        }


@pytest.fixture
def points():
    """A receiver of points, that the collection's thread never calls during a test."""
    found = Points()
    collection.subscribe(found, 3600.0)
    collection.collect()  # what other tests left
    found.found.clear()
    yield found
    collection.unsubscribe(found)


@pytest.fixture
def proc():
    """A process with one actor."""
    identity = SimpleNamespace(name="trainers", label="trainers-1K")
    actor = SimpleNamespace(identity=identity, rank=3)
    return SimpleNamespace(
        client=True,
        label="local",
        uid=1 << 20,
        cells={77: actor},
        ports={},
        newest=lambda uid: uid,
    )


class Procs:
    """Four processes, of which others may be in the place."""

    def _uids(self):
        return [(2 << 20) + rank for rank in range(4)]

    def _proc_labels(self, shape):
        return [f"anon-{rank}" for rank in shape.ndslice]


def address(name, uid, proc, proc_uid):
    return str(hook("actor_address")(uid, name, proc_uid, proc))


class Endpoint:
    """An endpoint of a mesh of so many actors."""

    def __init__(self, proc, method="step", ranks=4):
        self.proc, self.method, self._links = proc, method, [None] * ranks
        shape = SimpleNamespace(ndslice=range(ranks))
        self.mesh = SimpleNamespace(_mesh_name="servers", _uid=5, _shape=shape, _proc_mesh=Procs())


def settled(kind, state, content):
    future = kind._new()
    future._resolve(state, content)
    return future


def test_a_pending_future_that_is_read_early_is_no_error():
    """Contents that were decoded meanwhile are any values."""
    for value in ((2, b""), (0, 1), (), [1], "text", None, ("a", "b"), (True, 1)):
        assert outcome_of(settled(Reply, RAW, value)) in {"ok", "error", "failure"}
    assert outcome_of(settled(Reply, RAW, ("a", "b"))) == "ok"


@pytest.mark.parametrize(
    ("state", "content", "outcome"),
    [
        (RAW, (0, b"x"), "ok"),
        (RAW, (1, b"x"), "error"),
        (RAW, (FAILURE, b"x"), "failure"),
        (RAISED, TimeoutError(), "timeout"),
        (RAISED, ValueError(), "failure"),
        (CANCELLED, None, "cancelled"),
    ],
)
def test_outcomes(state, content, outcome):
    for kind in (Reply, Replies):
        assert outcome_of(settled(kind, state, content)) == outcome


def test_a_mesh_may_answer_in_part():
    for outcomes, outcome in (
        ([(0, b""), (0, b"")], "ok"),
        ([(0, b""), (1, b"")], "partial"),
        ([(0, b""), TimeoutError()], "partial"),
    ):
        future = PartialReplies._new()
        future._outcomes = outcomes
        future._resolve(RAW, (0, None))
        assert outcome_of(future) == outcome


def test_each_adverb_is_counted_and_timed(points, proc):
    calls = Calls(proc, rows=100)
    one, all_of = Endpoint(proc, ranks=1), Endpoint(proc, "plain:step")
    stream = Arrivals._new()
    stream._line = deque(Reply._new() for _ in range(4))
    proc.ports = {1: Reply._new(), 2: Reply._new(), 3: Replies._new(), 4: stream, 5: object()}
    made = [
        (one, calls.began(one, 1)),
        (all_of, calls.began(all_of, 2)),
        (all_of, calls.began(all_of, 3)),
        (all_of, calls.began(all_of, 4)),
        (all_of, calls.began(all_of, 0)),
        (all_of, calls.began(all_of, 5)),
    ]
    assert [adverb for _, adverb in made] == [
        "call_one",
        "choose",
        "call",
        "stream",
        "broadcast",
        "send",
    ]
    assert {adverb for _, adverb in made} == set(ADVERBS)
    answers = list(stream._line)
    proc.ports[1]._resolve(RAW, (0, b""))
    proc.ports[2]._resolve(RAW, (1, b""))
    proc.ports[3]._resolve(RAISED, TimeoutError())
    for answer in answers[:3]:
        answer._resolve(RAW, (0, b""))
    answers[3]._resolve(RAISED, ValueError())
    every = {"call", "stream", "broadcast"}
    calls.count((endpoint, adverb, None if adverb in every else 0, 77) for endpoint, adverb in made)
    calls.count([(one, "call_one", 0, 0)])
    for _ in range(2):  # what was reported is not reported again
        calls.report()
        collection.collect()

    counts = points.values("monarch.call.count")
    assert counts == {f"{adverb} servers step": 1 for _, adverb in made} | {
        "call_one servers step": 2
    }
    for adverb in ADVERBS[:5]:
        number = 2 if adverb == "call_one" else 1
        assert points.values(f"endpoint_{adverb}_throughput") == {"servers step": number}
    latencies = {a: points.values(f"endpoint_{a}_latency_us_histogram") for a in ADVERBS[:4]}
    assert {a: {k: v.count for k, v in found.items()} for a, found in latencies.items()} == {
        "call": {"servers step timeout": 1},
        "call_one": {"servers step ok": 1},
        "choose": {"servers step error": 1},
        "stream": {"servers step ok": 3, "servers step failure": 1},
    }
    assert points.values("endpoint_call_error") == {"servers step timeout": 1}
    assert points.values("endpoint_stream_error") == {"servers step failure": 1}
    assert points.values("endpoint_call_one_error") == {}
    seconds = points.values("monarch.call.duration")
    assert sum(value.count for value in seconds.values()) == 7
    took = latencies["call_one"]["servers step ok"]
    assert took.sum == pytest.approx(seconds["call_one servers step ok"].sum * 1e6)
    trainer = address("trainers", 77, "local", proc.uid)
    script = address("client", 0, "local", proc.uid)
    assert points.values("actor.messages_sent") == {
        f"trainers {trainer} 3": 4 * 3 + 3,
        f"client {script} 0": 1,
    }
    servers = [address("servers", 5, f"anon-{rank}", (2 << 20) + rank) for rank in range(4)]
    assert points.values("mailbox.posts") == {
        f"{trainer} {servers[0]}": 6,
        **{f"{trainer} {server}": 3 for server in servers[1:]},
        f"{script} {servers[0]}": 1,
    }


def test_settled_calls_that_nobody_counts_are_bounded(proc):
    calls = Calls(proc, rows=10)
    one = Endpoint(proc, ranks=1)
    for _ in range(100):
        proc.ports[1] = Reply._new()
        calls.began(one, 1)
        proc.ports[1]._resolve(RAW, (0, b""))
        assert not proc.ports[1]._parked
    assert len(calls._settled) == 10


def test_names_of_the_reference_are_instruments(proc):
    Calls(proc, rows=1)
    made = {instrument._identity.name for instrument in metrics.instruments()}
    for adverb in ("call", "call_one", "choose", "stream"):
        assert f"endpoint_{adverb}_latency_us_histogram" in made
        assert f"endpoint_{adverb}_error" in made
    for adverb in ("call", "call_one", "choose", "stream", "broadcast"):
        assert f"endpoint_{adverb}_throughput" in made
