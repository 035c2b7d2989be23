"""The tree of the terminal interface: rows, selection, filters; and the details of a node."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

from monarch._tui.checks import diagnose, report_lines
from monarch._tui.client import Lost, Refused, address_of
from monarch._tui.details import GLOSSARY, details, glossary, settings_lines, stack_lines
from monarch._tui.tree import Tree
from monarch._tui.words import LANGUAGES, Words

STATES = ["idle", "busy", "waiting", "stuck", "silent", "failed", "stopped", "starting", "stopping"]


def hosts(*names: str) -> list[dict[str, Any]]:
    return [{"host": name, "answers": name != "lost"} for name in names]


def process(number: int, host: str = "a", **fields: Any) -> dict[str, Any]:
    row = {"proc": str(number), "ref": f"p{number}", "label": f"trainers-{number}", "pid": number}
    return {**row, "host": host, "answers": True, "failed": 0, **fields}


def grid(procs: int, states: dict[int, str] | None = None) -> dict[str, Any]:
    """Return an actor ``t[i]`` of the user and one of the system for each process."""
    states = states or {}
    meshes = []
    for name, system in ("t", False), ("agent", True):
        ranks = []
        for i in range(procs):
            state = "idle" if system else states.get(i, "idle")
            busy = int(state == "busy")
            ranks.append(
                [i, STATES.index(state), busy, 2.5 if busy else None, 0, i, 0, f"{name}{i}"]
            )
        endpoints, owners = ["", "train"], list(map(str, range(procs)))
        mesh = {"name": name, "system": system, "endpoints": endpoints, "procs": owners}
        meshes.append({**mesh, "places": [""], "ranks": ranks})
    return {"states": STATES, "meshes": meshes}


def labels(tree: Tree) -> list[str]:
    return ["  " * row.depth + row.node.label for row in tree.rows]


def test_rows_open_and_close() -> None:
    tree = Tree()
    tree.update(hosts("a", "lost"), [process(0), process(1)], grid(2))
    assert labels(tree) == ["a", "  trainers-0", "  trainers-1", "lost"]
    assert tree.rows[0].summary == "2 processes"
    assert tree.rows[1].summary == "2 actors: 1 system, 1 user"
    assert tree.rows[3].node.about == "does not answer"
    tree.move(2)
    tree.toggle()
    assert labels(tree) == ["a", "  trainers-0", "  trainers-1", "    t[1]", "lost"]
    tree.show(system=True)
    assert labels(tree)[3:5] == ["    t[1]", "    agent[1]"]
    tree.move(1)
    assert tree.selected is not None
    assert tree.selected.label == "t[1]"
    assert tree.parent_of("t1") == "p1"
    tree.open(is_open=False)
    assert tree.selected.label == "trainers-1"
    tree.open(is_open=False)
    assert labels(tree) == ["a", "  trainers-0", "  trainers-1", "lost"]
    tree.open(is_open=True)
    tree.move(-100)
    tree.move(100)
    assert tree.selected.label == "lost"
    tree.toggle()  # it has nothing to show
    tree.collapse()
    assert labels(tree) == ["a", "lost"]


def test_the_selection_stays_when_rows_come_and_go() -> None:
    tree = Tree()
    tree.update(hosts("a", "b"), [process(2, "b")], grid(3))
    tree.move(2)
    tree.update(hosts("a", "b"), [process(0), process(1), process(2, "b")], grid(3))
    assert tree.selected is not None
    assert tree.selected.label == "trainers-2"
    tree.update(hosts("a"), [process(0)], grid(1))
    assert tree.selected.label == "trainers-0"
    tree.update([], [], {"states": STATES, "meshes": []})
    assert tree.selected is None
    tree.toggle()
    tree.collapse()
    tree.open(is_open=True)
    assert tree.rows == []


def test_failed_actors_are_always_shown_and_stopped_ones_on_request() -> None:
    tree = Tree()
    tree.update(
        hosts("a"),
        [process(0), process(1), process(2)],
        grid(3, {0: "failed", 1: "stopped", 2: "busy"}),
    )
    for number in (1, 2, 3):
        tree.place = next(
            i for i, r in enumerate(tree.rows) if r.node.label == f"trainers-{number - 1}"
        )
        tree.toggle()
    shown = [row.node.label for row in tree.rows if row.node.kind == "actor"]
    assert shown == ["t[0]", "t[2]"]
    tree.show(stopped=True)
    shown = [row.node.label for row in tree.rows if row.node.kind == "actor"]
    assert shown == ["t[0]", "t[1]", "t[2]"]
    assert next(r for r in tree.rows if r.node.label == "t[2]").node.about == "train() for 2.5s"


@pytest.mark.parametrize("seed", range(50))
def test_any_keys_on_any_pictures(seed: int) -> None:
    """The selected row exists, parents come before children, and nothing is there twice."""
    rng = random.Random(seed)
    tree = Tree()
    for _ in range(100):
        match rng.randrange(8):
            case 0:
                count = rng.randrange(6)
                rows = [process(i, rng.choice("ab")) for i in range(count)]
                tree.update(hosts(*rng.sample("abc", rng.randrange(4))), rows, grid(count))
            case 1:
                tree.toggle()
            case 2:
                tree.move(rng.randrange(-5, 6))
            case 3:
                tree.open(is_open=rng.random() < 0.5)
            case 4:
                tree.collapse()
            case 5:
                tree.show(system=rng.random() < 0.5)
            case 6:
                tree.show(stopped=rng.random() < 0.5)
            case _:
                tree = pickle.loads(pickle.dumps(tree))
        assert 0 <= tree.place < max(1, len(tree.rows))
        references = [row.node.reference for row in tree.rows]
        assert len(references) == len(set(references))
        assert all(b.depth <= a.depth + 1 for a, b in zip(tree.rows, tree.rows[1:], strict=False))


ACTOR = {
    "actor_status": "train: processing for 2.5s",
    "actor_type": "app.Trainer",
    "queue_depth": 3,
    "instance_id": "id",
    "messages_processed": 12345,
    "total_processing_time_us": 75_000_000,
    "created_at": "2026-01-01T00:00:00.000Z",
    "last_message_handler": "train",
    "is_system": False,
    "failure_info": None,
    "display_name": "t[1]",
    "doing": [
        {
            "endpoint": "train",
            "seconds": 2.5,
            "place": "step() at a.py:3",
            "stack": ["train() at a.py:9", "step() at a.py:3"],
            "waits_for": "data.next()",
        }
    ],
}


def node(kind: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"identity": "x", "properties": {kind: properties}, "children": [], "as_of": "now"}


def test_details_of_an_actor() -> None:
    found = details(node("Actor", ACTOR), Words("en"))
    assert found.title == "t[1] [user]"
    assert ("messages", "12,345") in found.pairs
    assert ("processing time", "1m 15s") in found.pairs
    assert found.panes == [
        (
            "Execution",
            [
                "train() for 2.5s",
                "  waits for data.next()",
                "  train() at a.py:9",
                "  step() at a.py:3",
            ],
        )
    ]
    failure = {
        "error_message": "ValueError: bad\nin step",
        "root_cause_actor": "ref",
        "root_cause_name": "t[0]",
        "occurred_at": "then",
        "is_propagated": True,
    }
    failed = {**ACTOR, "actor_status": "failed: bad", "doing": [], "failure_info": failure}
    found = details(node("Actor", failed), Words("zh"))
    assert found.title == "t[1] [failed]"
    ((title, lines),) = found.panes
    assert title == "失败"
    assert lines[1:] == [
        "根本原因: t[0]",
        "由其他 actor 引起: 是",
        "",
        "ValueError: bad",
        "in step",
    ]


def test_texts_around() -> None:
    assert set(GLOSSARY) == {"host", "proc", "actor"}
    for kind in GLOSSARY:
        assert len(glossary(kind, Words("zh"))) == len(GLOSSARY[kind])
    assert LANGUAGES["en"] == {}
    entries = [{"name": "port", "value": 1729, "source": "Default"}]
    assert settings_lines(entries) == ["port  1729  Default"]
    assert stack_lines({"BinaryNotFound": {"searched": []}})[0].startswith(
        "py-spy is not installed"
    )
    assert stack_lines({"Failed": {"exit_code": 1, "stderr": "denied"}})[1] == "denied"
    frame = {"name": "f", "filename": "a.py", "line": 3}
    trace = {"thread_id": 7, "thread_name": "main", "active": True, "owns_gil": False}
    taken = {"pid": 4, "capture_mode": "python_only", "warnings": []}
    lines = stack_lines({"Ok": {**taken, "stack_traces": [{**trace, "frames": [frame]}]}})
    assert lines == ["process 4, python_only", "", "thread main (active)", "  f at a.py:3"]


@pytest.mark.parametrize(
    ("text", "url", "token"),
    [
        ("localhost", "//localhost:1729", ""),
        ("node1:80", "//node1:80", ""),
        ("https://node1:80/KEY/v1/root", "https://node1:80", "KEY"),
        ("http://[::1]:5/?token=K", "http://[::1]:5", "K"),
        ("::1", None, ""),
        ("ftp://node1", None, ""),
        ("node1:port", None, ""),
        ("", None, ""),
    ],
)
def test_addresses(text: str, url: str | None, token: str) -> None:
    if url is None:
        with pytest.raises(ValueError, match="address is not understood"):
            address_of(text)
        return
    address = address_of(text)
    assert address == (url, token)
    assert "KEY" not in repr(address)


# -- the diagnosis ---------------------------------------------------------------------------------


def job(**replaced: Any) -> dict[str, Any]:
    """Return the answers of a healthy job by path."""
    proc = {"system_children": ["agent"], "stopped_children": []}
    answers: dict[str, Any] = {
        "/health": {"status": "ok"},
        "/v1/admin": {"url": "u"},
        "/v1/root": {**node("Root", {}), "children": ["host:a"]},
        "/v1/host%3Aa": {**node("Host", {}), "children": ["p0", "p1"]},
        "/v1/p0": {**node("Proc", proc), "children": ["agent"]},
        "/v1/p1": {**node("Proc", proc), "children": ["agent", "t"]},
        "/v1/t": node("Actor", ACTOR),
        "/api/processes": {"hosts": hosts("a"), "processes": [process(0)]},
        "/api/failures": {"groups": []},
        "/api/waits": {"causes": [{"kind": "busy", "text": "t is busy"}]},
    }
    return {**answers, **{path.replace("_", "/"): value for path, value in replaced.items()}}


def asked(answers: dict[str, Any], seconds: float = 0.01) -> dict[str, Any]:
    """Return the report on a job whose answers take so long."""
    now = [0.0]

    def get(path: str) -> Any:
        now[0] += seconds
        answer = answers[path]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return diagnose(get, lambda: now[0])


def test_a_healthy_job() -> None:
    report = asked(job())
    summary = report["summary"]
    assert summary == {
        "total": 10,
        "passed": 10,
        "failed": 0,
        "admin_infra_passed": 3,
        "admin_infra_total": 3,
        "mesh_passed": 7,
        "mesh_total": 7,
        "healthy": True,
    }
    assert [check["reference"] for check in report["checks"]][3:7] == ["host:a", "p0", "p1", "t"]
    assert set(report["checks"][0]) == {"label", "reference", "note", "phase", "outcome"}
    assert report["checks"][0]["outcome"] == {"Pass": {"elapsed_ms": 10}}
    assert report_lines(report)[-1] == "10 of 10 passed: healthy"
    assert "Slow" in asked(job(), 0.6)["checks"][0]["outcome"]


def test_what_is_broken_is_named() -> None:
    report = asked(job(_health=Lost("no answer")))
    assert report["summary"]["admin_infra_total"] == 1
    assert not report["summary"]["healthy"]
    assert "       no answer" in report_lines(report)
    report = asked(job(_v1_p1=Refused("not_found", "it has exited")))
    assert report["summary"]["failed"] == 1
    processes = {"hosts": hosts("a", "lost"), "processes": [process(0, answers=False)]}
    groups = [{"error": "ValueError: bad", "mesh": "t", "ranks": "0-3"}]
    circle = {"kind": "circle", "text": "a waits for b, b for a"}
    broken = job(
        _api_processes=processes, _api_failures={"groups": groups}, _api_waits={"causes": [circle]}
    )
    text = "\n".join(report_lines(asked(broken)))
    assert "host lost does not answer; process 0 (trainers-0) does not answer" in text
    assert "ValueError: bad (t[0-3])" in text
    assert "a waits for b, b for a" in text
    assert "3 checks have failed" in text
    report = asked(job(), 50.0)
    assert report["timed_out"]
    assert not report["summary"]["healthy"]
