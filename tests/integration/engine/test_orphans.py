"""Processes that user code starts in an actor end with the actor's process, however that exits.

The tests cover forks, daemons, commands, and multiprocessing with all three start methods, and the
files that these leave in /dev/shm and in the temporary directory. They find the client's
descendants by an environment variable that each of them inherits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, Channel, Port, Supervisor, endpoint
from tests.processes import files_of_processes
from tests.stopped import stop_process

from .conftest import WAIT, kill, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has child subreapers")

# A module of its own, because processes that multiprocessing spawns must import it.
CHILD = """
import os, signal

def wait(folder, kind):
    with open(os.path.join(folder, kind + ".new"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.path.join(folder, kind))
    while True:
        signal.pause()
"""

SOURCE = """
import multiprocessing, os, signal, subprocess, sys
from multiprocessing.shared_memory import SharedMemory
import monarch.actor
from monarch.actor import *

monarch.actor.unhandled_fault_hook = lambda failure: None


class Parent(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def start(self, folder):
        from child import wait
        if not os.fork():
            wait(folder, "fork")
        if not os.fork():
            os.setsid()
            if not os.fork():
                wait(folder, "daemon")
            os._exit(0)
        command = f"sleep 1000 & echo $! > {folder}/s; mv {folder}/s {folder}/shell; sleep 1000"
        subprocess.Popen(["/bin/sh", "-c", command])
        # One that looks as if it cleaned up after others, and does not end by itself.
        command = f"echo $$ > {folder}/new; mv {folder}/new {folder}/janitor; sleep 1000; :"
        subprocess.Popen(["/bin/sh", "-c", command, "multiprocessing.resource_tracker"])
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            target = context.Process(target=wait, args=(folder, "mp-" + method), daemon=True)
            target.start()
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.memory = SharedMemory(create=True, size=1 << 12)
        return "sem." + self.lock._semlock.name[1:], self.memory.name

    @endpoint
    def block(self, port):
        port.send("blocked")
        signal.pause()

    def __cleanup__(self, error):
        raise RuntimeError("no")


def start(folder):
    return " ".join(parent.start.call_one(folder).get())


procs = this_host().spawn_procs()
parent = procs.spawn("parent", Parent)
other = this_host().spawn_procs().spawn("other", Parent)
port, receiver = Channel.open()
other.pid.call().get()
print("up", flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""

KINDS = {"fork", "daemon", "shell", "janitor", "mp-fork", "mp-spawn", "mp-forkserver"}


class Client:
    """A program with two procs; `start` makes one of them start a child of each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.memory: list[Path] = []  # shared memory and a semaphore of user code
        self.mark = f"MONARCH_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        (folder / "client.py").write_text(SOURCE)
        (folder / "child.py").write_text(CHILD)
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "client.py"],
            cwd=folder,
            env={**os.environ, name: value, "TMPDIR": str(self.temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def start(self) -> None:
        names = self.evaluate(f"start({str(self.folder)!r})").split()
        self.memory = [Path("/dev/shm", name) for name in names]
        until(lambda: all((self.folder / kind).exists() for kind in KINDS))
        self.children = {int((self.folder / kind).read_text()) for kind in KINDS}
        assert self.children <= self.running()
        assert all(path.exists() for path in self.memory)
        assert list(self.temporary.iterdir())
        self.parent = int(self.evaluate("parent.pid.call_one().get()"))
        self.other = int(self.evaluate("other.pid.call_one().get()"))
        (self.agent,) = children(self.pid)
        (self.launcher,) = children(self.agent)

    def running(self) -> set[int]:
        """Return the pids of the program and of its descendants that still run."""
        found = set()
        for path in files_of_processes("environ"):
            try:
                variables = path.read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if self.mark.encode() in variables:
                found.add(int(path.parent.name))
        return found

    def ask(self, expression: str) -> None:
        assert self.process.stdin is not None
        print(expression, file=self.process.stdin, flush=True)

    def evaluate(self, expression: str) -> str:
        self.ask(expression)
        return self.said()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leaves(self, *pids: int) -> bool:
        """Whether exactly the processes `pids` still run, and their files are removed."""
        try:
            files = list(self.temporary.rglob("*"))
        except FileNotFoundError:  # a directory disappeared during the search
            return False
        return (
            self.running() == set(pids)
            and not any(path.exists() for path in self.memory)
            and all(map(self.is_kept, files))
        )

    def is_kept(self, path: Path) -> bool:
        """Whether `path` is the scratch directory of the running agent."""
        return self.agent in self.running() and path.parent == self.temporary and path.is_dir()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def fresh_client() -> Iterator[Client]:
    # `tmp_path` would exceed the maximum length of a socket's path.
    folder = Path(tempfile.mkdtemp(prefix="orphans-"))
    client = Client(folder)
    with client.process:
        try:
            assert client.said() == "up"
            yield client
        finally:
            for pid in client.running():
                with contextlib.suppress(ProcessLookupError):  # it exited meanwhile
                    kill(pid)
            for path in client.memory:  # the tracker that removes them was killed as well
                path.unlink(missing_ok=True)
            shutil.rmtree(folder)


@pytest.fixture
def client(fresh_client: Client) -> Client:
    fresh_client.start()
    return fresh_client


# -- the proc exits, and the program continues -----------------------------------------------------


@pytest.mark.failures
@pytest.mark.parametrize("end", ["stop", "SIGKILL"])
def test_they_go_with_their_proc(client: Client, end: str) -> None:
    """Children end even if the actor's ``__cleanup__`` raises; those of other procs stay."""
    if end == "stop":
        client.ask("procs.stop().get()")
    else:
        kill(client.parent)
    until(lambda: client.leaves(client.pid, client.agent, client.launcher, client.other))
    if end == "stop":
        client.said()
    assert client.evaluate("other.pid.call_one().get()") == str(client.other)


@pytest.mark.failures
def test_a_daemon_lives_as_long_as_its_proc(client: Client) -> None:
    """A daemon survives its own parent, which was not the proc."""
    kill(client.other)
    until(lambda: client.other not in client.running())
    assert client.children <= client.running()


@pytest.mark.failures
def test_they_go_with_their_launcher(client: Client) -> None:
    kill(client.launcher)
    until(lambda: client.leaves(client.pid, client.agent))
    assert client.evaluate("parent.pid.call_one().get()") == "SupervisionError"


@pytest.mark.failures
def test_they_go_with_the_agent(client: Client) -> None:
    kill(client.agent)
    until(lambda: client.leaves(client.pid))


def test_they_go_with_the_client_while_the_agent_is_stopped(client: Client) -> None:
    stop_process(client.agent)
    kill(client.pid)
    until(lambda: client.leaves())


@pytest.mark.failures
def test_they_go_with_an_agent_that_had_not_read_all(client: Client) -> None:
    """An agent killed with unread data resets the connection, so its launcher sees no clean EOF."""
    stop_process(client.agent)
    kill(client.other)
    # The launcher reports the exit to the agent when it reaps the process.
    until(lambda: not Path(f"/proc/{client.other}").exists())
    kill(client.agent)
    until(lambda: client.leaves(client.pid))


@pytest.mark.failures
@pytest.mark.parametrize("end", ["agent", "client"])
def test_they_go_though_the_launcher_is_busy(client: Client, end: str) -> None:
    """A launcher that is importing a module does not read its socket."""
    (client.folder / "numpy.py").write_text(
        "open('importing.new', 'w').close()\n"
        "import os; os.rename('importing.new', 'importing')\n"
        "while True: pass"
    )
    client.ask("sys.modules.update(numpy=sys) or this_host().spawn_procs() and None")
    until((client.folder / "importing").exists)
    if end == "agent":
        kill(client.agent)
        until(lambda: client.leaves(client.pid))
    else:
        kill(client.pid)
        until(lambda: client.leaves())


# -- the program exits -----------------------------------------------------------------------------

ENDS: dict[str, Callable[[Client], Any]] = {
    "its input ends": lambda client: client.process.stdin.close(),  # type: ignore[union-attr]
    "SIGKILL": lambda client: kill(client.pid),
    "SIGTERM": lambda client: os.kill(client.pid, signal.SIGTERM),
    "Ctrl-C": lambda client: os.killpg(client.pid, signal.SIGINT),
}


@pytest.mark.parametrize("end", ENDS)
def test_they_go_with_the_program(client: Client, end: str) -> None:
    ENDS[end](client)
    until(lambda: client.leaves())


def test_ctrl_c_during_a_call(client: Client) -> None:
    client.ask("other.block.broadcast(port) or receiver.recv().get()")
    assert client.said() == "blocked"
    client.ask("print('calling', flush=True) or other.pid.call().get()")
    assert client.said() == "calling"
    os.killpg(client.pid, signal.SIGINT)
    until(lambda: client.leaves())


def test_ctrl_c_during_a_stop(client: Client) -> None:
    client.ask("other.block.broadcast(port) or receiver.recv().get()")
    assert client.said() == "blocked"
    client.ask("print('stopping', flush=True) or other.stop().get()")
    assert client.said() == "stopping"
    os.killpg(client.pid, signal.SIGINT)
    until(lambda: client.leaves())


def test_ctrl_c_during_a_spawn(client: Client) -> None:
    client.ask(
        "print('spawning', flush=True) or "
        "[this_host().spawn_procs(per_host={'gpus': 8}) for _ in range(100)]"
    )
    assert client.said() == "spawning"
    os.killpg(client.pid, signal.SIGINT)
    until(lambda: client.leaves())


@pytest.mark.failures
def test_both_agent_and_launcher_are_killed(fresh_client: Client) -> None:
    """No proc survives.

    Children of procs would survive, since no process that knows them is left.
    """
    (agent,) = children(fresh_client.pid)
    (launcher,) = children(agent)
    stop_process(agent)  # first: it would continue its launcher
    stop_process(launcher)
    kill(agent)
    kill(launcher)
    until(lambda: fresh_client.running() == {fresh_client.pid})


# -- a forked child is not the actor ---------------------------------------------------------------


class Forks(Actor):
    """An actor that forks in its endpoints; the children return from them as the actor does."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def divide(self) -> int:
        os.fork()
        return os.getpid()

    @endpoint
    def send_from_child(self, port: Port[str]) -> int | None:
        process = multiprocessing.get_context("fork").Process(target=port.send, args=("child",))
        process.start()
        process.join()
        port.send("parent")
        return process.exitcode


class ForksAsync(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def divide(self) -> int:
        os.fork()
        return os.getpid()


@pytest.mark.parametrize("kind", [Forks, ForksAsync])
def test_a_forked_child_does_not_answer(fresh: Callable[..., Any], kind: type[Any]) -> None:
    actor = fresh(1).spawn("forks", kind)
    pid = actor.pid.call_one().get(timeout=WAIT)
    for _ in range(3):
        assert actor.divide.call_one().get(timeout=WAIT) == pid
        assert actor.pid.call_one().get(timeout=WAIT) == pid


class Pids(Actor):
    @endpoint
    def die(self) -> None:
        kill(os.getpid())

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def other(self) -> int:
        return -1


@pytest.mark.parametrize("replaced", [False, True])
def test_a_forked_child_calls_what_its_parent_has_called(
    fresh: Callable[..., Any], replaced: bool
) -> None:
    """And what its parent has not called, also after a process of the parent was replaced.

    A replacement in the parent makes its handles look for their processes anew, in the child too.
    """
    supervisor = Supervisor()
    if replaced:
        fragile = supervisor.spawn(fresh(1), "fragile", Pids)
        fragile.die.broadcast()
        until(lambda: supervisor.restarts)
    called, new = (fresh(2).spawn(name, Pids) for name in ("called", "new"))
    meshes = [called, new, *([fragile] if replaced else [])]
    called.pid.call().get(timeout=WAIT)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = [sorted(mesh.pid.call().get(timeout=WAIT).values()) for mesh in meshes]
            os.write(write, repr(found).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    said = os.read(read, 1000).decode()
    os.close(read)
    assert said == repr([sorted(mesh.pid.call().get(timeout=WAIT).values()) for mesh in meshes])


def test_a_process_of_multiprocessing_speaks_for_itself(fresh: Callable[..., Any]) -> None:
    """Its messages arrive beside those of the actor that has started it."""
    actor = fresh(1).spawn("forks", Forks)
    port, receiver = Channel.open()
    assert actor.send_from_child.call_one(port).get(timeout=WAIT) == 0
    assert {receiver.recv().get(timeout=WAIT) for _ in range(2)} == {"child", "parent"}


# -- torch -----------------------------------------------------------------------------------------


class Loads(Actor):
    """An actor that reads from a torch DataLoader and keeps its worker processes alive."""

    @endpoint
    def load(self) -> list[int]:
        import torch.utils.data

        loader = torch.utils.data.DataLoader(
            range(8),  # type: ignore[arg-type]
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        self.batches = iter(loader)
        next(self.batches)
        return [process.pid for process in multiprocessing.active_children() if process.pid]

    @endpoint
    def die(self) -> None:
        kill(os.getpid())


@pytest.mark.failures
@pytest.mark.torch
@pytest.mark.parametrize("end", ["stop", "SIGKILL"])
def test_workers_of_a_data_loader_go_with_the_proc(fresh: Callable[..., Any], end: str) -> None:
    pytest.importorskip("torch")
    procs = fresh(1)
    actor = procs.spawn("loads", Loads)
    workers = actor.load.call_one().get(timeout=WAIT)
    assert len(workers) == 2
    if end == "stop":
        procs.stop().get(timeout=WAIT)
    else:
        actor.die.broadcast()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


SHARED = """
import os, pathlib, select
import torch
from monarch.actor import Actor, endpoint, this_host

class Shares(Actor):
    @endpoint
    def make(self):
        self.storage = torch.UntypedStorage._new_using_filename_cpu(4096)
        self.storage[0] = 7
        return self.storage._share_filename_cpu_()

    @endpoint
    def open(self, handle):
        self.storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)
        return self.storage[0]

    @endpoint
    def drop(self):
        del self.storage

makes, keeps, late = (this_host().spawn_procs() for _ in range(3))
maker, keeper = makes.spawn("maker", Shares), keeps.spawn("keeper", Shares)
handle = maker.make.call_one().get()
assert keeper.open.call_one(handle).get() == 7
makes.stop().get()
[manager] = [
    path.parent.name
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
    if path.read_bytes().startswith(b"torch_shm_manager")
    and MARK in (path.parent / "environ").read_bytes()
]
exits = select.poll()
exits.register(os.pidfd_open(int(manager)), select.POLLIN)
assert not exits.poll(1000)  # other orphans get less than a second
assert late.spawn("late", Shares).open.call_one(handle).get() == 7
keeper.drop.call_one().get()
print(manager)
"""


@pytest.mark.torch
def test_shared_memory_of_torch_outlives_the_process_that_made_it(tmp_path: Path) -> None:
    """Its manager stays for the others that map the memory, and goes with the program."""
    pytest.importorskip("torch")
    mark = f"TMPDIR={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", f"MARK = {mark.encode()!r}\n{SHARED}"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    until(lambda: not os.path.exists(f"/proc/{done.stdout.strip()}"))
