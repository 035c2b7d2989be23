"""A node in the place of a lost one, and a kill that comes meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch.job.slurm import replacement as replacements
from monarch.job.slurm.replacement import Replacement


class Job:
    """A job of two nodes, whose Slurm does all at once."""

    _job_name, _job_id, _port = "train", 7, 26600
    _start_timeout, _out_of_cluster = 60.0, False

    def __init__(self, attach_to: str | None = None) -> None:
        self._attach_to = attach_to
        self._hosts = ["tcp://n0:26600", "tcp://n1:26600"]
        self._replaced: dict[str, int] = {}
        self._extra: dict[str, int] = {}
        self._folder = "/job"
        self._meshes = {"hosts": 2}
        self.awaited: list[str] = []
        self.cancelled: list[int] = []

    def _note(self) -> None: ...
    def _numbers(self) -> list[int]:
        return [7]

    def _script(self, *words: Any) -> str:
        return " ".join(map(str, words))

    def _submit(self, _name: str, script: str) -> int:
        self.script = script
        return 8

    def _log_paths(self, name: str) -> list[str]:
        return [f"/job/{name}-%j.log"]

    def _scheduler(self) -> Any:
        return SimpleNamespace(cancel=self.cancelled.append)

    def _waiting(self) -> Any:
        return SimpleNamespace(
            look=lambda _: SimpleNamespace(ended=False, running=True, nodes=["n0", "n1"]),
            nodes=lambda *_: ["n2"],
            addresses=lambda nodes, port: [f"tcp://{nodes[0]}:{port}"],
            worker=lambda address, *_: self.awaited.append(address),
        )


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the guards that were started."""
    started: list[tuple[str, int]] = []
    monkeypatch.setattr(replacements, "start_guard", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(replacements.lifeline, "is_held", lambda _: True)
    return started


@pytest.mark.parametrize("attach_to", [None, "localhost"])
def test_a_new_node_has_a_guard_and_takes_the_place_of_the_old_one(
    guards: list[tuple[str, int]], attach_to: str | None
) -> None:
    """Its worker is awaited, unless only another address leads to it."""
    job: Any = Job(attach_to)
    assert Replacement(job, "tcp://n1:26600").run() == "tcp://n2:26600"
    assert guards == [("/job", 8)]
    assert job._hosts == ["tcp://n0:26600", "tcp://n2:26600"]
    assert job._replaced == {"tcp://n1:26600": 1}
    assert job._extra == {"1": 8}
    assert "--exclude=n0,n1" in job.script
    assert job.awaited == ([] if attach_to else ["tcp://n2:26600"])
    assert job.cancelled == []


def test_a_job_that_was_killed_gets_no_node(guards: list[tuple[str, int]]) -> None:
    job: Any = Job()
    replacement = Replacement(job, "tcp://n1:26600")
    job._folder = ""
    with pytest.raises(RuntimeError, match="was killed while a lost host was replaced"):
        replacement.run()
    assert not hasattr(job, "script")
    assert guards == []
