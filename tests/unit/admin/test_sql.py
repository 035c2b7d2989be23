"""The dashboard's numbers, over a real store in both databases."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._admin import sql as queries
from monarch._admin.sql import Sql, percentile
from monarch._store.store import Store
from monarch._telemetry.kinds import BatchReader, encode
from tests.hostile_sql import CANARY
from tests.hostile_sql import statements as hostile_statements
from tests.unit.admin.jobs import FixedSource, a_job, site

NOW = time.time_ns() // 1000 - 2 * 3600 * 10**6  # as if the tests before took two hours
LINES = [("WARN", "loss is nan", 3), ("INFO", "100% done", 0), ("ERROR", "lost_it", 3)]


@pytest.fixture(autouse=True)
def the_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the queries take place one second after `NOW`, however long the other tests took."""
    monkeypatch.setattr(queries, "_now", lambda: NOW / 1e6 + 1)


@pytest.fixture(scope="module", params=["duckdb", "sqlite3"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A mesh of two actors: a hundred calls of `train`, of 1 to 100 us, and one that goes on."""
    if request.param == "duckdb":
        pytest.importorskip("duckdb")
    made = Store(64 << 20, 3600.0, request.param)
    view = '{"labels": [], "slice": {}}'
    put(made, "mesh", (200, NOW, "Python<Trainer>", "trainers", "trainers-x", "{}", 0, view))
    for rank in (0, 1):
        put(made, "actor", (100 + rank, NOW, 200, rank, f"trainers.p{rank}", "", 0))
        put(made, "state", (300 + rank, NOW, 100 + rank, "Idle", ""))
    put(made, "send", (400, NOW, 7, 71, 200, view, "{}", 5, "train", 1, 77))
    for number in range(1, 101):
        put(made, "message", message(number, number, int(number % 10 == 0)))
    put(made, "running", message(500, 0, 0))
    for place, (level, text, rank) in enumerate(LINES):
        fields = json.dumps({"message": text, "actor": f"trainers[{rank}]", "rank": rank})
        row = "log", "log_events", level, fields, NOW + place, None, 1, "main", None, "t.py", 7
        put(made, "events", row)
    yield made
    made.close()


def put(store: Store, kind: str, *rows: tuple[Any, ...]) -> None:
    for batch in BatchReader().feed(encode(kind, list(zip(*rows, strict=True)), 7, "p@host:1", 0)):
        store.put(batch)


def message(number: int, spent: int, failed: int) -> tuple[Any, ...]:
    ended = NOW + spent if spent else 0
    return number, 100, 200, 7, 70, 5, "train", NOW - 5, NOW, ended, failed


def test_counts(store: Store) -> None:
    sql = Sql(store)
    assert asyncio.run(sql.lifecycle()) == {
        "queued": 101,
        "active": 1,
        "completed": 90,
        "failed": 10,
    }
    assert asyncio.run(sql.by_endpoint()) == [{"endpoint": "train", "total": 100, "completed": 90}]
    assert asyncio.run(sql.counts(100)) == {
        "messages": 100,
        "time_us": 5050,
        "last": "train",
        "created_us": NOW,
    }
    activity = asyncio.run(sql.activity())
    assert sum(activity["buckets"]) == activity["total"] == 100


def test_latencies(store: Store) -> None:
    (row,) = asyncio.run(Sql(store).endpoints(3600.0))
    assert [row[name] for name in ("mesh", "endpoint", "count", "failed")] == [
        "trainers",
        "train",
        100,
        10,
    ]
    assert [row[f"{name}_us"] for name in ("p50", "p95", "p99", "max")] == [50, 95, 99, 100]
    assert (row["queued_p50_us"], row["sampled"]) == (5, False)
    history = asyncio.run(Sql(store).history(3600.0, 10, "train"))
    assert history["series"][0]["count"] == [0] * 9 + [100]
    assert asyncio.run(Sql(store).history(3600.0, 10, "other"))["series"] == []


def test_a_store_without_messages_has_no_activity() -> None:
    pytest.importorskip("duckdb")
    store = Store(64 << 20, 3600.0, "duckdb")
    try:
        activity = asyncio.run(Sql(store).activity(3))
    finally:
        store.close()
    assert activity == {"start_us": 0, "end_us": 0, "total": 0, "buckets": [0, 0, 0]}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["lost_it", "100% done", "loss is nan"]),
        ("level=WARNING", ["lost_it", "loss is nan"]),
        ("rank=3", ["lost_it", "loss is nan"]),
        ("actor=trainers%5B0%5D", ["100% done"]),
        ("text=LOSS", ["loss is nan"]),
        ("text=100%25", ["100% done"]),
        ("text=t_i", ["lost_it"]),
        ("text=%27", []),
        ("until_us=NOW+1", ["loss is nan"]),
        ("since_us=NOW+2", ["lost_it"]),
    ],
)
def test_logs_are_filtered(store: Store, query: str, found: list[str]) -> None:
    with site(FixedSource(a_job()), store) as served:
        then = re.sub(r"NOW\+(\d)", lambda found: str(NOW + int(found[1])), query)
        reply = served.ask(f"/api/logs?{then}").json()
    assert [record["message"] for record in reply["records"]] == found
    assert reply["next"] is None


def test_hostile_statements_get_an_answer(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "canary.csv"
    file.write_text(CANARY)
    statements = itertools.islice(hostile_statements(2, str(file), explosions=0), 33)
    with site(FixedSource(a_job()), store) as served:
        for sql in statements:
            reply = served.ask("/v1/query", json.dumps({"sql": sql}).encode())
            assert reply.status in (200, 400), sql
            assert CANARY not in str(reply.json()), sql
        assert served.ask("/v1/query", b'{"sql": "SELECT 1 AS n"}').json()["rows"] == [{"n": 1}]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_the_routes_over_a_store(store: Store) -> None:
    with site(FixedSource(a_job()), store, keep=store.replace) as served:
        logs = served.ask("/api/logs?limit=2").json()
        rest = served.ask(f"/api/logs?limit=2&cursor={logs['next']}").json()
        texts = [record["message"] for record in [*logs["records"], *rest["records"]]]
        assert texts == ["lost_it", "100% done", "loss is nan"]
        first = served.ask("/api/messages?limit=60")
        second = served.ask(f"/api/messages?limit=60&cursor={first.headers['X-Next-Cursor']}")
        rows = [*first.json(), *second.json()]
        assert len({row["id"] for row in rows}) == len(rows) == 101
        assert all(isinstance(row["to_actor_id"], str) for row in rows)
        assert len(served.ask("/api/messages?to_actor_id=100&limit=500").json()) == 101
        assert served.ask("/api/messages?to_actor_id=101").json() == []
        (sent,) = served.ask("/api/sent_messages").json()
        assert sent["timestamp_us"] == NOW  # a number, which is no id
        assert len(served.ask("/api/actors/100/messages").json()) == 101
        assert [
            row["new_status"] for row in served.ask("/api/actors/100/status_events").json()
        ] == ["Idle"]
        assert served.ask("/api/actors/100").json()["latest_status"] == "idle"
        assert served.ask("/api/meshes/200").json()["given_name"] == "trainers"
        for path in ("summary", "dag", "message-stats", "sent_messages", "message_status_events"):
            assert served.ask(f"/api/{path}").status == 200
        sql = b'{"sql": "SELECT 9007199254740993 AS n", "limit": 5}'
        answer = served.ask("/api/query?ids=strings&shape=values", sql).json()
        assert (answer["columns"], answer["values"]) == (["n"], [["9007199254740993"]])
        for bad in (b'{"sql": "DROP TABLE actors"}', b'{"sql": "SELEC"}', b"{}"):
            reply = served.ask("/api/query", bad)
            assert reply.status == 400
            assert isinstance(reply.json()["error"], str)
        wrong = served.ask("/v1/query", b'{"sql": "DROP TABLE actors"}')
        assert (wrong.status, wrong.json()["error"]["code"]) == (400, "bad_request")
        assert served.ask("/v1/query", b'{"sql": "SELECT 1 AS n"}').json()["rows"] == [{"n": 1}]


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_that_covers_its_share(found: list[int], percent: int) -> None:
    ordered = sorted(found)
    value = percentile(ordered, percent)
    assert value is not None
    assert sum(each <= value for each in ordered) * 100 >= percent * len(ordered)
    assert sum(each < value for each in ordered) * 100 < percent * len(ordered)
