"""The texts that users read when an actor or a process fails.

Each text is compared as a whole, except for the parts that differ from run to run. The rarer forms
are in `tests/unit/test_reports.py`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch._engine.base.failure import PLEASE_REPORT
from monarch._engine.runtime.actor import dispatch
from monarch.actor import (
    Actor,
    ActorError,
    BootstrapCommand,
    MeshFailure,
    SupervisionError,
    context,
    endpoint,
    this_proc,
)
from monarch.config import configured

from .conftest import WAIT, kill

Fresh = Callable[..., Any]
Faults = queue.Queue[MeshFailure]

_DIFFERS = [
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", "TIME"),
    (r"host [^ ,]+, pid \d+", "host HOST, pid PID"),
    (r"host [^ ,]+, TIME", "host HOST, TIME"),
    (r"\(pid \d+\)", "(pid PID)"),
    (r"\b([a-z]+)-[A-HJ-NP-Za-km-z1-9]{5,11}(?=\)|,| rank)", r"\1-UID"),
    (r'File "[^"]*/([^/"]+)", line \d+', r'File "\1", line N'),
    (r"\n *[~^]+(?=\n|$)", ""),
    (re.escape(f"{__name__}."), ""),
]


def same(text: str) -> str:
    for pattern, instead in _DIFFERS:
        text = re.sub(pattern, instead, text)
    return text


def shows(text: object, expected: str) -> None:
    assert same(str(text)) == textwrap.dedent(expected).strip("\n")


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self) -> None:
        raise ValueError("bad value")

    @endpoint
    def leave(self) -> None:
        raise SystemExit("leaving")

    @endpoint
    def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def crash(self) -> None:
        faulthandler.enable(all_threads=False)
        print("step 41", flush=True)
        faulthandler._sigsegv()

    @endpoint
    def crash_silently(self) -> None:
        faulthandler._sigsegv()

    @endpoint
    def abort_process(self) -> None:
        os.abort()

    @endpoint
    def lose_child(self) -> int:
        """Fork a child that crashes and return its wait status."""
        pid = os.fork()
        if not pid:
            faulthandler._sigsegv()
        return os.waitpid(pid, 0)[1]

    @endpoint
    def give_up(self, reason: str) -> None:
        context().actor_instance.abort(reason)

    @endpoint
    def end(self, reason: str) -> None:
        context().actor_instance.stop(reason)


class Async(Actor):
    @endpoint
    async def abort_process(self) -> None:
        await asyncio.sleep(0)
        os.abort()


class Unborn(Actor):
    def __init__(self) -> None:
        raise RuntimeError("no luck")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Manager(Actor):
    def __init__(self, procs: Any) -> None:
        self.workers = procs.spawn("workers", Worker)

    @endpoint
    def fail(self) -> None:
        self.workers.fail.call_one().get()

    @endpoint
    def lose(self) -> None:
        self.workers.exit.broadcast(3)


class Boss(Actor):
    def __init__(self, procs: Any, others: Any) -> None:
        self.managers = procs.spawn("managers", Manager, others)

    @endpoint
    def lose_worker(self) -> None:
        self.managers.lose.broadcast()


class Clumsy(Manager):
    def __supervise__(self, failure: MeshFailure) -> bool:
        raise KeyError("clumsy")


def failure_of(call: Any, kind: type[Exception] = SupervisionError) -> Any:
    with pytest.raises(kind) as caught:
        call.get(timeout=WAIT)
    return caught.value


def test_an_endpoint_raises(fresh: Fresh) -> None:
    workers = fresh(2).spawn("workers", Worker)
    pids = workers.pid.call().get(timeout=WAIT).values()
    error = failure_of(workers.slice(gpus=1).fail.call(), ActorError)
    shows(
        error,
        """
        Actor call workers.fail failed.
         ValueError: bad value
         in <root>.<Worker workers{'gpus': 1/2}>
         (user code: rank 1 of workers-UID, host HOST, pid PID, TIME)
         Traceback of where the remote call failed (most recent call last):
          File "test_reports.py", line N, in fail
            raise ValueError("bad value")
        ValueError: bad value
        """,
    )
    assert (error.rank, error.pid, error.host) == (1, pids[1], os.uname().nodename)
    assert error.message == "Actor call workers.fail failed."


def test_an_endpoint_passes_an_error_on(fresh: Fresh) -> None:
    manager = fresh().spawn("manager", Manager, fresh())
    error = failure_of(manager.fail.call_one(), ActorError)
    shows(
        error,
        """
        Actor call manager.fail failed.
         ValueError: bad value
         in <root>.<Manager manager>.<Worker workers>
         (user code: rank 0 of workers-UID, host HOST, pid PID, TIME)
         as a consequence:
           <root>.<Manager manager>, which did not catch it
         Traceback of where the remote call failed (most recent call last):
          File "test_reports.py", line N, in fail
            self.workers.fail.call_one().get()
        monarch.actor.ActorError: Actor call workers.fail failed.
         ValueError: bad value
         in <root>.<Manager manager>.<Worker workers>
         (user code: rank 0 of workers-UID, host HOST, pid PID, TIME)
         Traceback of where the remote call failed (most recent call last):
          File "test_reports.py", line N, in fail
            raise ValueError("bad value")
        ValueError: bad value
        """,
    )
    assert error.root.pid != error.pid


def test_an_actor_dies_of_an_exception(fresh: Fresh, faults: Faults) -> None:
    error = failure_of(fresh(2).spawn("workers", Worker).slice(gpus=1).leave.call())
    text = """
        The actor <root>.<Worker workers{'gpus': 1/2}> and all its descendants have failed:
          actor explicitly aborted due to: SystemExit: leaving
          (user code: rank 1 of workers-UID, host HOST, pid PID, TIME)
          Traceback of where the remote call failed (most recent call last):
            File "test_reports.py", line N, in leave
              raise SystemExit("leaving")
          SystemExit: leaving
        """
    shows(error.message, text)
    shows(faults.get(timeout=WAIT).report(), text)
    assert (error.failure.cause, error.failure.ranks) == ("user code", (1,))


def test_an_actor_aborts_itself(fresh: Fresh, faults: Faults) -> None:
    workers = fresh().spawn("workers", Worker)
    workers.give_up.broadcast("enough\nof this")
    shows(
        faults.get(timeout=WAIT).report(),
        """
        The actor <root>.<Worker workers> and all its descendants have failed:
          actor explicitly aborted due to: enough
          of this
          (user code: rank 0 of workers-UID, host HOST, pid PID, TIME)
        """,
    )


def test_a_constructor_raises(fresh: Fresh, faults: Faults) -> None:
    error = failure_of(fresh().spawn("unborn", Unborn).pid.call_one())
    shows(
        error,
        """
        Endpoint call unborn.pid() failed, The actor <root>.<Unborn unborn> and all its \
