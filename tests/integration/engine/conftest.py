"""What tests of the running engine share: procs that are stopped, failures that are collected.

The conformance suite says what users may rely on. These tests know the inside: they look at the
tables of a `Proc`, break links on purpose, and kill processes.
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
from monarch._engine.runtime.client import client_proc
from monarch._engine.runtime.proc import Proc
from monarch.actor import Actor, endpoint, this_host

WAIT = 60.0
"""Seconds after which a wait is a hang."""


class Inside(Actor):
    """Looks at the engine of the process it lives in."""

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
    """Sizes of everything that could grow."""
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
    """Poll for what the system announces by no event; the truth, or a failure."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {condition}"
        time.sleep(0.005)
    return found


@pytest.fixture
def proc() -> Proc:
    """The client's own part of the runtime."""
    return client_proc()


@pytest.fixture
def fresh() -> Iterator[Callable[..., Any]]:
    """Makes procs for one test and stops them after it."""
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
    """Failures that reach the root, instead of ending the test run."""
    found: queue.Queue[Any] = queue.Queue()
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = found.put
    yield found
    monarch.actor.unhandled_fault_hook = before if callable(before) else found.put


@pytest.fixture
def reactor_is_well(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fail a test during which a reactor reported an internal error, in whatever process."""
    yield
    printed = capfd.readouterr()
    assert "internal error" not in printed.err + printed.out


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Runs a source text as a program of its own, with a client of its own; what it printed."""

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
from monarch._engine.runtime.client import client_proc

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
