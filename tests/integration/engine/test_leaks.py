"""Completed work leaks nothing: client, agent and launchers return to their baseline.

The long runs of these checks are the commands in tests/soak.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import Actor, Channel, SupervisionError, endpoint
from monarch.rdma import RDMABuffer
from tests.soak.footprint import excess, footprint

from .conftest import WAIT, kill, tables, until

Fresh = Callable[..., Any]
MB = 1_000_000


@pytest.fixture
def echo_class() -> type[Actor]:
    class Echo(Actor):
        """A local class, sent by value, so that the procs need not import pytest."""

        @endpoint
        def echo(self, value: Any) -> Any:
            return value

        @endpoint
        def pid(self) -> int:
            return os.getpid()

        @endpoint
        def post(self, port: Any, data: bytes) -> None:
            port.send(data)

    return Echo


def assert_nothing_stays(proc: Any, work: Callable[[], None], warm_up: int, times: int) -> None:
    for _ in range(warm_up):
        work()
    until(lambda: not proc.segments.statistics[0])
    before, sizes = footprint(), tables(proc)
    for _ in range(times):
        work()
    assert excess(before) == []
    until(lambda: all(size <= sizes[name] for name, size in tables(proc).items()))


def test_thirty_cycles(fresh: Fresh, proc: Any, echo_class: Any) -> None:
    def cycle() -> None:
        procs = fresh(2)
        echo = procs.spawn("echo", echo_class)
        assert echo.echo.call(1).get(timeout=WAIT).values() == [1, 1]
        echo.stop().get(timeout=WAIT)
        procs.stop().get(timeout=WAIT)

    assert_nothing_stays(proc, cycle, 5, 30)


@pytest.mark.failures
def test_thirty_deaths(fresh: Fresh, proc: Any, echo_class: Any) -> None:
    def death() -> None:
        procs = fresh(2)
        echo = procs.spawn("echo", echo_class)
        pids = echo.pid.call().get(timeout=WAIT).values()
        calls = [echo.echo.call(bytes(MB)) for _ in range(3)]
        kill(pids[0])
        for call in calls:
            call.exception(timeout=WAIT)
        with pytest.raises(SupervisionError):
            until(lambda: echo.echo.call(1).get(timeout=WAIT) and False)
        procs.stop().get(timeout=WAIT)

    assert_nothing_stays(proc, death, 5, 30)


def test_three_hundred_payloads(fresh: Fresh, proc: Any, echo_class: Any) -> None:
    procs = fresh(2)
    echo = procs.spawn("echo", echo_class)
    port, receiver = Channel[bytes].open()
    one = echo.slice(gpus=1)

    def send() -> None:
        data = bytes(MB)
        assert one.echo.call_one(data).get(timeout=WAIT) == data
        assert echo.echo.call(data).get(timeout=WAIT).values() == [data, data]
        one.post.broadcast(port, data)
        assert receiver.recv().get(timeout=WAIT) == data

    assert_nothing_stays(proc, send, 20, 100)


def test_thirty_registrations(fresh: Fresh, proc: Any, echo_class: Any) -> None:
    """Buffers that another process drops, and buffers whose last handle is lost, are released.

    Each has 16 MB, so that a leak would be visible.
    """
    echo = fresh(1).spawn("echo", echo_class)

    def register() -> None:
        there = echo.echo.call_one(RDMABuffer(bytearray(b"1") * (16 * MB))).get(timeout=WAIT)
        there.drop().get(timeout=WAIT)
        RDMABuffer(bytearray(b"2") * (16 * MB), release="last-handle", grace=0)

    assert_nothing_stays(proc, register, 5, 30)
