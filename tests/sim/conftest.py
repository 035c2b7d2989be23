"""Simulated programs start as every program does: with the default hook and the default timeout.

Tests of real processes that are run as simulations (`test_promises`) get the fixtures of their own
ring, made within the simulation: meshes on another host, and failures that arrive in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import resource
import time
import zlib
from collections.abc import Iterator
from unittest import mock

import pytest

import monarch.actor
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.io.environment import Environment
from monarch.config import configured
from monarch.testing import Drop, Reorder, simulate

DEFAULT = monarch.actor.unhandled_fault_hook  # read before any test has run
WAIT = 60.0


@pytest.fixture(autouse=True)
def default_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the default hook: tests of real processes leave theirs, for late failures."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", DEFAULT)


@pytest.fixture(autouse=True)
def default_timeout() -> Iterator[None]:
    """Restore the default timeout: tests of real processes raise it for the rest of the run."""
    with configured(host_timeout="3s"):
        yield


class Made:
    """A fixture whose value `make(stack, host)` makes in the simulation."""

    def __init__(self, make):
        self.make = make


def made(function):
    """Return a fixture that is made in the simulation."""
    return pytest.fixture(lambda: Made(function), name=function.__name__)


@made
def pair(_stack, host):
    return host.spawn_procs({"gpus": 2})


@made
def grid(_stack, host):
    return host.spawn_procs({"rows": 2, "cols": 2})


@made
def single(_stack, host):
    return host.spawn_procs()


@made
def fresh(stack, host):
    def make(per_host=None, **options):
        if isinstance(per_host, int):
            per_host = {"gpus": per_host}
        procs = host.spawn_procs(per_host=per_host, **options)

        def stop():
            with contextlib.suppress(RuntimeError):
                procs.stop().get(timeout=WAIT)

        stack.callback(stop)
        return procs

    return make


@made
def faults(_stack, _host):
    return monarch.actor.unhandled_fault_hook


@made
def proc(_stack, _host):
    return client_proc()


class Faults:
    """The failures that reached the script; has the methods of the fixtures of both rings."""

    def __init__(self):
        self.arrived = []
        self.seen = []

    def __call__(self, failure):
        self.arrived.append(failure)

    def get(self, timeout=WAIT):
        deadline = time.monotonic() + timeout
        while not self.arrived:
            if time.monotonic() >= deadline:
                raise queue.Empty
            time.sleep(0.01)
        self.seen.append(self.arrived.pop(0))
        return self.seen[-1]

    next = get

    def get_nowait(self):
        return self.get(0.0)

    def drain(self):
        found, self.arrived = self.arrived, []
        self.seen += found
        return found

    def empty(self):
        return not self.arrived

    def qsize(self):
        return len(self.arrived)


def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is marked so as the script of a simulation with a bad network."""
    if pyfuncitem.get_closest_marker("simulated") is None:
        return None
    values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def main(hosts):
        monarch.actor.unhandled_fault_hook = Faults()
        with contextlib.ExitStack() as stack:
            arguments = {
                name: value.make(stack, hosts.slice(hosts=1)) if isinstance(value, Made) else value
                for name, value in values.items()
            }
            outcome = pyfuncitem.obj(**arguments)
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)

    # Programs change the environment of their processes, which is that of all tests here.
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        # A real thread must not make a real client, and no test may limit the process of all tests.
        patch.setattr(Environment, "reactor", None)
        patch.setattr(resource, "setrlimit", None)
        simulate(
            main,
            hosts=2,
            seed=zlib.crc32(pyfuncitem.name.encode()),
            faults=[Drop(0.0, seconds=5, probability=0.02), Reorder(0.0, seconds=5, by=0.01)],
            time_limit=1e6,
            strict=False,  # some tests begin no call
        )
    return True
