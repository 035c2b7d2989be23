"""Children that a script or an actor starts itself are processes of the same program."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch._children import door
from monarch._engine.runtime.agent.client import client_proc
from monarch.actor import Actor, ActorError, SupervisionError, endpoint, this_host, this_proc
from monarch.rdma import RDMABuffer
from monarch.recipes import Queue

from .conftest import WAIT, kill, until

METHODS = ("fork", "spawn", "forkserver")


class Other(Actor):
    def __init__(self) -> None:
        self._noted: list[Any] = []

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def note(self, value: Any) -> None:
        self._noted.append(value)

    @endpoint
    def noted(self) -> list[Any]:
        return self._noted

    @endpoint
    def double(self, value: Any) -> Any:
        return value * 2

    @endpoint
    def ask(self, other: Any) -> Any:
        return other.pid.call_one().get(timeout=WAIT)

    @endpoint
    def memory(self) -> RDMABuffer:
        self._memory = memoryview(bytearray(b"an actor"))
        return RDMABuffer(self._memory)

    @endpoint
    def read(self, buffer: RDMABuffer) -> bytes:
        got = bytearray(8)
        buffer.read_into(memoryview(got)).get(timeout=WAIT)
        return bytes(got)

    @endpoint
    def exit(self) -> None:
        os._exit(7)

    @endpoint
    def sleep(self) -> None:
        time.sleep(WAIT)

    @endpoint
    def wait_for(self, path: str) -> None:
        until(lambda: os.path.exists(path))


def call_one(mesh: Any) -> Any:
    return mesh.slice(gpus=0).pid.call_one().get(timeout=WAIT)


def call(mesh: Any) -> Any:
    return list(mesh.pid.call().get(timeout=WAIT).values())


def choose(mesh: Any) -> Any:
    return mesh.pid.choose().get(timeout=WAIT)


def stream(mesh: Any) -> Any:
    return [future.get(timeout=WAIT) for future in mesh.pid.stream()]


def awaited(mesh: Any) -> Any:
    async def result() -> Any:
        return list((await mesh.pid.call()).values())

    return asyncio.run(result())


def in_order(mesh: Any) -> Any:
    """Messages of a child arrive in the order in which it sent them."""
    for number in range(200):
        mesh.note.broadcast((os.getpid(), number))
    return [
        [number for pid, number in noted if pid == os.getpid()]
        for noted in mesh.noted.call().get(timeout=WAIT).values()
    ]


def arrays(mesh: Any) -> Any:
    """Arrays in shared memory, to the actors and back."""
    found = mesh.double.call(np.arange(1 << 18)).get(timeout=WAIT)
    return [int(array.sum()) for array in found.values()]


def own_actor(mesh: Any) -> Any:
    """An actor in the child is called by the actors of the program."""
    mine = this_proc().spawn("mine", Other)
    return mesh.slice(gpus=1).ask.call_one(mine).get(timeout=WAIT) == os.getpid()


def own_procs(mesh: Any) -> Any:
    """A child spawns processes, which call those of the program."""
    theirs = this_host().spawn_procs().spawn("theirs", Other)
    return theirs.ask.call_one(mesh.slice(gpus=0)).get(timeout=WAIT)


def memory(mesh: Any) -> Any:
    """The child reads and writes an actor's memory, and an actor the child's."""
    rank = mesh.slice(gpus=0)
    theirs = rank.memory.call_one().get(timeout=WAIT)
    got = bytearray(8)
    theirs.read_into(memoryview(got)).get(timeout=WAIT)
    mine = RDMABuffer(memoryview(bytearray(b"a child!")))
    return bytes(got), rank.read.call_one(mine).get(timeout=WAIT)


USES = (call_one, call, choose, stream, awaited, in_order, arrays, own_actor, own_procs, memory)
Found = list[tuple[str, str, Any]]


def in_child(uses: Sequence[Callable[[Any], Any]], mesh: Any, answers: Any) -> None:
    found: Found = []
    for use in uses:
        try:
            found.append((use.__name__, "result", use(mesh)))
        except Exception as error:
            found.append((use.__name__, type(error).__name__, str(error)))
    answers.put(found)


@contextlib.contextmanager
def started(
    method: str, function: Callable[..., Any], *args: Any, daemon: bool = True
) -> Iterator[Any]:
    """Start a child; end it afterwards."""
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=function, args=args, daemon=daemon)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(WAIT)


def child(
    method: str, uses: Sequence[Callable[[Any], Any]], mesh: Any, *, daemon: bool = True
) -> Found:
    """Return what a child of this process gets."""
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    with started(method, in_child, uses, mesh, answers, daemon=daemon) as process:
        process.join(WAIT)
        assert not process.is_alive(), "it hangs"
    found: Found = answers.get()
    return found


class Parent(Actor):
    def __init__(self, warm: Any = None) -> None:
        if warm is not None:  # the handles have links and caches then
            call(warm)

    @endpoint
    def child(self, method: str, mesh: Any) -> Found:
        return child(method, USES, mesh)

    @endpoint
    def leave(self, method: str, mesh: Any, path: str) -> None:
        """Start a child that waits in a call, and stays."""
        context: Any = multiprocessing.get_context(method)
        context.Process(target=wait_in_a_call, args=(mesh, path)).start()


def wait_in_a_call(mesh: Any, path: str) -> None:
    mesh.pid.call().get(timeout=WAIT)
    future = mesh.slice(gpus=0).sleep.call_one()
    Path(path).write_text(str(os.getpid()))
    future.get()


@pytest.fixture(scope="module", autouse=True)
def helpers() -> Iterator[None]:
    """End the processes that multiprocessing has started for this one."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.usefixtures("reactor_is_well")
