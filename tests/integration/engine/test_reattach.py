"""A job with a grace period outlives its driver, and another driver takes it over.

A driver is a program that evaluates each expression that it reads from stdin. The tests find the
processes of a job by an environment variable that all of them inherit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import files_of_processes

from .conftest import WAIT, kill, until

DRIVER = """
import os, sys, time
import monarch.actor
from monarch.actor import *
from monarch.config import configure

faults = []
monarch.actor.unhandled_fault_hook = faults.append


class Counter(Actor):
    def __init__(self):
        self.count = 0
        self.port = None
        self.handled = []

    @endpoint
    def add(self, number):
        self.count += number
        return self.count

    @endpoint
    def pid(self): return os.getpid()

    @endpoint
    def fail_when(self, path):
        while not os.path.exists(path):
            time.sleep(0.01)
        context().actor_instance.abort("it was asked to")

    @endpoint
    def take_port(self, port): self.port = port

    @endpoint
    def use_port(self, value): self.port.send(value)

    @endpoint
    def ask(self, mesh): return outcome(lambda: mesh.add.call_one(1).get(timeout=60))

    @endpoint
    def nest(self):
        self.procs = this_host().spawn_procs()
        self.child = self.procs.spawn("child", Counter)
        return self.child.pid.call_one().get()

    @endpoint
    def ask_child(self): return outcome(lambda: self.child.add.call_one(1).get(timeout=60))

    @endpoint
    def what_was_handled(self): return self.handled

    def __supervise__(self, failure):
        self.handled.append(failure.mesh_name)
        return True


