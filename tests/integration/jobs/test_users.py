"""A job in use by a script is not taken away by another, and no job is left behind."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, SupervisionError, endpoint
from monarch.job import ProcessJob, job_load
from monarch.job import folder as folder_module
from monarch.job.os_process import OsProcess, descendants, wait_for

WAIT = 60.0

SCRIPT = """
import os, sys
from monarch.actor import Actor, endpoint
from monarch.job import ProcessJob

class Worker(Actor):
    @endpoint
    def pid(self): return os.getpid()

options = dict(env={"X": "secret"}) if "env" in sys.argv else {}
if "grace" in sys.argv:
    options["grace"] = "5m"
name = "a" if "a" in sys.argv else "trainers"
job = ProcessJob({name: int(sys.argv[1])}, **options)
path = None if "nofile" in sys.argv else ".monarch/job_state.pkl"
workers = getattr(job.state(cached_path=path), name).spawn_procs().spawn("workers", Worker)
pids = [process.pid for _, process in job._running_as()._hosts[name]]
ready = (workers.pid.call().get(timeout=60).values(), pids, job._running_as()._folder)
# Before the print: an interrupt that comes within os.fork() is raised in a hook that ignores it.
if "fork" in sys.argv and os.fork() == 0:
    os.close(1)
    sys.stdin.read()  # (holds what the script held, until its input ends)
    os._exit(0)
print(ready, flush=True)
if "raise" in sys.argv:
    raise ValueError("by the script")
if "wait" in sys.argv:
    sys.stdin.readline()
    print(workers.pid.call().get(timeout=60).values(), end="")
"""


class Worker(Actor):
    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class Script:
    """A script that has connected to its job and waits for input."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said
        self.workers, self.hosts, self.folder = ast.literal_eval(said)

    def go_on(self) -> str:
        out, _ = self.process.communicate("\n", timeout=WAIT)
        return out


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Script]:
    script = Script(*arguments)
    try:
        yield script
    finally:
        script.process.kill()
        script.process.communicate()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )


def hosts_of(job: Any) -> list[OsProcess]:
    return [process for hosts in job._hosts.values() for _, process in hosts]


def test_a_job_that_a_script_uses_is_not_replaced(killed: Any) -> None:
    with running("2", "wait") as first:
        job = killed(job_load())
        refused = run("1", "env")
        assert refused.returncode == 1
        error = refused.stderr.strip().splitlines()[-1]
        assert error.startswith(
            "RuntimeError: the job of .monarch/job_state.pkl is in use by python -c (pid "
            f"{first.process.pid}, since 20"
        )
        assert "another: meshes: trainers 2 -> 1; variables: other X." in error
        assert "secret" not in error
        assert "`monarch kill`" in error
        assert "state(cached_path=...)" in error
        assert run("2").returncode == 0  # the same job serves both
        assert first.go_on() == str(first.workers)
    replaced = run("1")
    assert replaced.returncode == 0
    assert (
        "monarch: the job of .monarch/job_state.pkl, which no script uses, is killed and replaced: "
        "meshes: trainers 2 -> 1\n"
    ) in replaced.stderr
    assert not any(host.alive for host in hosts_of(job))
    killed(job_load())


def test_a_script_that_describes_its_own_job_anew_replaces_it(
    killed: Any, faults: list[Any], capfd: Any
) -> None:
    """The stop of the old job's actors counts as no failure."""
    first = killed(ProcessJob({"a": 1}))
    old = first.state().a.spawn_procs().spawn("old", Worker)
    assert old.echo.call_one(1).get(timeout=WAIT) == 1
    hosts = hosts_of(first)

    new = killed(ProcessJob({"a": 2})).state().a.spawn_procs().spawn("new", Worker)
    assert new.echo.call(2).get(timeout=WAIT).values() == [2, 2]
    assert (
        "monarch: the job of .monarch/job_state.pkl, which only this script uses, is killed and "
        "replaced: meshes: a 1 -> 2\n"
    ) in capfd.readouterr().err
    assert not any(host.alive for host in hosts)
    with pytest.raises(SupervisionError):
        old.echo.call_one(1).get(timeout=WAIT)

    shared = r"is in use by .*python -c \(pid .*a 2 -> 1"
    with running("2", "wait", "a"), pytest.raises(RuntimeError, match=shared):
        ProcessJob({"a": 1}).state()
    assert not faults


