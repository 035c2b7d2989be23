"""Jobs of a launcher: a program of the tests starts the workers, or fails in each possible way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch.job import LauncherJob, job_load
from monarch.job.keeper import ended_file
from tests.integration.jobs.launched import (
    LOOPBACK,
    WAIT,
    Worker,
    in_arguments,
    marked,
    pids,
    until,
)

LAUNCH = """
import os, subprocess, sys
size, ranks = sys.argv[1], sys.argv[2].split(",")
workers = [
    subprocess.Popen(sys.argv[3:], env={**os.environ, "RANK": rank, "WORLD_SIZE": size})
    for rank in ranks
]
sys.exit(max(abs(worker.wait()) for worker in workers))
"""


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return f"OF_THE_TEST={tmp_path}"


def launch(size: int, ranks: str) -> list[str]:
    return [sys.executable, "-c", LAUNCH, str(size), ranks]


def described(
    mark: str, launcher: list[str], meshes: dict[str, int] | None = None, **options: Any
) -> LauncherJob:
    name, _, value = mark.partition("=")
    options = {"address": LOOPBACK, "env": {name: value}, **options}
    return LauncherJob(meshes or {"a": 1, "b": 1}, launcher, **options)


def test_hosts_from_start_to_kill(mark: str, killed: Any) -> None:
    """The meshes have the hosts in the order of the ranks, whatever order they come in."""
    job = killed(described(mark, launch(3, "2,0,1"), {"a": 2, "b": 1}))
    with pytest.raises(RuntimeError, match="the job does not run"):
        job.host_names()
    state = job.state(cached_path=None)
    assert job.host_names() == ["127.0.0.1"] * 3
    workers = state.a.spawn_procs().spawn("workers", Worker)
    assert workers.variable.call("RANK").get(timeout=WAIT).values() == ["0", "1"]
    path = Path(workers.slice(hosts=0).variable.call_one("MONARCH_JOB_SECRET_FILE").get(WAIT))
    assert path.stat().st_mode & 0o777 == 0o600
    assert workers.variable.call("MONARCH_JOB_SECRET").get(WAIT).values() == [None, None]
    secret = path.read_bytes().strip()
    assert in_arguments(secret) == []
    assert all(secret not in log.read_bytes() for log in Path(job._folder).glob("*.log"))
    assert set(pids(state.b)) <= set(marked(mark))
    job.kill()
    assert marked(mark) == []
    assert not path.exists()
    assert not job.active


def test_a_job_without_a_file_ends_with_the_script(mark: str) -> None:
    run_script(mark, "job.state(cached_path=None).a.initialized.get(60)")
    until(lambda: not marked(mark))


def test_a_script_that_is_killed_leaves_nothing(mark: str, tmp_path: Path) -> None:
    code = "job.apply(); print(job._folder, flush=True); os.kill(os.getpid(), 9)"
    folder = Path(run_script(mark, code, status=-signal.SIGKILL))
    until(lambda: not marked(mark))
    until(lambda: not folder.exists())


def test_a_script_that_is_killed_while_workers_start_leaves_nothing(mark: str) -> None:
    """One rank has reported, and the other never starts."""
    code = (
        "import threading; threading.Thread(target=job.apply, daemon=True).start()\n"
        "while not gc_meetings(): pass\n"
        "os.kill(os.getpid(), 9)"
    )
    run_script(mark, code, status=-signal.SIGKILL, ranks="0")
    until(lambda: not marked(mark))


SCRIPT = """
import gc, os, sys
from monarch.job import LauncherJob
from monarch.job.rendezvous import Meeting
def gc_meetings():
    return [one for one in gc.get_objects() if type(one) is Meeting and one.reported]
