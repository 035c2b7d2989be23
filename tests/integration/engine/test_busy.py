"""An actor that computes in pure Python without pause delays neither its process nor its stop."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.actor import Actor, Channel, SupervisionError, endpoint
from monarch.config import configured

from .conftest import WAIT, Inside

Fresh = Callable[..., Any]


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Shorten the stop timeouts; a proc takes the client's settings when it is spawned."""
    with configured(stop_actor_timeout="500ms", stop_grace_period="500ms", cleanup_timeout="500ms"):
        yield


class Spinner(Actor):
    @endpoint
    def spin(self, port: Any) -> None:
        port.send("spinning")
        while True:
            pass


class AsyncSpinner(Actor):
    @endpoint
    async def spin(self, port: Any) -> None:
        port.send("spinning")
        while True:
            pass


class SpinsWhenMade(Actor):
    def __init__(self, port: Any) -> None:
        port.send("spinning")
        while True:
            pass

    @endpoint
    def spin(self, port: Any = None) -> None: ...


class Awaits(Actor):
    @endpoint
    async def echo(self, value: int) -> int:
        return value


def in_its_constructor(procs: Any, port: Any) -> tuple[Any, Any]:
    mesh = procs.spawn("spinner", SpinsWhenMade, port)
    return mesh, mesh.spin.call_one()


def in_an_endpoint(procs: Any, port: Any) -> tuple[Any, Any]:
    mesh = procs.spawn("spinner", Spinner)
    return mesh, mesh.spin.call_one(port)


def in_a_coroutine(procs: Any, port: Any) -> tuple[Any, Any]:
    mesh = procs.spawn("spinner", AsyncSpinner)
    return mesh, mesh.spin.call_one(port)


@pytest.fixture(params=[in_an_endpoint, in_a_coroutine, in_its_constructor])
def spinning(request: pytest.FixtureRequest, fresh: Fresh) -> tuple[Any, Any, Any, Any, int]:
    """Return a mesh of one proc, its spinner, the spinning call, another actor, and the pid."""
    procs = fresh(1)
    beside = procs.spawn("beside", Inside)
    pid = beside.pid.call_one().get(timeout=WAIT)
    port, receiver = Channel[str].open()
    spinner, call = request.param(procs, port)
    assert receiver.recv().get(timeout=WAIT) == "spinning"
    return procs, spinner, call, beside, pid


def test_its_neighbours_answer(spinning: Any) -> None:
    procs, _, call, beside, pid = spinning
    for _ in range(20):
        assert beside.pid.call_one().get(timeout=WAIT) == pid
    new, awaits = procs.spawn("new", Inside), procs.spawn("awaits", Awaits)
    assert new.pid.call_one().get(timeout=WAIT) == pid
    assert awaits.echo.call_one(3).get(timeout=WAIT) == 3
    new.stop().get(timeout=WAIT)
    with pytest.raises(TimeoutError):  # the call is still running
        call.get(timeout=0)


def test_it_can_be_stopped(spinning: Any) -> None:
    """The actor's thread cannot be ended, but it blocks nothing else.

    The call fails, and other actors of the process continue.
    """
    _, spinner, call, beside, pid = spinning
    spinner.stop("enough").get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="enough"):
        call.get(timeout=WAIT)
    with pytest.raises(SupervisionError):
        spinner.spin.call_one(None).get(timeout=WAIT)
    assert beside.pid.call_one().get(timeout=WAIT) == pid


def test_its_process_can_be_stopped(spinning: Any) -> None:
    procs, _, call, _, pid = spinning
    watch = os.pidfd_open(pid)
    try:
        procs.stop().get(timeout=WAIT)
        assert select.select([watch], [], [], WAIT)[0], "stop() is done, the process is not"
    finally:
        os.close(watch)
    with pytest.raises(SupervisionError):
        call.get(timeout=WAIT)
