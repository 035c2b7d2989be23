"""Launches that lose a host, and get another one: it came back, or was a spare."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import monarch.spmd.run
from monarch.job import ProcessJob
from monarch.job.os_process import OsProcess
from monarch.spmd.result import HOST, Result
from monarch.spmd.run import run
from monarch.spmd.torchrun import Launch

from .conftest import until

pytestmark = pytest.mark.failures

PROGRAM = """
import os, sys, time
names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
rank, world, count = (os.environ[name] for name in names)
print(world, count)
open(os.path.join(sys.argv[1], f"{world}-{count}-{rank}"), "w").close()
if f"{world}-{count}" != sys.argv[2]:
    time.sleep(1000)
"""

KEPT = """
import os, sys, time
from monarch.spmd import restarts
for attempt in restarts():
    with attempt:
        rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
        print(os.getpid(), world, attempt.failure)
        open(os.path.join(sys.argv[1], f"{world}-{attempt.number}-{rank}"), "w").close()
        while f"{world}-{attempt.number}" != sys.argv[2]:
            time.sleep(0.01)
"""


class Running:
    """A launch on the hosts of a job, on a thread."""

    def __init__(self, folder: Path, source: str, hosts: int, launch: Launch, last: str) -> None:
        (folder / "train.py").write_text(source)
        self._folder = folder
        self.job = ProcessJob({"trainers": hosts})
        self.said: list[str] = []
        self._shown: list[tuple[int, bytes]] = []
        self._result: Result | None = None
        mesh = self.job.state(cached_path=None).trainers
        program = (str(folder / "train.py"), str(folder), last)
        launch = Launch(program, **{name: getattr(launch, name) for name in
                        ("least", "most", "max_restarts")})  # fmt: skip

        def go() -> None:
            show = lambda rank, _stream, data: self._shown.append((rank, data))
            self._result = run(launch, mesh, show, say=self.said.append, modules=())

        self._thread = threading.Thread(target=go)
        self._thread.start()

    @property
    def process(self) -> list[tuple[str, OsProcess]]:
        """Address and process of each host."""
        return self.job._hosts["trainers"]

    def wait_for(self, *ranks: str) -> None:
        """Wait until these have begun: world size, number of restarts, rank."""
        until(lambda: all((self._folder / name).exists() for name in ranks), self.said)

    def kill(self, number: int) -> None:
        """Kill a host."""
        self.process[number][1].send(monarch.spmd.run.signal.SIGKILL)

    def result(self) -> Result:
        """Wait for the end of the launch."""
        until(lambda: not self._thread.is_alive(), self.said)
        assert self._result is not None, self.said
        return self._result

    def output(self, rank: int) -> list[str]:
        """Return the lines of a rank."""
        return b"".join(data for n, data in self._shown if n == rank).decode().splitlines()

    def end(self) -> None:
        self.job.kill()
        self._thread.join()


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(source: str, hosts: int, last: str, **options: int) -> Running:
        started.append(Running(tmp_path, source, hosts, Launch((), **options), last))
        return started[-1]

    yield begin
    for one in started:
        one.end()


def test_a_host_that_comes_back(start: Start) -> None:
    """The launch shrinks, and grows again; only the loss counts as a restart."""
    running = start(PROGRAM, 2, "2-1", least=1, most=2, max_restarts=1)
    running.wait_for("2-0-0", "2-0-1")
    running.kill(1)
    running.wait_for("1-1-0")
    running.job.replace_host(running.process[1][0])
    result = running.result()
    assert result.succeeded, running.said
    assert (result.attempts, result.grown, result.restarts_left) == (3, 1, 0)
    assert [failure.rank for failure in result.failures] == [HOST]
    assert running.output(0) == ["2 0", "1 1", "2 1"]
    assert "was lost" in running.said[0]
    assert running.said[1].endswith("has joined; attempt 3 of at most 3 starts")
    assert result.costs()[0].endswith("no restarts left; hosts joined 1 time")


def test_healthy_ranks_go_on_when_a_host_joins(start: Start) -> None:
    running = start(KEPT, 2, "2-1", least=1, most=2, max_restarts=1)
    running.wait_for("2-0-0", "2-0-1")
    running.kill(1)
    running.wait_for("1-1-0")
    running.job.replace_host(running.process[1][0])
    assert running.result().succeeded, running.said
    lines = [line.split(" ", 2) for line in running.output(0)]
    assert len({pid for pid, _, _ in lines}) == 1
    assert [world for _, world, _ in lines] == ["2", "1", "2"]
    assert lines[2][2].endswith("has joined")


def test_a_host_that_was_not_used_takes_the_place_of_a_lost_one(start: Start) -> None:
    running = start(PROGRAM, 3, "2-1", least=2, most=2, max_restarts=1)
    running.wait_for("2-0-0", "2-0-1")
    running.kill(0)
    result = running.result()
    assert result.succeeded, running.said
    assert (result.attempts, result.grown) == (2, 0)
    assert running.output(1) == ["2 0", "2 1"]


def test_too_few_hosts_are_left(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch.spmd.run, "_RETURN", 0.5)
    running = start(PROGRAM, 2, "2-1", least=2, most=2, max_restarts=3)
    running.wait_for("2-0-0", "2-0-1")
    running.kill(0)
    result = running.result()
    assert not result.succeeded
    assert (result.attempts, result.grown) == (1, 0)
    few = "1 host is left, and the program needs 2 (--nnodes)"
    assert f"{few}: waiting 0.5 s for another" in running.said[0]
    assert running.said[1] == few
