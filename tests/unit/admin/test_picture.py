"""Pictures, nodes and views of diagnoses that are made up."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate

from monarch._admin import views
from monarch._admin.nodes import node, tree
from monarch._admin.openapi import document, json_schema, skill
from monarch._admin.picture import Picture, picture
from monarch._admin.snapshots import snapshot
from monarch._admin.stream import Stream, changes
from monarch._store.tables import PLAIN
from tests.unit.admin.jobs import a_job, account, actor, diagnosis, doing, ended

STARTED = (0.0, "ann")

activities = st.builds(
    doing,
    st.sampled_from(["step", "train"]),
    st.one_of(st.none(), st.floats(0, 100)),
    st.one_of(st.none(), st.tuples(st.integers(1, 6), st.integers(1, 40))),
)


@st.composite
def jobs(draw: st.DrawFn) -> Any:
    accounts = [account(1, script=draw(activities))]
    number = 10
    for uid in range(2, 2 + draw(st.integers(0, 3))):
        actors, dead = [], []
        for _ in range(draw(st.integers(0, 3))):
            number += 1
            more = draw(st.lists(activities, max_size=2))
            state = draw(st.sampled_from(["running", "starting", "dead", "dropping"]))
            system = draw(st.booleans())
            actors.append(
                actor(f"a{number}", number, *more, state=state, system=system, process=uid)
            )
        for _ in range(draw(st.integers(0, 2))):
            number += 1
            kind = draw(st.sampled_from(["failed", "stopped"]))
            dead.append(ended(f"d{number}", number, kind, process=uid))
        accounts.append(account(uid, *actors, dead=tuple(dead)))
    silent = draw(st.sampled_from([(), (6,), (6, 7)]))
    return diagnosis(*accounts, silent=silent, missing=draw(st.sampled_from([(), ("lost",)])))


@settings(max_examples=60, deadline=None)
@given(jobs(), jobs())
def test_every_node_is_reached_and_fits_its_schema(first: Any, second: Any) -> None:
    schema = jsonschema.Draft202012Validator(json_schema("node_payload"))
    before = None
    for when, data in enumerate((first, second)):
        found = picture(data, 1000.0 + when, before)
        before = found
        seen: dict[str, Any] = {}
        todo: list[tuple[str, str | None]] = [("root", None)]
        while todo:
            reference, parent = todo.pop()
            payload = node(found, reference, STARTED, 100)
            assert payload is not None
            schema.validate(payload)
            assert payload["identity"] == reference
            assert payload["parent"] == parent
            (properties,) = payload["properties"].values()
            children = set(payload["children"])
            for part in ("system_children", "stopped_children"):
                assert set(properties.get(part, ())) <= children
            assert reference not in seen
            seen[reference] = payload
            todo += [(child, reference) for child in payload["children"]]
        assert set(found.actors) | set(found.references) <= set(seen)
        json.dumps([views.grid(found, 10.0), views.waits(found), views.failures(found)])
        assert tree(found, str).startswith("root")
        poisoned = [
            one for one in seen.values() if one["properties"].get("Proc", {}).get("is_poisoned")
        ]
        assert len(poisoned) == sum(bool(one.failed) for one in found.processes.values())


@settings(max_examples=60, deadline=None)
@given(jobs(), jobs())
def test_changes_lead_from_one_picture_to_the_next(first: Any, second: Any) -> None:
    before = picture(first, 1000.0)
    now = picture(second, 1001.0, before)
    known = _rows(changes(None, before))
    for kind, data in changes(before, now):
        if kind == "actors":
            known = {ref: row for ref, row in known.items() if ref not in data["removed"]}
            known.update({row["ref"]: row for row in data["changed"]})
    wanted = _rows(changes(None, now))
    shown = ("state", "endpoint", "queued", "place")
    assert {ref: [row[name] for name in shown] for ref, row in known.items()} == {
        ref: [row[name] for name in shown] for ref, row in wanted.items()
    }
    assert changes(now, now) == []


def test_another_call_of_the_same_endpoint_is_a_change() -> None:
    def at(when: float, age: float) -> Picture:
        busy = actor("worker", 30, doing("train", age), process=3)
        return picture(diagnosis(account(1), account(3, busy)), when)

    assert changes(at(1000.0, 2.0), at(1003.0, 5.0)) == []
    [(kind, data)] = changes(at(1000.0, 2.0), at(1003.0, 1.5))
    assert kind == "actors"
    assert [row["age"] for row in data["changed"]] == [1.5]


@given(jobs())
def test_the_tables_of_the_topology_have_their_columns(found: Any) -> None:
    made = picture(found, 1000.0)
    tables = snapshot(made, "s1", STARTED, 100)
    assert set(tables) == {name for name in PLAIN if not name.startswith("pyspy_")}
    for name, rows in tables.items():
        assert {len(row) for row in rows} <= {len(PLAIN[name])}, name
    assert len(tables["nodes"]) == len({row[1] for row in tables["nodes"]})
    assert len(tables["actor_nodes"]) == len(made.actors)
    assert {row[2] for row in tables["children"]} == {row[1] for row in tables["nodes"]} - {"root"}
    active = {(row[1], row[2]) for row in tables["active_handlers"]}
    assert active == {
        (each.reference, one["endpoint"])
        for each in made.actors.values()
        if each.alive
        for one in each.doing
    }


def _rows(found: list[tuple[str, Any]]) -> dict[str, Any]:
    rows = next(data["changed"] for kind, data in found if kind == "actors")
    return {row["ref"]: row for row in rows}


def test_an_actor_of_a_stopped_process_goes_on_being_busy() -> None:
    busy = actor("worker", 30, doing("train", 2.0), process=3)
    before = picture(diagnosis(account(1), account(3, busy)), 1000.0)
    now = picture(diagnosis(account(1), silent=(3,)), 1010.0, before)
    payload = node(now, busy["reference"], STARTED, 100)
    assert payload is not None
    shown = payload["properties"]["Actor"]
    assert shown["actor_status"] == "train: processing for 12.0s"
    assert shown["doing"][0]["place"] == "train() at /home/ann/train.py:7"
    process = node(now, "proc<3>@ipc://@3", STARTED, 100)
    assert process is not None
    assert process["properties"]["Proc"]["answers"] is False
    assert "kill -CONT 1003" in process["properties"]["Proc"]["trouble"]
    again = picture(diagnosis(account(1), account(3, busy)), 1011.0, now)
    assert again.actors[busy["reference"]].state == "busy"


def test_an_unseen_actor_of_a_stopped_process_is_known_by_the_call_that_waits() -> None:
    script = {**doing("", None, on=(3, 30)), "endpoint": ""}
    found = picture(diagnosis(account(1, script=script), silent=(3,)), 1000.0)
    (row,) = [one for one in found.actors.values() if one.process == 3]
    assert (row.name, row.state, row.endpoint, row.age) == ("other", "silent", "step", 2.0)
    edges = views.waits(found)["edges"]
    assert [(edge["from"], edge["to"]) for edge in edges] == [("script", row.reference)]


@pytest.mark.parametrize(("processes", "told"), [(100, []), (101, ["and 1 further processes"])])
def test_the_tree_has_a_hundred_processes_of_a_host_and_counts_the_others(
    processes: int, told: list[str]
) -> None:
    found = picture(diagnosis(*(account(uid) for uid in range(2, 2 + processes))), 1000.0)
    lines = tree(found, str).splitlines()
    assert sum(bool(re.search(r"─ proc\d", line)) for line in lines) == 100
    assert [line.strip() for line in lines if "further" in line] == told


def test_a_trace_that_ends_with_a_frame_has_no_code_there() -> None:
    (frame,) = views.frames_of('File "/nowhere/train.py", line 3, in step')
    assert (frame["function"], frame["code"]) == ("step", "")


def test_the_views_of_a_job_in_trouble() -> None:
    found = picture(a_job(), 1000.0)
    grid = {mesh["name"]: mesh for mesh in views.grid(found, 10.0)["meshes"]}
    assert grid["trainers"]["counts"] == {"stuck": 1}
    assert grid["trainers"]["endpoints"] == ["", "train"]
    assert grid["bad"]["counts"] == {"failed": 1}
    assert views.grid(found, 20.0, grid["trainers"]["id"], references=False)["meshes"] == [
        {**grid["trainers"], "counts": {"busy": 1}, "ranks": [[0, 1, 1, 12.0, 0, 0, 1]]}
    ]
    failures = views.failures(found)
    (group,) = failures["groups"]
    assert (group["error"], group["count"]) == ("ValueError: bad weights", 1)
    assert [(frame["function"], frame["user"]) for frame in group["frames"]] == [
        ("f", True),
        ("call", False),
    ]
    assert failures["lost_hosts"] == ["lost"]
    assert [one["pid"] for one in failures["silent"]] == [1003]
    waits = views.waits(found)
    assert [cause["kind"] for cause in waits["causes"]] == ["busy"]
    assert "the script" in waits["text"].lower()
    hosts = {one["host"]: one for one in views.processes(found)["hosts"]}
    assert {name: one["answers"] for name, one in hosts.items()} == {
        "local": True,
        "lost": False,
        "node7": True,
    }


def test_a_failure_is_shown_though_the_actor_was_replaced() -> None:
    former = {**ended("trainers", 20), "replaced": True}
    found = picture(diagnosis(account(2, actor("trainers", 20), dead=(former,))), 1000.0)
    assert [one.alive for one in found.actors.values()] == [True]
    (group,) = views.failures(found)["groups"]
    assert (group["error"], group["count"]) == ("ValueError: bad weights", 1)


def test_the_description_is_valid() -> None:
    validate(document("http://127.0.0.1:1729"))
    for name in ("node_payload", "admin_info", "error"):
        jsonschema.Draft202012Validator.check_schema(json_schema(name))


def test_the_text_for_tools_names_what_is_there() -> None:
    text = skill("http://127.0.0.1:1", "train.py", telemetry=False, tls=False)
    assert "http://127.0.0.1:1/v1/tree" in text
    assert "Telemetry is off" in text
    assert "{TLS}" not in text
    assert len(text) < 8000


def test_readers_learn_since_when_the_script_is_silent() -> None:
    sent: list[tuple[str, Any]] = []
    pictures: Any = FixedPictures(picture(a_job(), 1000.0))
    stream: Any = Stream(pictures, None)
    stream._send = lambda kind, data, actors: sent.append((kind, data))
    for since in (None, 12.5, 12.5, None):
        pictures.stale_since = since
        asyncio.run(stream._step())
    assert sent == [("stale", {"since_us": 12_500_000}), ("fresh", {})]


class FixedPictures:
    def __init__(self, found: Picture) -> None:
        self._found = found
        self.stale_since: float | None = None

    def is_stale(self) -> bool:
        return self.stale_since is not None

    async def get(self) -> Picture:
        return self._found