descendants have failed:
          actor explicitly aborted due to: RuntimeError: no luck (its constructor raised)
          (user code: rank 0 of unborn-UID, host HOST, pid PID, TIME)
          Traceback of where the remote call failed (most recent call last):
            File "test_reports.py", line N, in __init__
              raise RuntimeError("no luck")
          RuntimeError: no luck
        """,
    )


def test_a_process_exits_and_takes_others_along(fresh: Fresh, faults: Faults) -> None:
    """A caller's error has the cause; the owner's report also lists the consequences.

    These are the other ranks that the exit ended, per mesh.
    """
    procs = fresh(2)
    workers, helpers = procs.spawn("workers", Worker), procs.spawn("helpers", Worker)
    pid = helpers.pid.call().get(timeout=WAIT).values()[1]
    error = failure_of(workers.slice(gpus=1).exit.call_one(3))
    shows(
        error.message,
        """
        The actor <root>.<Worker workers{'gpus': 1/2}> and all its descendants have failed:
          the process this actor was running on exited with non-zero code 3
          (system: rank 1 of workers-UID, host HOST, pid PID, TIME)
          configure(tail_log_lines=20) would show here what it printed last
        """,
    )
    found = {failure.mesh_name: failure for failure in (faults.get(timeout=WAIT) for _ in range(2))}
    first, second = (found[name] for name in sorted(found))
    shows(
        first.report(),
        """
        The actor <root>.<Worker helpers{'gpus': 1/2}> and all its descendants have failed:
          the process this actor was running on exited with non-zero code 3
          (system: rank 1 of helpers-UID, host HOST, pid PID, TIME)
          configure(tail_log_lines=20) would show here what it printed last
          as a consequence:
            workers-UID rank 1
        """,
    )
    assert first.others == second.others == dict.fromkeys(found, (1,))
    assert [first.pid, second.pid, error.failure.pid] == [pid] * 3
    assert first.when == second.when


@pytest.mark.failures
def test_a_process_is_killed(fresh: Fresh) -> None:
    workers = fresh().spawn("workers", Worker)
    kill(workers.pid.call_one().get(timeout=WAIT))
    shows(
        failure_of(workers.pid.call_one()).message,
        """
        The actor <root>.<Worker workers> and all its descendants have failed:
          the process this actor was running on failed: Killed(sig=9), SIGKILL
          (system: rank 0 of workers-UID, host HOST, pid PID, TIME)
          configure(tail_log_lines=20) would show here what it printed last
        """,
    )


@pytest.mark.failures
def test_a_process_that_printed_nothing_is_killed(fresh: Fresh) -> None:
    """The report does not advise `tail_log_lines` when that is already set."""
    with configured(tail_log_lines=1):
        workers = fresh().spawn("workers", Worker)
        kill(workers.pid.call_one().get(timeout=WAIT))
        error = failure_of(workers.pid.call_one())
    assert same(error.message).endswith("pid PID, TIME)")


@pytest.mark.failures
def test_a_process_crashes_with_last_words(fresh: Fresh) -> None:
    with configured(tail_log_lines=100):
        workers = fresh().spawn("workers", Worker)
        error = failure_of(workers.crash.call_one())
    text = same(error.message).split("Extension modules")[0]
    assert text.startswith(
        "The actor <root>.<Worker workers> and all its descendants have failed:\n"
        "  the process this actor was running on failed: Killed(sig=11), SIGSEGV\n"
        "  (system: rank 0 of workers-UID, host HOST, pid PID, TIME)\n"
        "  last output lines:\n"
        "    step 41\n"
        "    Fatal Python error: Segmentation fault\n"
    )
    assert "step 41" in error.failure.tail
    assert any("in crash" in line for line in error.failure.tail)


@pytest.mark.failures
def test_a_process_crashes(fresh: Fresh) -> None:
    """The report has the place of the crash, though the program did not enable `faulthandler`."""
    error = failure_of(fresh().spawn("workers", Worker).crash_silently.call_one())
    shows(
        error.message,
        """
        The actor <root>.<Worker workers> and all its descendants have failed:
          the process this actor was running on failed: Killed(sig=11), SIGSEGV
          (system: rank 0 of workers-UID, host HOST, pid PID, TIME)
          Traceback of where the process crashed (most recent call last):
            File "test_reports.py", line N, in crash_silently
          Segmentation fault
        """,
    )
    assert error.failure.traceback.endswith("in crash_silently\nSegmentation fault")


@pytest.mark.failures
@pytest.mark.parametrize("kind", [Worker, Async])
def test_a_process_aborts(fresh: Fresh, kind: type[Any]) -> None:
    error = failure_of(fresh().spawn("actor", kind).abort_process.call_one())
    shows(
        error.failure.traceback,
        """
        Traceback of where the process crashed (most recent call last):
          File "test_reports.py", line N, in abort_process
        Aborted
        """,
    )


@pytest.mark.failures
def test_an_executed_process_crashes(fresh: Fresh) -> None:
    command = BootstrapCommand(
        sys.executable, None, ["-m", "monarch._src.actor.bootstrap_main"], {}
    )
    workers = fresh(1, bootstrap_command=command).spawn("workers", Worker)
    trace = failure_of(workers.abort_process.call_one()).failure.traceback
    assert trace.endswith("in abort_process\nAborted")


@pytest.mark.failures
def test_a_signal_from_outside_shows_what_the_program_was_doing(fresh: Fresh) -> None:
    workers = fresh().spawn("workers", Worker)
    pid = workers.pid.call_one().get(timeout=WAIT)
    os.kill(pid, signal.SIGBUS)
    trace = failure_of(workers.pid.call_one()).failure.traceback
    assert trace.startswith("Traceback of where the process crashed")
    assert trace.endswith("Bus error")


@pytest.mark.failures
def test_the_crash_of_a_forked_child_is_not_the_actors(fresh: Fresh) -> None:
    workers = fresh().spawn("workers", Worker)
    status = workers.lose_child.call_one().get(timeout=WAIT)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    error = failure_of(workers.exit.call_one(3))
    assert error.failure.traceback == ""


def test_a_process_that_cannot_be_started(fresh: Fresh) -> None:
    with pytest.raises(ValueError, match="error creating proc") as caught:
        fresh(1, proc_bind=[{"cpunodebind": "99"}]).initialized.get(timeout=WAIT)
    assert not isinstance(caught.value, SupervisionError)


def test_two_owners_did_not_handle_a_failure(fresh: Fresh, faults: Faults) -> None:
    boss = fresh().spawn("boss", Boss, fresh(), fresh())
    boss.lose_worker.broadcast()
    failure = faults.get(timeout=WAIT)
    shows(
        failure.report(),
        """
        The actor <root>.<Boss boss>.<Manager managers>.<Worker workers> and all its descendants \
