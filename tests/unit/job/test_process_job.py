"""The hosts of a `ProcessJob`: all that is below one ends with it, and a new one stays as long."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.job import ProcessJob, lifeline
from monarch.job import process as process_job
from monarch.job.os_process import OsProcess, wait_for, watch

FORKS_AT_ITS_END = """
import os, signal

def fork(*_):
    if os.fork():
        return
    print(os.getpid(), flush=True)
    while True:
        signal.pause()

signal.signal(signal.SIGTERM, fork)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="descendants are found by /proc")
def test_what_a_host_starts_instead_of_ending_is_killed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[OsProcess] = []
    command = [sys.executable, "-c", FORKS_AT_ITS_END]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"ready\n"

        def wait(processes: Iterable[OsProcess], timeout: float) -> list[OsProcess]:
            """Wait only until the host has handled SIGTERM; then until all have exited."""
            if started:
                return wait_for(processes, timeout)
            started.append(OsProcess.of(int(host.stdout.readline())))  # type: ignore[union-attr]
            return wait_for(processes, 0.0)

        monkeypatch.setattr(process_job, "wait_for", wait)
        job = ProcessJob({"hosts": 1})
        job._hosts = {"hosts": [("ipc:///nowhere/0", OsProcess.of(host.pid))]}
        try:
            job._kill()
            assert not started[0].alive
        finally:
            host.kill()
            for process in started:
                process.send(signal.SIGKILL)


@pytest.mark.parametrize("stays", [False, True])
def test_a_replaced_host_outlives_the_script_as_the_others_do(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = ProcessJob({"hosts": 1})
    job._folder = str(tmp_path)
    old = subprocess.Popen(["true"])
    old.wait()
    job._hosts = {"hosts": [("ipc:///nowhere/old", OsProcess(old.pid))]}
    other_line = lifeline.add(job._folder)
    if stays:
        lifeline.release(job._folder)
    lines = []
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, number: int) -> Any:
        assert (name, number) == ("hosts_0", 0)
        lines.append(lifeline.add(job._folder))
        started.append(subprocess.Popen(["true"]))
        return "ipc:///nowhere/new", started[0], lines[0][0]

    monkeypatch.setattr(job, "_start", start)
    monkeypatch.setattr(job, "_await", lambda number, line: None)
    assert job._replace_host("ipc:///nowhere/old") == "ipc:///nowhere/new"
    ((address, process),) = job._hosts["hosts"]
    assert (address, process.pid) == ("ipc:///nowhere/new", started[0].pid)
    theirs = lines[0][1]
    assert bool(select.select([theirs], [], [], 0)[0]) == stays
    lifeline.cut(job._folder)
    assert lifeline.outlived(theirs) is not stays
    for line in (theirs, other_line[1]):
        line.close()


def test_a_job_serves_only_what_asks_for_the_same() -> None:
    def described(hosts: int = 1, mode: str = "fast", minor: int = 12) -> Any:
        job: Any = ProcessJob({"hosts": hosts}, env={"MODE": mode})
        job._python = (3, minor)
        return job

    job = described()
    assert not job.can_run(described())  # it has no hosts yet
    job._hosts = {"hosts": [("ipc:///nowhere/0", OsProcess.of(os.getpid()))]}
    assert job.can_run(described())
    assert job._differs(described()) == ""
    for spec, why in [
        (described(hosts=2), "meshes"),
        (described(mode="slow"), "variables: other MODE"),
        (described(minor=13), "Python: 3.12 -> 3.13"),
    ]:
        assert not job.can_run(spec)
        assert why in job._differs(spec)


@pytest.mark.parametrize(("command", "told"), [("exit 3", True), ("exit 0", False)])
def test_an_unexpected_exit_of_a_worker_is_logged(
    command: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    process = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    watch(process)
    started = set(threading.enumerate()) - before
    (watching,) = [thread for thread in started if thread.name == "monarch-job-watch"]
    with caplog.at_level(logging.WARNING):
        assert process.stdin is not None
        process.stdin.close()
        watching.join()
    said = f"worker process {process.pid} of a job ended with status 3"
    # The name of an actor may be before it, if another test has actors in this process.
    assert [message[-len(said) :] for message in caplog.messages] == [said] * told


@pytest.mark.parametrize("comes", [True, False])
def test_a_job_is_there_when_each_of_its_hosts_listens(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    done: list[Any] = []
    job: Any = ProcessJob({"a": 1, "b": 1})

    def start(name: str, number: int) -> Any:
        done.append(("start", name))
        return f"ipc:///job/{number}", SimpleNamespace(pid=os.getpid()), number

    def await_host(number: int, line: Any) -> None:
        done.append(("await", line))
        if not comes:
            raise RuntimeError(f"host {number} of the job ended before it listened")

    monkeypatch.setattr(process_job, "remove_stale", lambda _: None)
    monkeypatch.setattr(process_job, "make_folder", lambda _: "/job")
    monkeypatch.setattr(process_job, "watch", lambda _: done.append("watch"))
    monkeypatch.setattr(job, "_start", start)
    monkeypatch.setattr(job, "_await", await_host)
    monkeypatch.setattr(job, "_kill", lambda: done.append("kill"))
    started: list[Any] = [("start", "a_0"), ("start", "b_0"), ("await", 0)]
    if comes:
        job._create(None)
        assert done == [*started, ("await", 1), "watch", "watch"]
    else:
        with pytest.raises(RuntimeError, match="host 0 of the job ended"):
            job._create(None)
        assert done == [*started, "kill", "watch", "watch"]


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_script_left_is_taken_over_with_the_secret_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    saved: Any = ProcessJob({"a": 1})
    saved._apply_id, saved._folder = "job-1", str(tmp_path)
    saved._hosts = {"a": [("ipc:///job/0", OsProcess.of(os.getpid()))]}
    secret = Path(process_job.secret_file(saved._folder))
    if is_there:
        secret.touch()
    monkeypatch.setattr(process_job, "job_load", lambda _: saved)
    monkeypatch.setattr(process_job, "reattach", lambda *job, **more: (job, more))
    job = ProcessJob({"a": 1})
    if is_there:
        expected = ("job-1",), {"workers": ["ipc:///job/0"], "secret_file": str(secret)}
        assert job.reattach("saved.pkl") == expected
    else:
        with pytest.raises(LookupError, match=r"the job of saved\.pkl was killed"):
            job.reattach("saved.pkl")
