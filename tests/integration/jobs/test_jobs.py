"""Jobs on this machine: started, found again, replaced, killed."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, HostMesh, SupervisionError, Supervisor, endpoint
from monarch.job import (
    DEFAULT_JOB_PATH,
    JobState,
    JobTrait,
    LocalJob,
    ProcessJob,
    exec_command,
    hosts_from_config,
    job_load,
    job_loads,
    leftovers,
)
from monarch.job.os_process import OsProcess, descendants

WAIT = 60.0


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def nap(self) -> None:
        """Sleep until after the end of the test."""
        time.sleep(2 * WAIT)

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def ask(self, other: Any) -> list[int]:
        found: list[int] = other.pid.call().get(timeout=WAIT).values()
        return found


def workers(hosts: HostMesh, name: str = "workers") -> Any:
    return hosts.spawn_procs().spawn(name, Worker)


def host_processes(job: Any) -> list[OsProcess]:
    hosts = job._running_as()._hosts
    return [process for members in hosts.values() for _, process in members]


def test_hosts_are_processes_that_end_with_the_job(killed: Any, faults: list[Any]) -> None:
    job = killed(ProcessJob({"a": 2, "b": 1}, env={"OF_THE_JOB": "yes"}))
    assert not job.active
    assert job.apply_id is None
    state = job.state(cached_path=None)
    assert isinstance(state, JobState)
    assert dict(state.a.extent) == {"hosts": 2}
    assert job.active
    a, b = workers(state.a), workers(state.b)
    pids = [*a.pid.call().get(timeout=WAIT).values(), *b.pid.call().get(timeout=WAIT).values()]
    assert a.variable.call("OF_THE_JOB").get(timeout=WAIT).values() == ["yes", "yes"]
    hosts = host_processes(job)
    below = descendants(hosts)
    assert {process.pid for process in below} >= set(pids)
    assert not Path(DEFAULT_JOB_PATH).exists()

    job.kill()

    assert not any(process.alive for process in (*hosts, *below))
    assert not job.active
    assert not faults  # actors that were stopped first are no failure
    job.kill()


def test_actors_of_two_jobs_call_each_other(killed: Any) -> None:
    """Actors call each other although each job has its own secret."""
    one, two = killed(ProcessJob({"a": 1})), killed(ProcessJob({"b": 1}))
    a, b = workers(one.state(None).a), workers(two.state(None).b)
    (pid,) = b.pid.call().get(timeout=WAIT).values()
    assert a.ask.call(b).get(timeout=WAIT).values() == [[pid]]


def test_a_secret_is_passed_by_its_path_only(killed: Any) -> None:
    job = killed(ProcessJob({"a": 1}))
    (worker,) = [workers(job.state(None).a)]
    path = Path(worker.variable.call_one("MONARCH_JOB_SECRET_FILE").get(timeout=WAIT))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    content = path.read_bytes().strip()
    for process in host_processes(job):
        for what in ("cmdline", "environ"):
            assert content not in Path(f"/proc/{process.pid}/{what}").read_bytes()
    assert content not in job.dumps()


SCRIPT = """
import sys
import time
from monarch.job import ProcessJob
job = ProcessJob({"a": int(sys.argv[1])}, env={"X": sys.argv[2]})
state = job.state()
state.a.initialized.get(timeout=60)
print(job.apply_id)
"""


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_next_script_finds_the_job(killed: Any) -> None:
    first = run("1", "x")
    saved = killed(job_load())
    assert saved.active
    assert saved.apply_id == first == run("1", "x")
    assert os.stat(DEFAULT_JOB_PATH).st_mode & 0o777 == 0o600
    (host,) = host_processes(saved)
    second = run("1", "y")  # another description makes another job and kills the former one
    assert second != first
    assert not host.alive
    again = killed(job_load())
    (host,) = host_processes(again)
    host.send(signal.SIGKILL)
    third = run("1", "y")  # a job whose host was killed is not reused
    assert third not in {first, second}
    job = killed(ProcessJob({"a": 1}, env={"X": "y"}))
    job.state()
    assert job.apply_id == third
    assert job_loads(job.dumps()).apply_id == third
    assert workers(job.state().a).pid.call().get(timeout=WAIT)


def test_two_scripts_at_once_start_one_job(killed: Any) -> None:
    command = [sys.executable, "-c", SCRIPT, "1", "x"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ids = {process.communicate(timeout=WAIT)[0] for process in both}
    killed(job_load())
    assert len(ids) == 1


RECEIVED = """
import atexit, sys
from monarch.actor import Actor, endpoint, this_host
from monarch.job import ProcessJob
class Worker(Actor):
    @endpoint
    def host(self): return this_host()
    @endpoint
    def echo(self, value): return value