have failed:
          the process this actor was running on exited with non-zero code 3
          (system: rank 0 of workers-UID, host HOST, pid PID, TIME)
          configure(tail_log_lines=20) would show here what it printed last
          as a consequence:
            <root>.<Boss boss>.<Manager managers>, which did not handle it
            <root>.<Boss boss>, which did not handle it
        """,
    )
    assert failure.mesh_name.startswith("boss-")
    assert failure.root.mesh_name.startswith("workers-")


def test_a_supervisor_raises(fresh: Fresh, faults: Faults) -> None:
    clumsy = fresh().spawn("clumsy", Clumsy, fresh())
    clumsy.lose.broadcast()
    failure = faults.get(timeout=WAIT)
    shows(
        failure.report(),
        """
        The actor <root>.<Clumsy clumsy> and all its descendants have failed:
          actor explicitly aborted due to: KeyError: 'clumsy'
          (user code: rank 0 of clumsy-UID, host HOST, pid PID, TIME)
          Traceback of where the remote call failed (most recent call last):
            File "test_reports.py", line N, in __supervise__
              raise KeyError("clumsy")
          KeyError: 'clumsy'
        This error occurred while handling another failure:
          The actor <root>.<Clumsy clumsy>.<Worker workers> and all its descendants have failed:
            the process this actor was running on exited with non-zero code 3
            (system: rank 0 of workers-UID, host HOST, pid PID, TIME)
            configure(tail_log_lines=20) would show here what it printed last
        """,
    )
    assert failure.root.actor == failure.actor
    assert failure.child is not None
    assert failure.child.cause == "system"


STOPS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "the mesh": (lambda procs, mesh: mesh.stop("the night falls"), "the night falls"),
    "the actor itself": (lambda procs, mesh: mesh.end.call_one("had enough"), "had enough"),
    "the mesh, without a reason": (lambda procs, mesh: mesh.stop(), "stopped by client"),
    "the processes": (lambda procs, mesh: procs.stop("no money"), "no money"),
    "the process exits": (lambda procs, mesh: mesh.exit.call_one(0), "process exited cleanly"),
}


@pytest.mark.parametrize("who", STOPS)
def test_later_callers_see_the_reason_of_a_stop(fresh: Fresh, faults: Faults, who: str) -> None:
    stop, reason = STOPS[who]
    procs = fresh()
    workers = procs.spawn("workers", Worker)
    workers.pid.call_one().get(timeout=WAIT)
    stop(procs, workers).exception(timeout=WAIT)
    error = failure_of(workers.pid.call_one())
    shows(
        error,
        f"""
        Endpoint call workers.pid() failed, Supervision event: actor <root>.<Worker workers> \
