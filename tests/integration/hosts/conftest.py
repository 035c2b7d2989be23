"""Shared parts of tests with several hosts: worker loops, and clients that the test drives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

WAIT = 60.0

WORKER = """
import logging, sys
from monarch.actor import run_worker_loop_forever
log = logging.getLogger("monarch.audit")
log.setLevel(logging.INFO)
log.addHandler(logging.FileHandler(sys.argv[2]))
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""

CLIENT = """
import os, sys, threading
from itertools import count
import monarch.actor
from monarch._engine.runtime.agent.client import client_proc
from monarch.actor import *

monarch.actor.unhandled_fault_hook = lambda failure: None

class Echo(Actor):
    @endpoint
    def echo(self, value): return value
    @endpoint
    def pid(self): return os.getpid()
    @endpoint
    def ask(self, other, value): return other.echo.call_one(value).get(timeout=60)

def outcome(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def to(*workers):
    global hosts, echos
    hosts = attach_to_workers(ca="trust_all_connections", workers=workers)
    hosts.initialized.get(timeout=60)
    echos = hosts.spawn_procs().spawn("echos", Echo)
    return echos.pid.call().get(timeout=60).values()

def take(job, **options):
    global echos
    found = reattach(job, **options)
    echos = found.actors["echos"]
    return found

def echoes(size):
    data = os.urandom(size)
    return echos.echo.call(data).get(timeout=60).values() == [data] * len(echos)

def chat():
    return [echos.echo.call_one(number).get(timeout=60) for number in range(50)] == [*range(50)]

def speaks_directly():
    links = [link for link in client_proc().links.values() if getattr(link, "direct", None)]
    return any(link.direct.speaks for link in links)

for line in sys.stdin:
    print(repr(outcome(lambda: eval(line))), flush=True)
"""


class Place:
    """A folder in which workers and clients run, with the audit logs of the workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "MONARCH_SECRET_FILE": str(make_secret(folder, "secret"))}
        for name, source in (("worker", WORKER), ("client", CLIENT)):
            (folder / f"{name}.py").write_text(source)
        self.started: list[subprocess.Popen[str]] = []

    def worker(self, address: str, start: Any = subprocess.Popen) -> subprocess.Popen[str]:
        """Start a worker loop and wait until it listens."""
        audit = self.folder / f"audit-{len(self.started)}"
        command = [sys.executable, str(self.folder / "worker.py"), address, str(audit)]
        process: subprocess.Popen[str] = start(command, env=self.environ)
        self.started.append(process)
        until(lambda: self.records(process, "listening"))
        return process

    def records(self, worker: subprocess.Popen[str], event: str) -> list[dict[str, Any]]:
        audit = self.folder / f"audit-{self.started.index(worker)}"
        lines = audit.read_text().splitlines() if audit.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def client(self, **environ: str) -> Callable[[str], Any]:
        """Start a client program; return a function that evaluates an expression there."""
        process = subprocess.Popen(
            [sys.executable, str(self.folder / "client.py")],
            env={**self.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)

        def ask(expression: str) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            print(expression, file=process.stdin, flush=True)
            return eval(process.stdout.readline())

        return ask

    def close(self) -> None:
        while self.started:
            process = self.started.pop()
            if process.stdin is not None:
                process.stdin.close()
                process.wait(WAIT)
            else:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def make_secret(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(f"the {name} of the tests, and of nobody else\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    try:
        yield place
    finally:
        place.close()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def free_address(scheme: str = "tcp") -> str:
    return f"{scheme}://127.0.0.1:{free_port()}"
