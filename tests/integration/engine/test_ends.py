"""Every call ends: after any process dies, no caller keeps waiting for an impossible answer."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, Channel, MeshFailure, SupervisionError, endpoint
from monarch.config import configured
from tests.stopped import stop_process

from .conftest import WAIT, Inside, kill, until

Fresh = Callable[..., Any]
Program = Callable[[str], str]


class Mortal(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def exit(self, code: int) -> None:
        os._exit(code)

    @endpoint
    def read(self, path: str) -> str:
        with open(path) as fifo:
            return fifo.read()

    @endpoint
    def compute(self) -> int:
        return sum(range(20_000_000))


DEATHS = {
    "SIGKILL": lambda mesh, pid: kill(pid),
    "exit 3": lambda mesh, pid: mesh.exit.broadcast(3),
    "exit 0": lambda mesh, pid: mesh.exit.broadcast(0),
}
SAID = {"SIGKILL": "SIGKILL", "exit 3": "non-zero code 3", "exit 0": "exited cleanly"}


@pytest.mark.failures
@pytest.mark.parametrize("death", DEATHS)
def test_a_dead_process_ends_what_is_in_flight_and_what_comes_after(
    fresh: Fresh, tmp_path: Any, death: str
) -> None:
    procs = fresh(2)
    busy = procs.spawn("busy", Mortal)
    mortal = procs.spawn("mortal", Mortal)
    victim = mortal.slice(gpus=0)
    pid = victim.pid.call_one().get(timeout=WAIT)
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    in_flight = [
        busy.slice(gpus=0).read.call_one(fifo),
        busy.read.call(fifo),
        busy.slice(gpus=0).read.choose(fifo),
        *list(busy.slice(gpus=0).read.stream(fifo)),
        busy.slice(gpus=0).pid.call_one(),
    ]
    DEATHS[death](victim, pid)
    for future in in_flight:
        with pytest.raises(SupervisionError, match=SAID[death]):
            future.get(timeout=WAIT)
    for attempt in (
        lambda: victim.pid.call_one(),
        lambda: mortal.pid.call(),
        lambda: victim.pid.choose(),
        lambda: next(iter(victim.pid.stream())),
        lambda: mortal.initialized,
        lambda: procs.initialized,
        lambda: procs.spawn("late", Mortal).pid.call(),
    ):
        with pytest.raises(SupervisionError, match=SAID[death]):
            attempt().get(timeout=WAIT)
    with open(fifo, "w"):  # unblock the rank that still runs
        pass
    assert mortal.slice(gpus=1).pid.call_one().get(timeout=WAIT) != pid
    mortal.stop().get(timeout=WAIT)
    procs.stop().get(timeout=WAIT)


def test_a_process_that_dies_while_its_mesh_stops_is_no_secret(fresh: Fresh, faults: Any) -> None:
    mortal = fresh(2).spawn("mortal", Mortal)
    kill(mortal.pid.call().get(timeout=WAIT).values()[1])
    mortal.stop().get(timeout=WAIT)
    assert "SIGKILL" in faults.get(timeout=WAIT).report()


class Parent(Actor):
    def __init__(self, procs: Any, handles: bool, port: Any) -> None:
        self.child = procs.spawn("child", Mortal)
        self.handles = handles
        self.port = port

    @endpoint
    def lose(self) -> None:
        self.child.exit.broadcast(3)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send(failure.error)
        return self.handles


class AsyncParent(Parent):
    @endpoint
    async def lose(self) -> None:  # type: ignore[override]
        self.child.exit.broadcast(3)

    async def __supervise__(self, failure: MeshFailure) -> bool:  # type: ignore[override]
        self.port.send(failure.error)
        return self.handles


@pytest.mark.parametrize("handles", [True, False], ids=["handled", "unhandled"])
@pytest.mark.parametrize("kind", [Parent, AsyncParent])
def test_a_child_that_fails_while_its_parent_stops(
    fresh: Fresh, faults: Any, kind: type[Parent], handles: bool
) -> None:
    """The stopping parent still judges the failure; one it does not handle goes to its owner."""
    port, told = Channel[str].open()
    with configured(stop_actor_timeout="60s"):  # on a busy machine the judgement takes a while
        procs = fresh()
    parent = procs.spawn("parent", kind, fresh(), handles, port)
    parent.lose.broadcast()
    parent.stop("enough").get(timeout=WAIT)
    assert "non-zero code 3" in told.recv().get(timeout=WAIT)
    if handles:
        assert faults.empty()
    else:
        failure = faults.get(timeout=WAIT)
        assert "Parent parent" in failure.actor
        assert "non-zero code 3" in failure.root.error


def test_a_stopped_process_is_given_up(fresh: Fresh, faults: Any) -> None:
    """A process suspended by SIGSTOP is killed after `unresponsive_timeout`; calls to it fail."""
    with configured(unresponsive_timeout="200ms"):
        procs = fresh(2)
    mortal = procs.spawn("mortal", Mortal)
    pid = mortal.slice(gpus=0).pid.call_one().get(timeout=WAIT)
    stop_process(pid)
    with pytest.raises(SupervisionError, match="became unresponsive and is assumed dead") as error:
        mortal.slice(gpus=0).pid.call_one().get(timeout=WAIT)
    assert "(SIGSTOP) for 0.2 s" in str(error.value)
    assert f"pid {pid}" in str(error.value)
    assert "became unresponsive" in str(faults.get(timeout=WAIT))
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert mortal.slice(gpus=1).pid.call_one().get(timeout=WAIT) != pid


def test_a_stopped_process_that_goes_on_in_time_answers(fresh: Fresh) -> None:
    mortal = fresh(1).spawn("mortal", Mortal)
    pid = mortal.pid.call_one().get(timeout=WAIT)
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        answer = mortal.pid.call_one()
        until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
        os.kill(pid, signal.SIGCONT)
        assert answer.get(timeout=WAIT) == pid


def test_a_process_that_computes_is_not_given_up(fresh: Fresh) -> None:
    with configured(unresponsive_timeout="10ms"):
        mortal = fresh(1).spawn("mortal", Mortal)
    assert mortal.compute.call_one().get(timeout=WAIT) == sum(range(20_000_000))


def test_a_stopped_launcher_goes_on(program: Program) -> None:
    said = program(
        """
        this_host().spawn_procs().spawn("x", Echo).echo.call(1).get(timeout=60)
        launcher, = open(f"/proc/{agent_pid()}/task/{agent_pid()}/children").read().split()
        os.kill(int(launcher), signal.SIGSTOP)
        print(this_host().spawn_procs().spawn("y", Echo).echo.call_one(2).get(timeout=60))
        """
    )
    assert said == "2"


@pytest.mark.failures
def test_a_call_to_a_new_mesh_ends_though_the_agent_is_dead(program: Program) -> None:
    """No process can start without the host agent; each attempt to spawn one fails."""
    said = program(
        """
        procs = this_host().spawn_procs(per_host={"gpus": 2})
        old = procs.spawn("old", Echo)
        old.echo.call(1).get(timeout=60)
        os.kill(agent_pid(), signal.SIGKILL)
        print(outcome(lambda: old.echo.call(1).get(timeout=60)))
        print(outcome(lambda: old.echo.call(1).get(timeout=60)))
        def again():
            new = this_host().spawn_procs().spawn("new", Echo)
            return new.echo.call(1).get(timeout=60)
        print(outcome(again))
        print(outcome(lambda: this_host().spawn_procs().initialized.get(timeout=60)))
        print(outcome(lambda: procs.stop().get(timeout=60)))
        print(outcome(lambda: this_host().spawn_procs().stop().get(timeout=60)))
        """
    ).split()
    assert said.count("TimeoutError") == 0, said


def test_calls_end_after_the_client_was_shut_down(program: Program) -> None:
    said = program(
        """
        procs = this_host().spawn_procs(per_host={"gpus": 2})
        old = procs.spawn("old", Echo)
        old.echo.call(1).get(timeout=60)
        shutdown_context().get(timeout=60)
        print(outcome(lambda: old.echo.call(1).get(timeout=60)))
        def again():
            new = this_host().spawn_procs().spawn("new", Echo)
            return new.echo.call(1).get(timeout=60)
        print(outcome(again))
        """
    ).split()
    assert said.count("TimeoutError") == 0, said


@pytest.mark.failures
def test_a_proc_whose_link_broke_does_not_survive_its_mesh(fresh: Fresh, proc: Any) -> None:
    procs = fresh(1)
    inside = procs.spawn("inside", Inside)
    pid = inside.pid.call_one().get(timeout=WAIT)
    uid = inside.uid.call_one().get(timeout=WAIT)
    watch = os.pidfd_open(pid)
    proc.reactor.call_soon(proc.links[uid].sock.shutdown, 2)
    with pytest.raises(SupervisionError):
        until(lambda: inside.pid.call_one().get(timeout=WAIT) and False)
    try:
        procs.stop().get(timeout=WAIT)
        assert select.select([watch], [], [], 5)[0], "stop() is done, the process is not"
    finally:
        with contextlib.suppress(ProcessLookupError):  # the process has been reaped
            signal.pidfd_send_signal(watch, signal.SIGKILL)
        os.close(watch)


def test_a_long_reason_to_stop(fresh: Fresh) -> None:
    """A long stop reason does not corrupt the messages that follow it on the same link."""
    procs = fresh(1)
    first, second = procs.spawn("first", Mortal), procs.spawn("second", Taker)
    first.pid.call_one().get(timeout=WAIT)
    first.stop("because " * 50_000).get(timeout=WAIT)
    for number in range(3):
        data = bytes([number]) * 200_000
        assert second.take.call_one(data).get(timeout=WAIT) == (len(data), number)


class Taker(Actor):
    @endpoint
    def take(self, data: bytes) -> tuple[int, int]:
        return len(data), data[-1]


@pytest.mark.failures
def test_a_process_that_never_becomes_a_proc(program: Program) -> None:
    """A spawn fails if its command does not connect within the configured time."""
    said = program(
        """
        configure(host_spawn_ready_timeout="1s", mesh_proc_spawn_max_idle="1s")
        command = BootstrapCommand("/bin/sleep", None, ["1000"], {})
        procs = this_host().spawn_procs(bootstrap_command=command)
        print(outcome(lambda: procs.spawn("x", Echo).echo.call(1).get(timeout=60)))
        """
    )
    assert said != "TimeoutError"


def test_a_forked_child_writes_into_nobodys_file(program: Program) -> None:
    """Runtime objects that a forked child inherits do nothing there.

    That matters most for finalisers, which would write to reused file descriptors.
    """
    said = program(
        """
        import numpy
        echo = this_host().spawn_procs().spawn("echo", Echo)
        array = echo.echo.call_one(numpy.ones(200_000)).get(timeout=60)
        read, write = os.pipe()
        if not os.fork():
            files = [os.open(f"file-{n}", os.O_RDWR | os.O_CREAT) for n in range(40)]
            del array
            gc.collect()
            bad = [fd for fd in files if os.fstat(fd).st_size]
            os.write(write, repr(bad).encode())
            os._exit(0)
        os.wait()
        print(os.read(read, 1000).decode())
        """
    )
    assert said == "[]"


def test_a_forked_child_keeps_what_it_sees(program: Program) -> None:
    """A segment that a forked child still maps is not reused when the parent drops its array."""
    said = program(
        """
        import numpy
        echo = this_host().spawn_procs().spawn("echo", Echo)
        array = echo.echo.call_one(numpy.full(200_000, 1.0)).get(timeout=60)
        go, ready = os.pipe()
        read, write = os.pipe()
        if not os.fork():
            os.read(go, 1)
            os.write(write, repr(set(array.tolist())).encode())
            os._exit(0)
        del array
        for n in range(2, 20):
            echo.echo.call_one(numpy.full(200_000, float(n))).get(timeout=60)
        os.write(ready, b"x")
        os.wait()
        print(os.read(read, 1000).decode())
        """
    )
    assert said == "{1.0}"


def test_what_cannot_be_rebuilt_says_so_each_time(fresh: Fresh) -> None:
    mesh = fresh(1).spawn("maker", Maker)
    answers = mesh.make.call().get(timeout=WAIT)
    errors = []
    for _ in range(2):
        with pytest.raises(Exception) as caught:
            answers.values()
        errors.append(repr(caught.value))
    assert errors == ["ValueError('cannot be rebuilt')"] * 2


class Fragile:
    def __init__(self) -> None:
        self.data = bytes(200_000)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be rebuilt")


class Maker(Actor):
    @endpoint
    def make(self) -> Fragile:
        return Fragile()


def test_a_program_ends_in_good_order_where_no_thread_can_be_started_at_its_exit(
    program: Program,
) -> None:
    """All actors are stopped, children first, and clean up.

    Python 3.12 and later refuse to start threads at interpreter shutdown.
    """
    said = program(
        """
        import atexit, threading

        class Parent(Actor):
            @endpoint
            async def begin(self, name):
                self.name = name
                self.child = context().actor_instance.proc.spawn("child", Child)
                await self.child.begin.call_one(name)

            async def __cleanup__(self, error):
                print(self.name, "parent", error, flush=True)

        class Child(Actor):
            @endpoint
            def begin(self, name): self.name = name

            def __cleanup__(self, error):
                print(self.name, "child", error, flush=True)

        there = this_host().spawn_procs().spawn("there", Parent)
        there.begin.call_one("there").get(timeout=60)
        here = this_proc().spawn("here", Parent)
        here.begin.call_one("here").get(timeout=60)

        def refuse(*_, **__):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        @atexit.register
        def last():
            threading._start_new_thread = refuse
            if hasattr(threading, "_start_joinable_thread"):
                threading._start_joinable_thread = refuse
        """
    )
    assert said.splitlines() == [
        "here child None",
        "here parent None",
        "there child None",
        "there parent None",
    ]


@pytest.mark.failures
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_actor_that_gets_no_thread_is_a_failure_that_says_so(
    program: Program, kind: str
) -> None:
    said = program(
        f"""
        class Plain(Actor):
            @endpoint
            {kind} echo(self): return 1

        def refuse(self):
            raise RuntimeError("can't start new thread")

        this_proc().spawn("first", Plain).echo.call_one().get(timeout=60)
        threading.Thread.start, start = refuse, threading.Thread.start
        try:
            this_proc().spawn("second", Plain).echo.call_one().get(timeout=60)
        except SupervisionError as error:
            print(error.failure.cause, error.failure.error)
        threading.Thread.start = start
        print(this_proc().spawn("third", Plain).echo.call_one().get(timeout=60))
        """
    )
    refused, lives = said.splitlines()
    assert refused.startswith("system the process could not start a thread for this actor")
    assert lives == "1"


class Full(Actor):
    """An actor that can use up all file descriptors of its process."""

    def __init__(self) -> None:
        self.files: list[int] = []

    @endpoint
    def fill(self) -> None:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with contextlib.suppress(OSError):
            while True:
                self.files.append(os.dup(0))

    @endpoint
    def free(self) -> None:
        while self.files:
            os.close(self.files.pop())

    @endpoint
    def measure(self, data: Any) -> int:
        return len(data)


def test_a_payload_for_which_there_is_no_descriptor_is_refused_alone(fresh: Fresh) -> None:
    """The actor and the link stay open, and later messages arrive."""
    full = fresh(1).spawn("full", Full)
    full.fill.call_one().get(timeout=WAIT)
    for _ in range(3):
        lost = full.measure.call_one(bytearray(10 << 20))
        small = full.measure.call_one(b"12345")
        with pytest.raises(ActorError, match=r"EMFILE, its limit is 256.*RLIMIT_NOFILE"):
            lost.get(timeout=WAIT)
        assert small.get(timeout=WAIT) == 5
    full.free.call_one().get(timeout=WAIT)
    assert full.measure.call_one(bytearray(10 << 20)).get(timeout=WAIT) == 10 << 20


def test_an_answer_for_which_the_caller_has_no_descriptor(program: Program) -> None:
    said = program(
        """
        import resource

        class Maker(Actor):
            @endpoint
            def make(self, size): return bytearray(size)

        maker = this_host().spawn_procs().spawn("maker", Maker)
        maker.make.call_one(1).get(timeout=60)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        files = []
        try:
            while True:
                files.append(os.dup(0))
        except OSError:
            pass
        try:
            maker.make.call_one(10 << 20).get(timeout=60)
        except OSError as error:
            said = str(error)
        for fd in files:
            os.close(fd)
        print("its limit is 256" in said)
        print(len(maker.make.call_one(10 << 20).get(timeout=60)))
        """
    )
    assert said.split() == ["True", str(10 << 20)]