has status:
          stopped: {reason}
          (rank 0 of workers-UID, host HOST, pid PID, TIME)
        """,
    )
    assert error.failure.kind == "stopped"
    assert faults.empty()


@pytest.mark.internal_errors
def test_a_bug_of_ours(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> None:
    """An internal error ends the actor, and the report asks the user to file a bug."""
    worker = this_proc().spawn("worker", Worker)
    worker.pid.call_one().get(timeout=WAIT)

    code = compile("def broken(*_args): raise KeyError(3)", dispatch.__file__, "exec")
    exec(code, scope := {})  # its code has the file name of the engine's module
    monkeypatch.setattr(dispatch, "prepare", scope["broken"])
    monkeypatch.setattr(dispatch, "failed", scope["broken"])
    error = failure_of(worker.pid.call_one())
    assert error.failure.cause == "internal"
    assert "\n  internal error: KeyError: 3\n  (internal: rank 0 of worker-" in str(error)
    assert str(error).endswith(textwrap.indent(PLEASE_REPORT, "  "))
    assert faults.get(timeout=WAIT).cause == "internal"


@pytest.mark.failures
def test_the_host_agent_dies(program: Callable[[str], str]) -> None:
    said = program(
        """
        import queue
        faults = queue.Queue()
        monarch.actor.unhandled_fault_hook = faults.put
        echo = this_host().spawn_procs(per_host={"gpus": 2}).spawn("echo", Echo)
        echo.pid.call().get(timeout=60)
        os.kill(agent_pid(), signal.SIGKILL)
        found = [faults.get(timeout=60) for _ in range(2)]
        print(min(found, key=lambda failure: failure.ranks).report())
        print(echo.slice(gpus=1).pid.call_one().exception(timeout=60))
        """
    )
    shows(
        said,
        """
        The actor <root>.<__main__.Echo echo{'gpus': 0/2}> and all its descendants have failed:
          the host agent of this machine (pid PID) ended unexpectedly
          (infrastructure: rank 0 of echo-UID, host HOST, TIME)
          as a consequence:
            echo-UID rank 1
        Endpoint call echo.pid() failed, The actor <root>.<__main__.Echo echo{'gpus': 1/2}> and \