def outcome(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def start(grace="60s", **options):
    global procs, counters
    configure(driver_grace=grace, job_id=JOB)
    procs = this_host().spawn_procs({"gpus": 3}, name="trainers", **options)
    counters = procs.spawn("counters", Counter)
    return counters.add.call(1).get().values()


def start_there(*addresses, grace="60s"):
    global procs, counters, hosts
    configure(driver_grace=grace, job_id=JOB)
    hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
    procs = hosts.spawn_procs({"gpus": 2}, name="trainers")
    counters = procs.spawn("counters", Counter)
    return counters.add.call(1).get().values()


def hosts_again(*addresses):
    global hosts
    hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
    return hosts.initialized.get(timeout=60)


def again(**options):
    global job, procs, counters
    job = reattach(JOB, **options)
    procs, counters = job.procs["trainers"], job.actors["counters"]


def failed():
    return [(failure.crashed_ranks, str(failure)) for failure in job.failures.get(timeout=60)]


JOB = sys.argv[1]
print("up", flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(repr(f"{type(error).__name__}: {error}"), flush=True)
"""


class Job:
    """The name of a job, and the driver programs that were started for it."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"MONARCH_TEST_MARK={uuid.uuid4().hex}"
        self.name = f"test-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.script = folder / "driver.py"
        self.script.write_text(DRIVER)
        self.drivers: list[subprocess.Popen[str]] = []

    def driver(self, **environ: str) -> Driver:
        name, _, value = self.mark.partition("=")
        process = subprocess.Popen(
            [sys.executable, str(self.script), self.name],
            cwd=self.folder,
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.folder), name: value, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.drivers.append(process)
        return Driver(process)

    def running(self) -> list[int]:
        """Return the pids of the job's processes and of its drivers."""
        found = []
        for path in files_of_processes("environ"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def doors(self) -> list[str]:
        folder = self.folder / "pymonarch"
        return os.listdir(folder) if folder.exists() else []


class Driver:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self.said() == "up"

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __call__(self, expression: str) -> Any:
        assert self.process.stdin is not None
        print(expression, file=self.process.stdin, flush=True)
        return eval(self.said())

    def kill(self) -> None:
        kill(self.process.pid)
        self.process.wait(WAIT)

    def missed(self) -> bool:
        """Take the job over and exit; return whether two failures were missed.

        A failure is missed if it occurred while the job had no driver.
        """
        self("again()")
        both = len(self("failed()")) == 2
        self.end()
        return both

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(WAIT) == 0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for process in job.drivers:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait(WAIT)
    try:
        until(lambda: not job.running())  # each test shuts down its job
    finally:
        for pid in job.running():
            with contextlib.suppress(ProcessLookupError):
                kill(pid)


END = "shutdown_context().get(timeout=60)"


@pytest.mark.failures
def test_a_killed_driver_is_succeeded(job: Job) -> None:
    """A new driver finds the same processes and actor state, and controls the job."""
    first = job.driver()
    assert first("start()") == [1, 1, 1]
    pids = first("counters.pid.call().get().values()")
    first.kill()
    second = job.driver()
    assert second("again()") is None
    assert second("list(job.procs), list(job.actors)") == (["trainers"], ["counters"])
    assert second("counters.pid.call().get().values()") == pids
    assert second("counters.slice(gpus=1).add.call_one(5).get()") == 6
    assert second("failed()") == []
    assert second("faults") == []
    # The new driver owns the job: it can spawn, receive failures, and stop the meshes.
    assert second("procs.spawn('more', Counter).add.call(7).get().values()") == [7, 7, 7]
    assert second("len(this_host().spawn_procs().spawn('own', Counter).pid.call().get())") == 1
    kill(pids[2])
    assert second("outcome(lambda: counters.add.call(0).get())").startswith("SupervisionError")
    until(lambda: second("len(faults)"))
    assert second("procs.stop().get(timeout=60)") is None
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert second(END) is None
    second.end()
    until(lambda: not job.running())
    assert job.doors() == []


def test_a_driver_that_ends_leaves_its_job_as_well(job: Job) -> None:
    """A driver that exits normally, as a restarted notebook does, can be succeeded repeatedly."""
    driver = job.driver()
    driver("start()")
    pids = driver("counters.pid.call().get().values()")
    for count in (2, 3):
        driver.end()
        driver = job.driver()
        assert driver("again()") is None
        assert driver("counters.pid.call().get().values()") == pids
        assert driver("counters.add.call(1).get().values()") == [count] * 3
    assert driver(END) is None
    until(lambda: not set(pids) & set(job.running()))


def test_failures_that_it_missed_are_told_to_the_successor(job: Job, tmp_path: Path) -> None:
    first = job.driver()
    first("start()")
    pids = first("counters.pid.call().get().values()")
    flag = tmp_path / "now"
    first(f"counters.slice(gpus=0).fail_when.broadcast({str(flag)!r})")
    first.kill()
    kill(pids[2])
    until(lambda: pids[2] not in job.running())
    flag.touch()
    # No driver is notified when the actor fails, so poll with short-lived drivers.
    until(lambda: job.driver().missed())
    second = job.driver()
    second("again()")
    # Reports of the two processes arrive in any order.
    (asked, failed), (killed, ended) = sorted(second("failed()"))
    assert (asked, killed) == ([0], [2])
    assert "it was asked to" in failed
    assert "Killed(sig=9)" in ended
    assert second("faults") == [], "they are told once"
    assert second("counters.slice(gpus=1).add.call_one(1).get()") == 2
    assert second(END) is None


def test_what_was_meant_for_the_old_driver_does_not_reach_the_new_one(job: Job) -> None:
    """A message to a port of the old driver does not reach the new one.

    Actors that called the old driver, or wait for it, continue.
    """
    first = job.driver()
    first("start()")
    assert first("globals().update(zip(('port', 'receiver'), Channel.open())) or 1")
    first("counters.slice(gpus=0).take_port.call_one(port).get()")
    first("globals().update(own=this_proc().spawn('own', Counter)) or 1")
    assert first("counters.slice(gpus=1).ask.call_one(own).get()") == 1
    first.kill()
    second = job.driver()
    second("again()")
    second("globals().update(zip(('port', 'receiver'), Channel.open())) or 1")
    second("counters.slice(gpus=0).use_port.call_one('old').get()")
    second("counters.slice(gpus=0).take_port.call_one(port).get()")
    second("counters.slice(gpus=0).use_port.call_one('new').get()")
    assert second("receiver.recv().get(timeout=60)") == "new"
    second("globals().update(own=this_proc().spawn('own', Counter)) or 1")
    assert second("counters.slice(gpus=1).ask.call_one(own).get()") == 1
    assert second("counters.slice(gpus=2).ask.call_one(own).get()") == 2
    assert second(END) is None


def test_actors_without_a_driver_own_what_they_own(job: Job) -> None:
    first = job.driver()
    first("start()")
    child = first("counters.slice(gpus=0).nest.call_one().get()")
    stays = first("counters.slice(gpus=1).nest.call_one().get()")
    first.kill()
    kill(child)
    second = job.driver()
    second("again()")
    handled = "counters.slice(gpus=0).what_was_handled.call_one().get()"
    until(lambda: second(handled))
    assert second("failed()") == [], "its owner has handled it"
    assert second("counters.slice(gpus=1).ask_child.call_one().get()") == 1
    assert stays in job.running()
    assert second(END) is None
    until(lambda: stays not in job.running())


def test_after_the_grace_period_everything_is_gone(job: Job) -> None:
    first = job.driver()
    assert first("start(grace='500ms')") == [1, 1, 1]
    first("counters.slice(gpus=0).nest.call_one().get()")
    first.kill()
    until(lambda: not job.running())
    assert job.doors() == []
    second = job.driver()
    assert second("again()").startswith("LookupError: there is no job")


def test_a_job_has_one_driver(job: Job, tmp_path: Path) -> None:
    first = job.driver()
    first("start()")
    second = job.driver()
    refused = second("again()")
    assert refused.startswith("RuntimeError: cannot re-attach")
    assert f"it has a driver, process {first.process.pid}" in refused
    assert second("reattach('../x')").startswith("ValueError")
    assert second("reattach('another')").endswith(f"(jobs of this user here: {job.name!r})")
    assert second("start()").startswith("RuntimeError: there is a job")
    assert first("reattach(JOB)").startswith("RuntimeError: reattach() must come before")
    first.kill()
    other = tmp_path / "other"
    other.write_text("the secret of somebody else\n")
    other.chmod(0o600)
    stranger = job.driver(MONARCH_SECRET_FILE=str(other))
    assert "another secret" in stranger("again()")
    third = job.driver()
    third("again()")
    assert third("counters.add.call(1).get().values()") == [2, 2, 2]
    assert third(END) is None


def test_without_a_grace_period_there_is_no_successor(job: Job) -> None:
    first = job.driver()
    first("start(grace='0s')")
    assert first("job_id()") == ""
    first.kill()
    until(lambda: not job.running())
    assert job.doors() == []


def test_it_can_be_asked_for_later_and_taken_back(job: Job) -> None:
    """A grace period set late also keeps meshes that were spawned before.

    A job whose meshes were stopped ends with its driver.
    """
    first = job.driver()
    first("start(grace='0s')")
    first("configure(driver_grace='60s')")
    first("globals().update(more=this_host().spawn_procs(name='more')) or 1")
    assert first("job_id()") == job.name
    first.kill()
    second = job.driver()
    second("again()")
    assert second("sorted(job.procs)") == ["more", "trainers"]
    assert second("counters.add.call(1).get().values()") == [2, 2, 2]
    second("[mesh.stop().get(timeout=60) for mesh in job.procs.values()]")
    second.end()
    until(lambda: not job.running())


def test_names_that_several_meshes_share(job: Job) -> None:
    first = job.driver()
    first("start()")
    first(
        "this_host().spawn_procs(name='trainers').spawn('counters', Counter).add.call_one(9).get()"
    )
    first.kill()
    second = job.driver()
    second("again()")
    assert second("list(job.procs), list(job.actors)") == (
        ["trainers", "trainers-2"],
        ["counters", "counters-2"],
    )
    assert second("job.actors['counters-2'].add.call_one(0).get()") == 9
    assert second("job.actors['counters']._proc_mesh is job.procs['trainers']")
    assert second(END) is None


WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[str]]:
    """Start two worker loops, yield their addresses, and kill them after the test."""
    addresses = [f"ipc://{tmp_path}/{number}" for number in range(2)]
    started = [
        subprocess.Popen([sys.executable, "-c", WORKER, address], start_new_session=True)
        for address in addresses
    ]
    until(lambda: all((tmp_path / str(number)).exists() for number in range(2)))
    yield addresses
    for process in started:
        process.kill()
        process.wait(WAIT)


def test_procs_on_other_hosts(job: Job, workers: list[str]) -> None:
    ask_next = "counters.slice(hosts=0, gpus=0).ask.call_one(counters.slice(hosts=1, gpus=0)).get()"
    first = job.driver()
    assert first(f"start_there(*{workers})") == [1] * 4
    assert first(ask_next) == 2
    first("globals().update(own=this_proc().spawn('own', Counter)) or 1")
    assert first("counters.slice(hosts=1, gpus=1).ask.call_one(own).get()") == 1
    pids = first("counters.pid.call().get().values()")
    first.kill()
    kill(pids[3])
    second = job.driver()
    second("again()")
    assert second("counters.slice(gpus=0).pid.call().get().values()") == [pids[0], pids[2]]
    ((ranks, what),) = second("failed()")
    assert ranks == [3]
    assert "Killed(sig=9)" in what
    # The hosts reach each other and the new driver, and accept further spawns.
    assert second(ask_next) == 3
    second("globals().update(own=this_proc().spawn('own', Counter)) or 1")
    assert second("counters.slice(hosts=1, gpus=0).ask.call_one(own).get()") == 1
    assert second(f"hosts_again(*{workers})")
    assert second("hosts.spawn_procs().spawn('more', Counter).add.call(4).get().values()") == [4, 4]
    assert second(END) is None
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def lose_machine(driver: Driver) -> None:
    """Kill the driver and its child processes at once, as if its machine had failed."""
    pid = driver.process.pid
    os.kill(pid, signal.SIGSTOP)  # otherwise it may report that its agent has ended
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in map(int, children):
        kill(child)
    driver.kill()


@pytest.mark.slow
def test_hosts_outlive_the_machine_of_the_driver(job: Job, workers: list[str]) -> None:
    first = job.driver()
    assert first(f"start_there(*{workers})") == [1] * 4
    first("globals().update(own=this_proc().spawn('own', Counter)) or 1")
    assert first("counters.slice(hosts=1, gpus=1).ask.call_one(own).get()") == 1
    pids = first("counters.pid.call().get().values()")
    first("globals().update(local=this_host().spawn_procs(name='local').spawn('local', Counter))")
    local = first("local.pid.call_one().get()")
    lose_machine(first)
    until(lambda: local not in job.running())
    kill(pids[3])
    second = job.driver()
    assert second("again()").startswith("LookupError")
    # The driver knows one of the hosts, and that host knows the other one.
    assert second(f"again(workers={workers[1:]})") is None
    assert second("counters.slice(gpus=0).pid.call().get().values()") == [pids[0], pids[2]]
    assert [ranks for ranks, _ in second("failed()")] == [[0], [3]]
    assert "Killed(sig=9)" in second("failed()")[1][1]
    ask_next = "counters.slice(hosts=0, gpus=0).ask.call_one(counters.slice(hosts=1, gpus=0)).get()"
    assert second(ask_next) == 2
    second("globals().update(own=this_proc().spawn('own', Counter)) or 1")
    assert second("counters.slice(hosts=1, gpus=0).ask.call_one(own).get()") == 1
    assert second(f"hosts_again(*{workers})")
    assert second("hosts.spawn_procs().spawn('more', Counter).add.call(4).get().values()") == [4, 4]
    assert second("hosts.stop().get(timeout=60)") is None
    assert second("counters.slice(gpus=0).add.call(0).get().values()") == [1, 2]
    # The third driver finds the job on this machine. Its local processes are then killed, so the
    # fourth one needs the addresses of the workers.
    second.kill()
    third = job.driver()
    assert third("again()") is None
    assert third("counters.slice(gpus=0).add.call(1).get().values()") == [2, 3]
    lose_machine(third)
    fourth = job.driver()
    assert fourth(f"again(workers={workers})") is None
    assert fourth("counters.slice(gpus=0).add.call(1).get().values()") == [3, 4]
    fifth = job.driver()
    assert "it has a driver" in fifth(f"again(workers={workers})")
    assert fourth(END) is None
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_hosts_do_not_wait_longer_than_the_grace_period(job: Job, workers: list[str]) -> None:
    first = job.driver(MONARCH_HOST_TIMEOUT="2s")
    assert first(f"start_there(*{workers}, grace='1s')") == [1] * 4
    pids = first("counters.pid.call().get().values()")
    lose_machine(first)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    second = job.driver()
    assert "it has no such job" in second(f"again(workers={workers})")