job = ProcessJob({"hosts": 2})
workers = job.state(cached_path=None).hosts.spawn_procs().spawn("workers", Worker)
host = workers.host.call().get(timeout=60).item(hosts=1)
assert len(host.spawn_procs({"gpus": 2}).spawn("others", Worker).echo.call(1).get(timeout=60)) == 2
if sys.argv[1] == "kill":
    job.kill()
else:
    atexit.register(job.kill)
    sys.exit(0)
"""


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_job_that_its_script_kills_is_no_failure(how: str) -> None:
    command = [sys.executable, "-c", RECEIVED, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search("Unhandled|Traceback|KeyboardInterrupt", done.stderr), done.stderr


def test_ranks_come_back_on_a_host_whose_agent_was_killed(killed: Any, faults: list[Any]) -> None:
    job = killed(ProcessJob({"a": 2}))
    hosts = job.state(cached_path=None).a
    supervisor = Supervisor("one_for_one", max_restarts=3, within=60)
    mesh = supervisor.spawn(hosts.spawn_procs({"gpus": 4}), "mesh", Worker)
    holder = hosts.slice(hosts=0).spawn_procs().spawn("holder", Worker)
    before = holder.ask.call_one(mesh).get(timeout=WAIT)

    naps = mesh.slice(hosts=1).nap.call()
    for process in descendants([host_processes(job)[1]]):  # agent, launcher, procs
        process.send(signal.SIGKILL)
    with pytest.raises(SupervisionError, match="unreachable"):
        naps.get(timeout=WAIT)
    supervisor.healthy.get(timeout=WAIT)

    after = mesh.pid.call().get(timeout=WAIT).values()
    assert before[:4] == after[:4]
    assert not {*before[4:]} & {*after[4:]}
    assert sorted(event.rank for event in supervisor.restarts) == [4, 5, 6, 7]
    # A holder of links to the old procs reaches the new ones.
    assert holder.ask.call_one(mesh).get(timeout=WAIT) == after
    plain = hosts.slice(hosts=1).spawn_procs().spawn("plain", Worker)
    assert plain.ask.call_one(mesh).get(timeout=WAIT) == after
    assert not faults


def test_a_lost_host_is_named(killed: Any) -> None:
    job = killed(ProcessJob({"a": 2}))
    job.apply()
    host = host_processes(job)[1]
    host.send(signal.SIGKILL)
    deadline = time.monotonic() + WAIT
    while host.alive:
        assert time.monotonic() < deadline
    with pytest.raises(RuntimeError, match=rf"lost connection.*'a' \(pid {host.pid}\)"):
        job.state(cached_path=None)


def test_hosts_whose_directory_is_lost_are_left_behind(killed: Any) -> None:
    """No script can connect to them, since the secret is lost. Others are no leftovers."""
    job, other = killed(ProcessJob({"a": 1})), killed(ProcessJob({"a": 1}))
    job.apply()
    other.apply()
    (host,), (living,) = host_processes(job), host_processes(other)
    shutil.rmtree(job._folder)
    assert (host, job._folder) in leftovers.host_processes()
    found = {one.process: one for one in leftovers.leftovers()}
    assert living not in found
    assert leftovers.remove(found[host])
    assert not host.alive


def test_a_host_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ProcessJob({"a": 2}, env={"PYTHONPATH": "", "PYTHONHOME": "/nowhere"})
    with pytest.raises(RuntimeError, match=r"ended before it listened; it said:\n(.|\n)*encodings"):
        job.apply()
    assert not job.active
    assert job._folder == ""


def test_batch_mode_is_refused(killed: Any) -> None:
    job = killed(ProcessJob({"a": 1}))
    with pytest.raises(RuntimeError, match="ProcessJob cannot run batch-mode scripts"):
        job.apply("script.py")


def test_kill_on_an_event_loop(killed: Any, faults: list[Any]) -> None:
    job = killed(ProcessJob({"a": 1}))

    async def main() -> None:
        await workers(job.state(None).a).pid.call()
        job.kill()

    asyncio.run(main())
    assert not faults


def test_a_local_job_and_its_batch_script(directory: Path) -> None:
    (directory / "script.py").write_text(
        "from monarch.job import LocalJob\n"
        "job = LocalJob(('a',))\n"
        "print(job.state(), type(job._status).__name__)\n"
    )
    job = LocalJob(("a",))
    with pytest.raises(ValueError, match="no local batch job"):
        _ = job.process
    job.apply("script.py")
    assert job.process.wait(WAIT) == 0
    (log,) = directory.glob(".monarch/logs/job_*/stdout.log")
    assert log.read_text() == "JobState(hosts={'a': <HostMesh {}>}) BatchJob\n"
    assert isinstance(job_load(), JobTrait)


def test_two_hosts_for_examples(capfd: Any) -> None:
    program = (
        "from monarch.job import hosts_from_config\n"
        "hosts = hosts_from_config('any')\n"
        "hosts.initialized.get(timeout=60)\n"
        "print(hosts)\n"
    )
    assert callable(hosts_from_config)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT, check=False
    )
    # (The script ends because the hosts, which held its pipes, have exited.)
    assert (done.returncode, done.stdout) == (0, "<HostMesh {hosts: 2}>\n"), done.stderr


def test_commands(killed: Any, capfd: Any, directory: Path) -> None:
    hosts = killed(ProcessJob({"a": 2})).state(None).a
    script = directory / "program.py"
    script.write_text("import sys; print('to err', file=sys.stderr); sys.exit(int(sys.argv[1]))")
    assert exec_command(hosts, ["program.py", "3"]).get(timeout=WAIT) == 3
    assert capfd.readouterr().err.count("to err") == 2
    show = ["sh", "-c", "echo $MONARCH_RANK_gpu/$MONARCH_SIZE_gpu $X $PWD"]
    options: dict[str, Any] = {"env": {"X": "x"}, "per_host": {"gpu": 2}}
    assert exec_command(hosts, show, **options, point={"hosts": 1}).get(timeout=WAIT) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"0/2 x {directory}",
        f"1/2 x {directory}",
    ]
    assert exec_command(hosts, ["sh", "-c", "kill -9 $$"], rank=0).get(timeout=WAIT) == 137
    assert exec_command(hosts, ["no-such-program"], rank=1).get(timeout=WAIT) == 127
    assert "no-such-program: No such file" in capfd.readouterr().err
    out = directory / "out"
    assert exec_command(hosts, ["echo", "hi"], output_dir=str(out)).get(timeout=WAIT) == 0
    assert [(out / f"hosts_{n}" / "stdout.txt").read_text() for n in (0, 1)] == ["hi\n", "hi\n"]
    for wrong in ({"rank": 2}, {"point": {"hosts": 2}}, {"point": {"x": 0}}):
        with pytest.raises(ValueError, match=re.escape("hosts")):
            exec_command(hosts, ["true"], **wrong)


def test_pickled_jobs_are_described_by_public_names() -> None:
    data = pickle.dumps(ProcessJob({"a": 1}))
    assert b"monarch.job" in data
    assert b"monarch.job.process" not in data


DRIVER = """
import os, sys
from monarch.actor import *
from monarch.job import ProcessJob