@pytest.mark.parametrize("warm", [False, True], ids=["first-use", "warm"])
@pytest.mark.parametrize("method", METHODS)
def test_each_use_of_a_handle(fresh: Any, method: str, warm: bool) -> None:
    """By children of an actor and of the script, whether their parent has used it or not."""
    procs = fresh(2)
    other = procs.spawn("other", Other)
    if warm:
        pids = call(other)
    parent = procs.slice(gpus=0).spawn("parent", Parent, other if warm else None)
    in_actor = parent.child.call_one(method, other).get(timeout=WAIT)
    in_script = child(method, USES, other)
    pids = call(other)
    for found in (in_actor, in_script):
        got = {name: value for name, kind, value in found}
        assert {kind for _, kind, _ in found} == {"result"}, found
        assert got["choose"] in pids
        assert got["call_one"] == got["own_procs"] == pids[0]
        assert got["call"] == got["awaited"] == pids
        assert sorted(got["stream"]) == sorted(pids)
        assert got["in_order"] == [[*range(200)]] * 2
        assert got["arrays"] == [(1 << 18) * ((1 << 18) - 1)] * 2
        assert got["own_actor"] is True
        assert got["memory"] == (b"an actor", b"a child!")


def test_actors_of_the_parent_itself(fresh: Any) -> None:
    """The parent calls these without a socket; its forked child is another process."""
    mine = this_proc().spawn("mine", Other)
    try:
        assert mine.pid.call_one().get(timeout=WAIT) == os.getpid()
        fresh(1)
        for method in METHODS:
            [(_, kind, value)] = child(method, [own_pid], mine)
            assert (kind, value) == ("result", os.getpid()), method
    finally:
        mine.stop().get(timeout=WAIT)


def own_pid(mesh: Any) -> Any:
    return mesh.pid.call_one().get(timeout=WAIT)


def fill(queue: Any) -> None:
    for number in range(100):
        queue.put((os.getpid(), number))


def test_children_share_a_queue(fresh: Any) -> None:
    """It has fewer places than they put items, so they wait for each other."""
    queue: Any = Queue(maxsize=10)
    try:
        with contextlib.ExitStack() as stack:
            pids = [stack.enter_context(started(m, fill, queue)).pid for m in METHODS]
            items = [queue.get(timeout=WAIT) for _ in range(300)]
        for pid in pids:
            assert [number for of, number in items if of == pid] == [*range(100)]
    finally:
        queue.shutdown()


def test_a_pool_of_processes(fresh: Any) -> None:
    other = fresh(2).spawn("other", Other)
    pids = call(other)
    for method in METHODS:
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(4, mp_context=context) as pool:
            assert list(pool.map(call, [other] * 8)) == [pids] * 8


def test_a_child_of_a_child(fresh: Any) -> None:
    other = fresh(2).spawn("other", Other)
    [(_, kind, value)] = child("fork", [grandchildren], other, daemon=False)
    assert (kind, value) == ("result", [call(other)] * 4)


def grandchildren(mesh: Any) -> Any:
    """Before this child has used the handle, and afterwards."""
    methods = ("fork", "spawn")  # Python's forkserver is of the process that has started it
    found = [child(method, [call], mesh)[0][2] for method in methods]
    call(mesh)
    return found + [child(method, [call], mesh)[0][2] for method in methods]


