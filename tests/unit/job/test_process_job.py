"""The hosts of a `ProcessJob`: all that is below one ends with it, and a new one stays as long."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from monarch.job import ProcessJob, lifeline
from monarch.job import process as process_job
from monarch.job.os_process import OsProcess, wait_for

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
    job._hosts = {"hosts": [("ipc:///nowhere/0", OsProcess(old.pid))]}
    other_line = lifeline.add(job._folder)
    if stays:
        lifeline.release(job._folder)
    lines = []

    def start(name: str, number: int) -> Any:
        assert (name, number) == ("hosts_0", 0)
        lines.append(lifeline.add(job._folder))
        return "ipc:///nowhere/0", subprocess.Popen(["true"]), lines[0][0]

    monkeypatch.setattr(job, "_start", start)
    monkeypatch.setattr(job, "_await", lambda number, line: None)
    assert job._replace_host("ipc:///nowhere/0") == "ipc:///nowhere/0"
    theirs = lines[0][1]
    assert bool(select.select([theirs], [], [], 0)[0]) == stays
    lifeline.cut(job._folder)
    assert lifeline.outlived(theirs) is not stays
    for line in (theirs, other_line[1]):
        line.close()
