"""However a program exits, no process that it started keeps running.

The tests find these processes by an environment variable of the client. Each descendant inherits
the variable, and keeps it when it gets a new parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import files_of_processes

from .conftest import kill, until

SOURCE = """
import os, sys
import monarch.actor
from monarch.actor import *

monarch.actor.unhandled_fault_hook = lambda failure: None


class Echo(Actor):
    @endpoint
    def echo(self): pass

    @endpoint
    def spin(self, port):
        port.send("spinning")
        while True: pass

    @endpoint
    def nest(self):
        self.procs = this_host().spawn_procs(per_host={"gpus": 2})
        self.procs.spawn("leaf", Echo).echo.call().get()


def spawn(**options):
    echo = this_host().spawn_procs(**options).spawn("echo", Echo)
    echo.echo.call().get()
    return echo


def outcome():
    try:
        echo.echo.call().get(timeout=60)
        return "answered"
    except Exception as error:
        return type(error).__name__


echo = spawn(per_host={"gpus": 3})
echo.slice(gpus=0).nest.call_one().get()
port, receiver = Channel.open()
echo.slice(gpus=1).spin.broadcast(port)
receiver.recv().get()
spawn(bootstrap_command=default_bootstrap_cmd())
os.environ["OMP_NUM_THREADS"] = "3"  # read by libraries at import: a launcher of its own
spawn()
print("up", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""

PROCS = 3 + 2 + 1 + 1
LAUNCHERS = 2


class Client:
    """A program with procs of every kind, one of them spinning.

    It evaluates each expression that it reads from stdin.
    """

    def __init__(self, folder: Path) -> None:
        self.mark = f"MONARCH_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        source = folder / "client.py"
        source.write_text(textwrap.dedent(SOURCE))
        self.process = subprocess.Popen(
            [sys.executable, str(source)],
            cwd=folder,
            env={**os.environ, name: value},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as a shell does, so that Ctrl-C reaches the group
        )
        self.pid = self.process.pid

    def running(self) -> list[int]:
        """Return the pids of the program and of its descendants that still run."""
        found = []
        for path in files_of_processes("environ"):
            try:
                variables = path.read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if self.mark.encode() in variables:
                found.append(int(path.parent.name))
        return found

    def evaluate(self, expression: str) -> str:
        assert self.process.stdin is not None
        print(expression, file=self.process.stdin, flush=True)
        return self.said()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client(tmp_path)
    with client.process:
        try:
            assert client.said() == "up"
            assert len(client.running()) == 1 + 1 + LAUNCHERS + PROCS
            yield client
        finally:
            for pid in client.running():
                kill(pid)


def agent_of(client: Client) -> int:
    (agent,) = children(client.pid)
    return agent


ENDS: dict[str, Callable[[Client], Any]] = {
    "its input ends": lambda client: client.process.stdin.close(),  # type: ignore[union-attr]
    "SIGKILL": lambda client: os.kill(client.pid, signal.SIGKILL),
    "SIGTERM": lambda client: os.kill(client.pid, signal.SIGTERM),
    "Ctrl-C": lambda client: os.killpg(client.pid, signal.SIGINT),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_outlives_the_client(client: Client, end: str) -> None:
    ENDS[end](client)
    until(lambda: not client.running())


@pytest.mark.failures
def test_nothing_outlives_the_agent_but_the_client(client: Client) -> None:
    kill(agent_of(client))
    until(lambda: client.running() == [client.pid])
    assert client.evaluate("outcome()") == "SupervisionError"


@pytest.mark.failures
def test_procs_do_not_outlive_their_launcher(client: Client) -> None:
    """Procs of the other launcher survive, and the next spawn starts a new launcher."""
    agent = agent_of(client)
    launchers = {pid: children(pid) for pid in children(agent)}
    assert len(launchers) == LAUNCHERS
    other, victim = sorted(launchers, key=lambda pid: len(launchers[pid]))
    kill(victim)
    until(lambda: set(client.running()) == {client.pid, agent, other, *launchers[other]})
    assert client.evaluate("outcome()") == "SupervisionError"
    assert client.evaluate("os.environ.pop('OMP_NUM_THREADS')") == "3"
    assert client.evaluate("len(spawn(per_host={'gpus': 2}))") == "2"
    (new,) = set(children(agent)) - launchers.keys()
    assert len(children(new)) == 2
    assert client.process.stdin is not None
    client.process.stdin.close()
    until(lambda: not client.running())