class Counter(Actor):
    def __init__(self): self.count = 0
    @endpoint
    def add(self):
        self.count += 1
        return self.count
    @endpoint
    def pid(self): return os.getpid()

job = ProcessJob({"hosts": 2}, grace="2m")
if sys.argv[1] == "first":
    counters = job.state().hosts.spawn_procs(name="procs").spawn("counters", Counter)
else:
    found = job.reattach()
    counters = found.actors["counters"]
    more = job.state().hosts.spawn_procs().spawn("more", Counter)
    assert more.add.call().get().values() == [1, 1]
    assert found.failures.get() == []
print(counters.add.call().get().values(), counters.pid.call().get().values(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_a_script_left_on_the_hosts_is_found_again(
    killed: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.delenv("MONARCH_SECRET_FILE")  # the job has its own
    (directory / "driver.py").write_text(DRIVER)

    def drive(which: str, status: int = -signal.SIGKILL) -> str:
        output, errors = directory / "output", directory / "errors"
        # (A kept process would hold a pipe open.)
        with output.open("w") as out, errors.open("w") as err:
            command = [sys.executable, "driver.py", which]
            done = subprocess.run(command, stdout=out, stderr=err, timeout=WAIT)
        assert done.returncode == status, errors.read_text()
        return (output if status < 0 else errors).read_text()

    counts, _, pids = drive("first").partition("] ")
    job = killed(job_load())
    assert counts == "[1, 1"
    assert drive("second") == f"[2, 2] {pids}"
    assert drive("third") == f"[3, 3] {pids}"
    job.kill()
    assert os.listdir(directory / "pymonarch") == [], "nobody waits for a driver of what is gone"
    assert "LookupError" in drive("late", status=1)