@pytest.mark.failures
def test_a_child_is_told_of_failures(fresh: Any) -> None:
    """A wait of the child ends when the process dies that it waits for."""
    for method in METHODS:
        other = fresh(2).spawn("other", Other)
        [(_, kind, text)] = child(method, [lose], other)
        assert kind == "SupervisionError", text
        assert "exited with non-zero code 7" in text


def lose(mesh: Any) -> Any:
    call(mesh)
    return mesh.slice(gpus=1).exit.call_one().get(timeout=WAIT)


def test_a_future_of_the_parent_is_refused_in_a_forked_child(fresh: Any, tmp_path: Path) -> None:
    """Its answer goes to the parent, which still gets it."""
    other, gate = fresh(2).spawn("other", Other), tmp_path / "open"
    futures = [
        other.wait_for.call(str(gate)),
        other.slice(gpus=0).noted.call_one(),
        other.noted.stream(),
    ]
    [(_, kind, value)] = child("fork", [lambda _: observe(futures)], other)
    assert kind == "result", value
    assert [name for name, _ in value] == ["RuntimeError"] * 4
    assert "the answer goes to its parent process" in value[1][1]
    gate.touch()
    assert list(futures[0].get(timeout=WAIT).values()) == [None, None]


def observe(futures: list[Any]) -> list[tuple[str, str]]:
    """Return the error of each wait: with a limit, without one, by a stream, and awaited."""
    waits: list[Callable[[], Any]] = [
        lambda: futures[0].get(timeout=WAIT),
        lambda: futures[1].get(),
        lambda: next(futures[2]).get(),
        lambda: asyncio.run(wait_for(futures[1])),
    ]
    found: list[tuple[str, str]] = []
    for wait in waits:
        try:
            found.append(("result", str(wait())))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


async def wait_for(future: Any) -> Any:
    return await future


def test_errors_of_endpoints_reach_a_child(fresh: Any) -> None:
    other = fresh(2).spawn("other", Other)
    [(_, kind, text)] = child("spawn", [fail], other)
    assert kind == ActorError.__name__
    assert "TypeError" in text


def fail(mesh: Any) -> Any:
    return mesh.double.call(None).get(timeout=WAIT)


@pytest.mark.failures
@pytest.mark.parametrize("method", METHODS)
def test_a_child_ends_with_the_process_of_its_actor(
    fresh: Any, tmp_path: Path, method: str
) -> None:
    """Also while it waits in a call, and although multiprocessing's children outlive a kill."""
    other = fresh(2).spawn("other", Other)
    procs = fresh(1)
    parent, note = procs.spawn("parent", Parent), tmp_path / "pid"
    parent.leave.call_one(method, other, str(note)).get(timeout=WAIT)
    pid = int(until(lambda: note.exists() and note.read_text()))
    at = procs.spawn("at", Other).pid.call_one().get(timeout=WAIT)
    kill(at)
    until(lambda: not is_running(pid))
    other.stop(timeout=0).get(timeout=WAIT)  # its endpoint still sleeps


def test_what_a_child_spawned_ends_with_it(fresh: Any, tmp_path: Path) -> None:
    fresh(1).spawn("other", Other).pid.call_one().get(timeout=WAIT)
    note = tmp_path / "pid"
    with started("spawn", spawn_and_stay, str(note)) as process:
        pid = int(until(lambda: note.exists() and note.read_text()))
        assert is_running(pid)
        kill(process.pid)
        until(lambda: not is_running(pid))


def spawn_and_stay(path: str) -> None:
    theirs = this_host().spawn_procs().spawn("theirs", Other)
    Path(path).write_text(str(theirs.pid.call_one().get(timeout=WAIT)))
    signal.pause()


@pytest.mark.failures
def test_others_are_told_that_a_child_has_ended(fresh: Any) -> None:
    """A call of an actor in the child ends."""
    other = fresh(2).spawn("other", Other)
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with started("spawn", offer, theirs, other) as process:
        assert ours.poll(WAIT)
        held = other.slice(gpus=0).noted.call_one().get(timeout=WAIT)[0]
        waiting = held.sleep.call_one()
        kill(process.pid)
        with pytest.raises(SupervisionError, match="it was a child of another process"):
            waiting.get(timeout=WAIT)


def offer(pipe: Any, mesh: Any) -> None:
    mesh.note.call(this_proc().spawn("mine", Other)).get(timeout=WAIT)
    pipe.send(None)
    signal.pause()