all its descendants have failed:
          the host agent of this machine (pid PID) ended unexpectedly
          (infrastructure: rank 1 of echo-UID, host HOST, TIME)
        """,
    )


UNHANDLED = """
import os, time
from monarch.actor import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def ready(self): pass

    @endpoint
    def fail(self): raise ValueError("bad value")

    @endpoint
    def exit(self): os._exit(3)

class Manager(Actor):
    def __init__(self, procs): self.workers = procs.spawn("workers", Worker)

    @endpoint
    def ready(self): self.workers.ready.call().get()

    @endpoint
    def fail(self): self.workers.fail.broadcast()

def spawn(name, kind, count, *args):
    mesh = this_host().spawn_procs({"gpus": count}).spawn(name, kind, *args)
    mesh.ready.call().get()
    return mesh

"""


def run(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(UNHANDLED + program)
    return subprocess.run(
        [sys.executable, str(path)], check=False, capture_output=True, text=True, timeout=2 * WAIT
    )


@pytest.mark.failures
def test_faults_that_nobody_handles_are_told_once_per_cause(tmp_path: Path) -> None:
    """If four ranks fail with one cause, one full report is printed; the others get a line each."""
    done = run(tmp_path, 'spawn("w", Worker, 4).fail.broadcast()\ntime.sleep(100)')
    assert done.returncode == -signal.SIGINT
    lines = same(done.stderr).splitlines()
    assert lines[0].startswith("Unhandled monarch error on the root actor, hostname=")
    full = "\n".join(lines[1:8])
    rank = re.findall(r"gpus': (\d)/4", full)[0]
    shows(
        full,
        f"""
        The actor <root>.<__main__.Worker w{{'gpus': {rank}/4}}> and all its descendants have \