AGAIN = """
import os, sys
from monarch.actor import Actor, endpoint
from monarch.job import ProcessJob

class Worker(Actor):
    @endpoint
    def pid(self): return os.getpid()

if sys.argv[1] == "first":
    for name, count in (("old", 1), ("new", 2)):
        procs = ProcessJob({"a": count}, grace="5m").state().a.spawn_procs()
        print(len(procs.spawn(name, Worker).pid.call().get(timeout=60)), flush=True)
    os.kill(os.getpid(), 9)
print(*sorted(ProcessJob({"a": 2}, grace="5m").reattach().actors))
"""


def test_the_job_that_was_described_last_is_kept_for_the_next_script(
    killed: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.delenv("MONARCH_SECRET_FILE")  # the job has its own
    said = []
    for which in ("first", "next"):
        with (directory / which).open("w") as out:  # (a kept process would hold a pipe open)
            command = [sys.executable, "-c", AGAIN, which]
            subprocess.run(command, stdout=out, timeout=WAIT, check=False)
        said.append((directory / which).read_text())
    killed(job_load())
    assert said == ["1\n2\n", "new\n"]


def test_what_another_job_object_kills_is_no_failure(killed: Any, faults: list[Any]) -> None:
    job = killed(ProcessJob({"a": 1}))
    mesh = job.state().a.spawn_procs().spawn("mesh", Worker)
    more = job.state().a.spawn_procs().spawn("more", Worker)
    assert [one.echo.call_one(1).get(timeout=WAIT) for one in (mesh, more)] == [1, 1]
    job_load().kill()
    for one in (mesh, more):
        with pytest.raises(SupervisionError, match=r"selective drain|was released"):
            one.echo.call_one(1).get(timeout=WAIT)
    assert not faults


def test_a_script_that_is_killed_uses_nothing(killed: Any) -> None:
    """A forked child of the script lives on, and does not count as a user."""
    with running("1", "wait", "fork") as first:
        killed(job_load())
        first.process.kill()
        first.process.wait(WAIT)
        assert run("2").returncode == 0
    killed(job_load())


def test_hosts_keep_the_directory_as_long_as_they_live(killed: Any) -> None:
    job = killed(ProcessJob({"a": 2}))
    job.apply()
    job.dump("job.pkl")
    folder, (first, other) = job._folder, hosts_of(job)
    os.close(folder_module._locks.pop(folder))  # as the exit of the script does
    first.send(signal.SIGKILL)
    assert wait_for([first], WAIT) == []
    folder_module.remove_stale("monarch-process-job-")
    assert os.path.exists(folder_module.secret_file(folder))
    other.send(signal.SIGKILL)
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # waits for all processes below the hosts, which hold it as well
    os.close(fd)
    killed(ProcessJob({"a": 1})).apply()
    assert not os.path.exists(folder)


def test_what_is_kept_for_the_next_script_is_not_replaced(
    killed: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    first = subprocess.run(  # (a kept process would hold a pipe open)
        [sys.executable, "-c", SCRIPT, "1", "grace"], stdout=subprocess.DEVNULL, timeout=WAIT
    )
    assert first.returncode == 0
    job = killed(job_load())
    refused = run("2")
    assert refused.returncode == 1
    assert "is kept for the script that takes over what its last one left" in refused.stderr
    assert all(host.alive for host in hosts_of(job))


@pytest.mark.parametrize("end", ["raise", "kill", "interrupt"])
def test_without_a_file_the_hosts_end_with_the_script(end: str) -> None:
    with running("1", "nofile", "fork", "raise" if end == "raise" else "wait") as script:
        hosts = [OsProcess.of(pid) for pid in script.hosts]
        below = descendants(hosts)
        if end != "raise":
            script.process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGINT)
        script.process.wait(WAIT)
        assert wait_for([*hosts, *below], WAIT) == []
        assert not os.path.exists(script.folder)


def test_with_a_file_they_do_not(killed: Any) -> None:
    assert run("1").returncode == 0
    job = killed(job_load())
    assert all(host.alive for host in hosts_of(job))
