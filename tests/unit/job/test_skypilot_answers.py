"""States and addresses from SkyPilot's objects, and when a cluster is ended."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.job.skypilot import guard
from monarch.job.skypilot.job import SkyPilotJob
from monarch.job.skypilot.sky import Sky


def sky(**functions: Any) -> Any:
    made: Any = object.__new__(Sky)
    made._sky = SimpleNamespace(get=lambda found: found, **functions)
    made._sky.StatusRefreshMode = SimpleNamespace(AUTO="auto")
    return made


@pytest.mark.parametrize(
    ("found", "state"), [([], None), ([SimpleNamespace(status="RUNNING")], "RUNNING")]
)
def test_the_state_of_a_request(found: list[Any], state: str | None) -> None:
    assert sky(api_status=lambda _ids, all_status: found).request("r") == state


@pytest.mark.parametrize("cached", [None, ["10.0.0.1"]])
def test_addresses_that_are_not_known_yet_are_asked_for(cached: list[str] | None) -> None:
    handle = SimpleNamespace(cached_internal_ips=cached, internal_ips=lambda: ["10.0.0.2"])
    record = {"status": "UP", "handle": handle}
    found = sky(status=lambda _names, refresh: [record]).addresses("c")
    assert found == (cached or ["10.0.0.2"])


@pytest.mark.parametrize("number", [3, "3"])
@pytest.mark.parametrize(("found", "state"), [({}, None), ({2: "RUNNING"}, None)])
def test_a_job_that_is_not_known_has_no_state(number: Any, found: Any, state: Any) -> None:
    assert sky(job_status=lambda _cluster, _jobs: found).job("c", number) is state


@pytest.mark.parametrize("key", [3, "3"])
def test_the_state_of_a_job_is_that_of_its_number(key: Any) -> None:
    """Servers name jobs by numbers or by texts."""
    found = {1: "FAILED", key: "RUNNING"}
    assert sky(job_status=lambda _cluster, _jobs: found).job("c", 3) == "RUNNING"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_guard_ends_the_cluster_of_a_script_that_was_lost_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    done: list[str] = []
    made = SimpleNamespace(
        cancel=lambda request: done.append(f"cancel {request}"),
        down=lambda cluster: done.append(f"down {cluster}"),
    )
    monkeypatch.setattr(guard, "Sky", lambda: made)
    monkeypatch.setattr(guard, "noted", lambda _folder, _name: "r1")

    def outlived(line: socket.socket) -> bool:
        line.close()
        return is_lost

    monkeypatch.setattr(guard.lifeline, "outlived", outlived)
    folder = tmp_path / "job"
    folder.mkdir()
    ours, theirs = socket.socketpair()
    with ours:
        guard.main(theirs.detach(), str(folder), "c")
    assert done == (["cancel r1", "down c"] if is_lost else [])
    assert folder.exists() is not is_lost


@pytest.mark.parametrize("minutes", [None, 0, 30])
def test_a_cluster_stops_by_itself_if_the_job_says_so(minutes: int | None) -> None:
    job: Any = SimpleNamespace(_idle_minutes=minutes, _down_on_autostop=True)
    expected = {} if minutes is None else {"idle_minutes_to_autostop": minutes, "down": True}
    assert SkyPilotJob._options(job) == expected


def test_a_job_is_torn_down_once_it_has_no_cluster() -> None:
    job: Any = SimpleNamespace(_cluster="", _request="r")
    asked: Any = SimpleNamespace(request=lambda _: "CANCELLED")
    assert SkyPilotJob._look_once(job, asked) == "it was torn down"
    job._cluster = "c"
    assert SkyPilotJob._look_once(job, asked) == "the launch was cancelled"