failed:
          actor explicitly aborted due to: ValueError: bad value
          (user code: rank {rank} of w-UID, host HOST, pid PID, TIME)
          Traceback of where the remote call failed (most recent call last):
            File "program.py", line N, in fail
              def fail(self): raise ValueError("bad value")
          ValueError: bad value
        """,
    )
    folded = [line for line in lines if line.startswith("The same happened to ")]
    for line in folded:
        also = re.findall(r"gpus': (\d)/4", line)[0]
        assert line == (
            f"The same happened to <root>.<__main__.Worker w{{'gpus': {also}/4}}> "
            f"(user code: rank {also} of w-UID, host HOST, pid PID, TIME)"
        )
    assert "KeyboardInterrupt" in done.stderr
    assert done.stderr.count("Traceback of where") == 1


@pytest.mark.failures
def test_the_shell_learns_of_the_interrupt(tmp_path: Path) -> None:
    """The exit status says so even if a module is imported at the exit.

    Before Python 3.14 each named tuple of a module makes the interpreter forget the interrupt.
    """
    done = run(
        tmp_path,
        """
import atexit, collections
worker = spawn("w", Worker, 1)
atexit.register(collections.namedtuple, "Late", "field")
worker.fail.broadcast()
time.sleep(100)
""",
    )
    assert done.returncode == -signal.SIGINT, done.stderr


LAST_ACTS = {
    "an actor fails": 'spawn("w", Worker, 2).fail.broadcast()',
    "a process exits": 'spawn("w", Worker, 2).exit.broadcast()',
    "a child fails": """
procs = this_host().spawn_procs()
spawn("m", Manager, 1, procs).fail.broadcast()
""",
}


@pytest.mark.failures
@pytest.mark.parametrize("act", LAST_ACTS)
def test_a_fault_of_the_last_moment_is_not_lost(tmp_path: Path, act: str) -> None:
    done = run(tmp_path, LAST_ACTS[act])
    assert done.returncode not in (0, None), done.stderr
    assert done.stderr.count("Unhandled monarch error") == 1


CATCHES = {
    "the main thread": "catch()",
    "another thread": "thread = threading.Thread(target=catch); thread.start(); thread.join()",
    "a task": "asyncio.run(catch_task())",
}


@pytest.mark.failures
@pytest.mark.parametrize("end", ["exit", "leave"])
@pytest.mark.parametrize("waits", CATCHES)
def test_a_script_that_catches_what_its_call_raises_goes_on(
    tmp_path: Path, waits: str, end: str
) -> None:
    """The script gets the error of its call, and is not interrupted by the unhandled failure.

    That holds whichever of the two arrives first.
    """
    done = run(
        tmp_path,
        f"""
import asyncio, threading
from monarch.actor import SupervisionError

class Mortal(Actor):
    @endpoint
    def ready(self): pass

    @endpoint
    def exit(self): os._exit(7)

    @endpoint
    def leave(self): raise SystemExit

def catch():
    try:
        mortal.{end}.call_one().get()
    except SupervisionError:
        print("caught", flush=True)

async def catch_task():
    try:
        await mortal.{end}.call_one()
    except SupervisionError:
        print("caught", flush=True)

