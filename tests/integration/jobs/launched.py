"""Parts of the tests of jobs whose workers a launcher starts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from monarch.actor import Actor, endpoint
from tests.processes import files_of_processes

WAIT = 60.0
LOOPBACK = "tcp://127.0.0.1:0"


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def namespace(self) -> str:
        return os.readlink("/proc/self/ns/pid")


def pids(hosts: Any) -> list[int]:
    """Return the processes of a mesh of actors on these hosts."""
    workers = hosts.spawn_procs().spawn("workers", Worker)
    found: list[int] = workers.pid.call().get(timeout=WAIT).values()
    return found


def marked(mark: str) -> list[int]:
    """Return the processes with this ``NAME=value`` in their environment."""
    found = []
    for environ in files_of_processes("environ"):
        with contextlib.suppress(OSError):  # the process has exited
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def until(condition: Callable[[], Any], limit: float = WAIT) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_arguments(secret: bytes) -> list[str]:
    """Return the command lines of this machine that have the secret in them."""
    found = []
    for command in files_of_processes("cmdline"):
        with contextlib.suppress(OSError):
            if secret in command.read_bytes():
                found.append(str(command))
    return found