job = LauncherJob({{"a": 1, "b": 1}}, {launcher!r}, address="tcp://127.0.0.1:0", env={env!r})
{code}
"""


def run_script(mark: str, code: str, status: int = 0, ranks: str = "0,1") -> str:
    """Run a script with a job of two hosts; check its exit status, and return its output."""
    name, _, value = mark.partition("=")
    source = SCRIPT.format(launcher=launch(2, ranks), env={name: value}, code=code)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout.strip()


def test_the_next_script_finds_the_hosts(mark: str, killed: Any) -> None:
    code = "job.state().a.initialized.get(60); print(job.apply_id)"
    assert run_script(mark, code) == run_script(mark, code)
    job = killed(job_load())
    hosts = job.state(cached_path=None).b
    assert set(pids(hosts)) <= set(marked(mark))


def test_a_host_that_ended_is_noticed(mark: str, killed: Any, faults: list[Any]) -> None:
    """The launcher runs on, as srun does."""
    job = killed(described(mark, launch(2, "0,1")))
    state = job.state(cached_path=None)
    workers = state.b.spawn_procs().spawn("workers", Worker)
    pid = workers.pid.call_one().get(timeout=WAIT)
    (worker,) = [one for one in marked(mark) if is_worker(one, rank=1) and one != pid]
    os.kill(worker, signal.SIGTERM)
    until(lambda: os.path.exists(ended_file(job._folder, 1)))
    states = [(state.mesh, state.rank, state.healthy) for state in job._host_states()]
    assert states == [("a", 0, True), ("b", 0, False)]
    assert not job.can_run(described(mark, launch(2, "0,1")))
    with pytest.raises(RuntimeError, match=r"lost connection to the hosts: .* rank 1 ended"):
        job.state(cached_path=None)
    until(lambda: faults)


def is_worker(pid: int, rank: int) -> bool:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return f"RANK={rank}".encode() in environ and b"reporting_host" in command


def test_the_end_of_the_launcher_ends_the_workers(mark: str, killed: Any) -> None:
    job = killed(described(mark, launch(2, "0,1")))
    job.apply()
    (launcher,) = [
        pid
        for pid in marked(mark)
        if LAUNCH.encode() in commands(pid)[2:3] and parent_is_keeper(pid)
    ]
    os.kill(launcher, signal.SIGKILL)
    until(lambda: not marked(mark))
    with pytest.raises(RuntimeError, match=r"lost connection to the hosts: .* ended"):
        job.state(cached_path=None)


def commands(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def parent_is_keeper(pid: int) -> bool:
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return b"keeper" in b" ".join(commands(int(parent)))


def fails(job: LauncherJob, mark: str) -> str:
    """Check that the job does not start and leaves nothing; return the text of the error."""
    with pytest.raises(RuntimeError) as error:
        job.state(cached_path=None)
    until(lambda: not marked(mark))
    assert not job.active
    assert job._folder == ""
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_launcher_that_is_missing(mark: str) -> None:
    text = fails(described(mark, ["srunn", "-N2"]), mark)
    assert "`srunn` is not installed here" in text


def test_a_launcher_that_fails(mark: str) -> None:
    text = fails(described(mark, ["sh", "-c", "echo no such partition >&2; exit 3"]), mark)
    assert "`sh` ended with status 3 before the report of 2 of 2 workers (rank 0-1)" in text
    assert text.endswith("it said: no such partition")


def test_a_launcher_that_does_nothing(mark: str) -> None:
    text = fails(described(mark, ["true"]), mark)
    assert "`true` ended with status 0 before the report" in text


def test_a_launcher_that_hangs_and_ignores_signals(mark: str) -> None:
    launcher = ["sh", "-c", "trap '' TERM; echo waiting for nodes; while :; do sleep 0.1; done"]
    text = fails(described(mark, launcher, job_start_timeout=1.0), mark)
    assert "did not start within 1 s" in text
    assert "rank 0-1" in text


def test_a_worker_that_never_comes(mark: str) -> None:
    """The limit may pass before the other worker reports, if the machine is slow."""
    job = described(mark, launch(2, "0"), job_start_timeout=3.0)
    assert re.search(r"no report of . of 2 workers \(rank (0-)?1\)", fails(job, mark))


def test_a_worker_that_dies_before_it_reports(mark: str) -> None:
    job = described(mark, launch(2, "0,1"), python_exe=f"{sys.executable} -c 'raise SystemExit(4)'")
    assert "ended with status 4 before the report of 2 of 2 workers" in fails(job, mark)


def test_a_worker_that_cannot_listen(mark: str) -> None:
    job = described(mark, launch(2, "0,1"), address="tcp://192.0.2.99:0")
    assert "cannot listen at tcp://192.0.2.99:0" in fails(job, mark)


def test_two_workers_with_one_rank(mark: str) -> None:
    text = fails(described(mark, launch(2, "0,0")), mark)
    assert "the job cannot start: two workers are rank 0: process" in text


def test_another_number_of_workers(mark: str) -> None:
    text = fails(described(mark, launch(3, "0,1,2")), mark)
    assert "was started as one of 3, and the job describes 2 hosts" in text


def test_a_launcher_that_sets_no_rank(mark: str) -> None:
    text = fails(described(mark, ["env"]), mark)
    assert "the launcher has set no rank" in text


def test_a_launcher_that_passes_on_no_variables(mark: str) -> None:
    launcher = ["env", "-i", "RANK=0", "WORLD_SIZE=1"]
    text = fails(described(mark, launcher, {"a": 1}), mark)
    assert "does not pass on MONARCH_JOB_SECRET and MONARCH_RENDEZVOUS" in text


def test_a_worker_with_another_secret(mark: str) -> None:
    launcher = ["env", "MONARCH_JOB_SECRET=not-the-secret-of-this-job", *launch(1, "0")]
    text = fails(described(mark, launcher, {"a": 1}), mark)
    assert "another secret" in text
    assert "not-the-secret" not in text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"launcher": "srun -N2"}, TypeError, "launcher must be a list"),
        ({"launcher": []}, TypeError, "launcher must be a list"),
        ({"meshes": {"a": 0}}, ValueError, r"meshes\['a'\] must be at least 1"),
        ({"meshes": {"a": "2"}}, TypeError, r"meshes\['a'\] must be a number"),
        ({"address": "ipc:///tmp/x"}, ValueError, "address must be such as"),
        ({"job_start_timeout": 0}, ValueError, "job_start_timeout must be positive"),
    ],
)
def test_impossible_arguments(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LauncherJob(**{"meshes": {"a": 1}, "launcher": ["srun"], **options})


def test_another_description_does_not_fit(mark: str) -> None:
    job = described(mark, ["srun"])
    assert "other launcher" in job._differs(described(mark, ["mpirun"]))
    assert "meshes: a 1 -> 2" in job._differs(described(mark, ["srun"], {"a": 2, "b": 1}))
    other = described(mark, ["srun"], env={"TOKEN": "hidden"})
    assert "other env" in job._differs(other)
    assert "hidden" not in job._differs(other)
    with pytest.raises(RuntimeError, match="LauncherJob cannot run batch-mode scripts"):
        job.apply("train.py")
    with pytest.raises(ValueError, match="at least one mesh"):
        LauncherJob({}, ["srun"]).apply()