for _ in range(5):
    mortal = spawn("mortal", Mortal, 1)
    {CATCHES[waits]}
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, 5 * "caught\n", "")


@pytest.mark.failures
def test_a_script_whose_failure_is_there_before_it_waits_goes_on(tmp_path: Path) -> None:
    """The thread is still in its call when the failure reaches the root."""
    done = run(
        tmp_path,
        """
import threading
from monarch.actor import SupervisionError
from monarch._engine.mesh.call.endpoint import ActorEndpoint

class Mortal(Worker):
    @endpoint
    def leave(self): raise SystemExit

one = ActorEndpoint._one

def slow(*args):
    future = one(*args)
    faults = []
    while not faults:
        time.sleep(0.001)
        started = [thread for thread in threading.enumerate() if thread.is_alive()]
        faults = [thread for thread in started if thread.name == "monarch-fault"]
    faults[0].join(0.3)  # it ends at once if it does not look at this thread
    return future

mortal = spawn("mortal", Mortal, 1)
ActorEndpoint._one = slow
try:
    mortal.leave.call_one().get()
except SupervisionError:
    print("caught", flush=True)
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught\n", ""), done.stderr


@pytest.mark.failures
def test_a_script_that_catches_the_loss_of_processes_goes_on_whatever_else_was_in_them(
    tmp_path: Path,
) -> None:
    """Two processes, each with an actor of two meshes: one actor is raised, two are shown."""
    done = run(
        tmp_path,
        """
import sys, threading
from monarch.actor import SupervisionError

class Lines:
    seen = threading.Semaphore(0)
    def write(self, text):
        sys.__stderr__.write(text)
        for _ in range(text.count("The same happened to ")):
            self.seen.release()
    def flush(self): pass

sys.stderr = Lines()
procs = this_host().spawn_procs({"gpus": 2})
other, mesh = procs.spawn("other", Worker), procs.spawn("mesh", Worker)
other.ready.call().get()
try:
    mesh.exit.call().get()
except SupervisionError:
    print("caught", flush=True)
for _ in range(2):
    assert Lines.seen.acquire(timeout=60)
""",
    )
    assert (done.returncode, done.stdout) == (0, "caught\n"), done.stderr


@pytest.mark.failures
def test_a_failure_like_one_that_was_caught_says_why_the_script_ends(tmp_path: Path) -> None:
    """The report is short, since the cause was raised before; the remedy is in it nevertheless."""
    done = run(
        tmp_path,
        """
from monarch.actor import SupervisionError

try:
    spawn("first", Worker, 1).exit.call().get()
except SupervisionError:
    print("caught", flush=True)
spawn("second", Worker, 1).exit.broadcast()
time.sleep(100)
""",
    )
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "caught\n")
    first, second = done.stderr.splitlines()[:2]
    assert first.startswith("The same happened to <root>.<__main__.Worker second{'gpus': 0/1}> (")
    assert "To go on, spawn the mesh with a Supervisor" in second


def test_after_a_shutdown(program: Callable[[str], str]) -> None:
    said = program(
        """
        echo = this_host().spawn_procs().spawn("echo", Echo)
        echo.pid.call_one().get(timeout=60)
        shutdown_context().get(timeout=60)
        print(echo.pid.call_one().exception(timeout=60))
        late = this_host().spawn_procs().spawn("late", Echo)
        print(late.pid.call_one().exception(timeout=60))
        """
    )
    shows(
        said,
        """
        Endpoint call echo.pid() failed, Supervision event: actor <root>.<__main__.Echo echo> has \
status:
          stopped: stop host: the client was shut down
          (rank 0 of echo-UID, host HOST, pid PID, TIME)
        Endpoint call late.pid() failed, Supervision event: actor <root>.<__main__.Echo late> has \
status:
          stopped: stop host: the client was shut down
          (rank 0 of late-UID)
        """,
    )
