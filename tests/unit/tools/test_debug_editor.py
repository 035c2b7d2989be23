"""Which processes ``monarch debug --dap`` serves, and the configurations that it prints."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest

from monarch.cli import script_door
from monarch.cli.debug_editor import _chosen, _Debuggee, _launch_json, _listeners
from monarch.cli.script_door import stopped_ones


def actor(name: str, rank: int, *, debugged: bool = False, system: bool = False) -> dict[str, Any]:
    """Return the account of an actor of a mesh of two hosts with two gpus each."""
    doing = [{"debugged": True}] if debugged else [{}]
    shape = {"labels": ["hosts", "gpus"], "sizes": [2, 2]}
    return {"name": name, "rank": rank, "doing": doing, "system": system, **shape}


def diagnosis(*processes: list[dict[str, Any]]) -> dict[str, Any]:
    accounts = [{"uid": 1, "client": True, "machine": "here", "actors": [actor("script", 0)]}]
    for uid, actors in enumerate(processes, 10):
        accounts.append({"uid": uid, "client": False, "machine": "there", "actors": actors})
    return {"accounts": accounts}


FOUR = diagnosis(*([actor("trainers", rank, debugged=rank == 2)] for rank in (3, 2, 1, 0)))


@pytest.mark.parametrize(
    ("name", "ranks", "found"),
    [
        (None, None, [2]),
        ("trainers", None, [0, 1, 2, 3]),
        ("trainers", "1:3", [1, 2]),
        ("trainers", "gpus=1", [1, 3]),
        ("trainers", "hosts=1,gpus=0", [2]),
    ],
)
def test_chosen(name: str | None, ranks: str | None, found: list[int]) -> None:
    chosen = _chosen(FOUR, name, ranks)
    assert [each.names for each in chosen] == [[f"trainers {rank}"] for rank in found]
    assert [each.uid for each in chosen] == [13 - rank for rank in found]


def test_a_process_is_served_once() -> None:
    both = diagnosis([actor("a", 0, debugged=True), actor("b", 0, debugged=True)])
    (one,) = _chosen(both, None, None)
    assert one.names == ["a 0", "b 0"]


@pytest.mark.parametrize(
    ("name", "ranks", "says"),
    [
        (None, None, r"no rank is at a breakpoint; .*\(actors: a\)"),
        ("b", None, r"there is no b \(actors: a\)"),
        ("a", "7", r"there is no a 7 \(actors: a\)"),
        ("monarch", None, r"there is no monarch \(actors: a\)"),
    ],
)
def test_errors_name_the_actors(name: str | None, ranks: str | None, says: str) -> None:
    data = diagnosis([actor("a", 0), actor("monarch", 0, system=True)])
    with pytest.raises(RuntimeError, match=says):
        _chosen(data, name, ranks)


def test_launch_json() -> None:
    """A path is mapped where the process runs in another directory."""
    chosen = [_Debuggee(1, ["a 0"], "m", os.getcwd()), _Debuggee(2, ["a 1"], "m", "/far")]
    launch = json.loads(_launch_json(chosen, [5678, 5679]))
    first, second = launch["configurations"]
    assert first == {
        "name": "a 0",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": 5678},
    }
    mapping = {"localRoot": "${workspaceFolder}", "remoteRoot": "/far"}
    assert second["pathMappings"] == [mapping]
    (compound,) = launch["compounds"]
    assert compound["configurations"] == ["a 0", "a 1"]


def test_ports_that_are_taken() -> None:
    """By default another port is used; one that was asked for is an error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1"):
            next(_listeners(1, port))
    for listener in _listeners(2, None):
        with listener:
            assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("pids", "at_breakpoints", "found"),
    [
        ([], [], []),
        ([1], [], [1]),
        ([1, 2, 3], [2], [2]),
        ([1, 2, 3], [1, 3], [1, 3]),
        ([1, 2, 3], [], [1, 2, 3]),
    ],
)
def test_scripts_with_a_rank_at_a_breakpoint_come_first(
    monkeypatch: pytest.MonkeyPatch, pids: list[int], at_breakpoints: list[int], found: list[int]
) -> None:
    monkeypatch.setattr(
        script_door.ScriptDoor, "is_stopped", lambda self: self._pid in at_breakpoints
    )
    assert stopped_ones(pids) == found