def test_the_door_is_for_this_user_only(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's connection is closed; nothing is passed to the agent."""
    fresh(1).spawn("other", Other).pid.call_one().get(timeout=WAIT)
    door.open_to_children()
    invited = door.invitation()
    assert invited is not None
    monkeypatch.setattr(door, "peer_of", lambda sock: (os.getpid(), os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(door.end_of(12345))
        sock.settimeout(WAIT)
        sock.connect(invited.door)
        assert sock.recv(1) == b""


def test_a_connection_without_a_uid_is_closed(fresh: Any) -> None:
    fresh(1).spawn("other", Other).pid.call_one().get(timeout=WAIT)
    door.open_to_children()
    invited = door.invitation()
    assert invited is not None
    for name in ("", f"\0monarch-child/{client_proc().uid:x}"):  # none, and that of a member
        with socket.socket(socket.AF_UNIX) as sock:
            if name:
                sock.bind(name)
            sock.settimeout(WAIT)
            sock.connect(invited.door)
            assert sock.recv(1) == b""


def test_the_exit_of_a_script_waits_for_its_children(program: Callable[[str], str]) -> None:
    """As multiprocessing does; only then does the runtime end."""
    out = program(
        """
        import multiprocessing, time

        def late(mesh):
            mesh.pid.call_one().get(timeout=60)
            open("begun", "w").close()
            while os.path.exists("begun"):
                time.sleep(0.01)
            print(mesh.echo.call_one("late").get(timeout=60), flush=True)

        def let_on():
            while not os.path.exists("begun"):
                time.sleep(0.01)
            os.remove("begun")

        import atexit
        echo = this_host().spawn_procs().spawn("echo", Echo)
        multiprocessing.get_context("fork").Process(target=late, args=(echo,)).start()
        atexit.register(let_on)
        """
    )
    assert out == "late"


@pytest.mark.failures
def test_a_child_after_the_shutdown(program: Callable[[str], str]) -> None:
    """The child goes on; its calls say what has happened."""
    out = program(
        """
        import multiprocessing

        def work(mesh, pipe):
            mesh.pid.call_one().get(timeout=60)
            pipe.send(None)
            pipe.recv()
            for use in (mesh.pid, this_host().spawn_procs().spawn("own", Echo).pid):
                try:
                    use.call_one().get(timeout=60)
                except SupervisionError as error:
                    pipe.send(str(error))

        fork = multiprocessing.get_context("fork")
        echo = this_host().spawn_procs().spawn("echo", Echo)
        ours, theirs = fork.Pipe()
        fork.Process(target=work, args=(echo, theirs), daemon=True).start()
        ours.recv()
        shutdown_context().get(timeout=60)
        ours.send(None)
        print("process exited cleanly" in ours.recv())
        print(f"a child of process {os.getpid()}, has ended" in ours.recv())
        """
    )
    assert out == "True\nTrue"


def test_a_child_ends_when_its_script_is_killed(program: Callable[[str], str]) -> None:
    out = program(
        """
        import multiprocessing, subprocess, time

        def stay(mesh, path):
            mesh.pid.call_one().get(timeout=60)
            open(path, "w").write(str(os.getpid()))
            signal.pause()

        if len(sys.argv) > 1:
            echo = this_host().spawn_procs().spawn("echo", Echo)
            fork = multiprocessing.get_context("fork")
            fork.Process(target=stay, args=(echo, "child.pid")).start()
            signal.pause()
        script = subprocess.Popen([sys.executable, __file__, "script"])
        while not (os.path.exists("child.pid") and open("child.pid").read()):
            time.sleep(0.01)
        child = int(open("child.pid").read())
        script.kill()
        script.wait()
        handle = os.pidfd_open(child) if os.path.exists(f"/proc/{child}") else None
        if handle is not None:
            import select
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            print(bool(poll.poll(60_000)))
        else:
            print(True)
        """
    )
    assert out == "True"


def test_a_program_started_by_subprocess_is_its_own(program: Callable[[str], str]) -> None:
    """It takes no part in the program that started it, and outlives it."""
    out = program(
        """
        import subprocess
        if len(sys.argv) == 1:
            this_host().spawn_procs().spawn("echo", Echo).pid.call_one().get(timeout=60)
            print(subprocess.check_output([sys.executable, __file__, "inner"], text=True))
        else:
            print(client_proc().client)
        """
    )
    assert out == "True"
