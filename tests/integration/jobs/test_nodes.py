"""A script that a launcher starts on each host: rank 0 drives, the others serve. No launcher here:
each process gets the variables of one."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.job import NodesJob
from tests.integration.jobs.launched import WAIT, marked, until

SCRIPT = """
import sys
from monarch.job import NodesJob
job = NodesJob.from_environment(job_start_timeout=float(sys.argv[1]))
hosts = job.state(cached_path=None).hosts
hosts.initialized.get(timeout=60)
print(hosts.extent)
"""


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return f"OF_THE_TEST={tmp_path}"


@pytest.fixture
def where() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def started(
    mark: str, where: str, rank: int, size: int = 2, limit: float = WAIT, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    name, _, value = mark.partition("=")
    own = {name: value, "MONARCH_RENDEZVOUS": where, "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(limit)],
        env={**os.environ, **own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_processes_find_each_other_whichever_starts_first(mark: str, where: str) -> None:
    with started(mark, where, 1) as worker, started(mark, where, 0) as driver:
        out, err = driver.communicate(timeout=WAIT)
        assert (out, driver.returncode) == ("{hosts: 2}\n", 0), err
        out, err = worker.communicate(timeout=WAIT)
        assert (out, err, worker.returncode) == ("", "", 0)
    until(lambda: not marked(mark))


def test_a_killed_driver_ends_the_workers(mark: str, where: str) -> None:
    with started(mark, where, 1) as worker, started(mark, where, 0, 3) as driver:
        _, err = worker.communicate(timeout=WAIT)  # (it was started as one of two)
        driver.kill()
        driver.communicate(timeout=WAIT)
    until(lambda: not marked(mark))
    assert isinstance(err, str)


def test_a_rank_that_does_not_come(mark: str, where: str) -> None:
    with started(mark, where, 0, limit=3.0) as driver:
        _, err = driver.communicate(timeout=WAIT)
    assert driver.returncode == 1
    assert "did not start within 3 s:" in err
    assert "workers (rank" in err
    until(lambda: not marked(mark))


def test_a_driver_that_does_not_come(mark: str, where: str) -> None:
    with started(mark, where, 1, limit=0.5) as worker:
        _, err = worker.communicate(timeout=WAIT)
    assert worker.returncode == 1
    assert err.count("\n") == 1
    assert f"rank 1 cannot reach the driver at tcp://{where}" in err


def test_a_worker_with_another_secret(mark: str, where: str) -> None:
    own = {"MONARCH_JOB_SECRET": "the secret of the driver"}
    other = {"MONARCH_JOB_SECRET": "not the secret of the driver"}
    with (
        started(mark, where, 0, limit=20.0, **own) as driver,
        started(mark, where, 1, **other) as worker,
    ):
        _, err = worker.communicate(timeout=WAIT)
        assert worker.returncode == 1
        assert "another secret" in err
        assert "secret of the driver" not in err
        driver.kill()
        driver.communicate(timeout=WAIT)
    until(lambda: not marked(mark))


def test_a_rendezvous_that_is_taken(mark: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with started(mark, where, 0) as driver:
            _, err = driver.communicate(timeout=WAIT)
    assert f"rank 0 cannot listen at tcp://{where}" in err
    assert "MONARCH_RENDEZVOUS" in err


NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "MONARCH_RENDEZVOUS")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_no_launcher(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"no launcher has started this process: .* ProcessJob"):
        NodesJob.from_environment()


def test_an_unknown_meeting_point(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("PMI_RANK", "0")
    alone.setenv("PMI_SIZE", "2")
    with pytest.raises(RuntimeError, match="MPI does not say where rank 0 runs: name its host"):
        NodesJob.from_environment()
    with pytest.raises(ValueError, match=r"tcp://node1 has no port|node1"):
        NodesJob.from_environment(rendezvous="node1")
    with pytest.raises(ValueError, match="the meshes have 3 hosts, and MPI has started 2"):
        NodesJob.from_environment({"a": 3}, rendezvous="127.0.0.1:22300")


def test_a_saved_one_serves_no_other_script(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("PMI_RANK", "0")
    alone.setenv("PMI_SIZE", "1")
    job = NodesJob.from_environment(rendezvous="127.0.0.1:22300")
    assert not job.can_run(job)
    with pytest.raises(RuntimeError, match="NodesJob cannot run batch-mode scripts"):
        job.apply("train.py")
