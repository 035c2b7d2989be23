"""Fixtures and helpers of the tests that run the engine in real processes.

The conformance suite states what users may rely on. These tests use internals: they inspect the
tables of a `Proc`, break links on purpose, and kill processes. The `fresh` fixture stops each proc
that it made, and `faults` collects each failure that reaches the root.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.proc.proc import Proc
from monarch.actor import Actor, endpoint, this_host

WAIT = 60.0
"""Seconds after which a wait is a hang."""


class Inside(Actor):
    """An actor that inspects the engine of its own process."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def uid(self) -> int:
        return client_proc().uid

    @endpoint
    def tables(self) -> dict[str, int]:
        return tables(client_proc())


def tables(proc: Proc) -> dict[str, int]:
    """Return the size of each table of `proc` that could leak, and its shared memory in use."""
    names = (
        "links",
        "ports",
        "cells",
        "ending",
        "owned",
        "expected",
        "_asked",
        "_exit_sinks",
    )
    sizes = {name: len(getattr(proc, name)) for name in names}
    sizes["segments in use"] = proc.segments.statistics[0]
    return sizes


def until(condition: Callable[[], Any], timeout: float = WAIT) -> Any:
    """Poll `condition` until it is true and return its value; fail after `timeout` seconds.

    Use it for changes about which the system sends no event.
    """
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {condition}"
        time.sleep(0.005)
    return found


@pytest.fixture
def proc() -> Proc:
    """Return the `Proc` of the client, its own part of the runtime."""
    return client_proc()


@pytest.fixture
def fresh() -> Iterator[Callable[..., Any]]:
    """Yield a function that spawns procs; stop them all after the test."""
    with contextlib.ExitStack() as stack:

        def stop(procs: Any) -> None:
            with contextlib.suppress(RuntimeError):
                procs.stop().get(timeout=WAIT)

        def make(count: int | None = None, **options: Any) -> Any:
            per_host = None if count is None else {"gpus": count}
            procs = this_host().spawn_procs(per_host=per_host, **options)
            stack.callback(stop, procs)
            return procs

        yield make


@pytest.fixture(autouse=True)
def faults() -> Iterator[queue.Queue[Any]]:
    """Collect the failures that reach the root, which would otherwise end the test run."""
    found: queue.Queue[Any] = queue.Queue()
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = found.put
    yield found
    monarch.actor.unhandled_fault_hook = before if callable(before) else found.put


@pytest.fixture
def reactor_is_well(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fail a test during which the reactor of any process reported an internal error."""
    yield
    printed = capfd.readouterr()
    assert "internal error" not in printed.err + printed.out


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs a source text in a new interpreter and returns its stdout.

    The program has its own client, and must exit with status 0.
    """

    def run(source: str, timeout: float = 2 * WAIT) -> str:
        path = tmp_path / "program.py"
        path.write_text(_PRELUDE + textwrap.dedent(source))
        done = subprocess.run(
            [sys.executable, str(path)],
            check=False,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    return run


_PRELUDE = """
import gc, os, signal, sys, threading
import monarch.actor
from monarch.actor import *
from monarch.config import configure
from monarch._engine.runtime.agent.client import client_proc

monarch.actor.unhandled_fault_hook = lambda failure: None


class Echo(Actor):
    @endpoint
    def echo(self, value=None): return value

    @endpoint
    def pid(self): return os.getpid()


def agent_pid():
    return int(open(f"/proc/self/task/{os.getpid()}/children").read().split()[0])


def outcome(function):
    try:
        function()
        return "value"
    except BaseException as error:
        return type(error).__name__


"""
