"""Idle event loops of async actors read links by themselves, and everything else goes on.

See `runtime.actor.seat`. Each test first makes calls that are their caller's only one, so that the
loops at both ends take their seats.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from monarch._engine.runtime.actor.seat import Seat
from monarch.actor import Actor, SupervisionError, endpoint, this_host

WAIT = 60.0
CALLS = 300


class Peer(Actor):
    def __init__(self) -> None:
        self.reads = 0
        self.ticks = 0
        wait = Seat.wait

        def counted(seat: Seat, timeout: float | None) -> bool | None:
            came = wait(seat, timeout)
            self.reads += bool(came)
            return came

        Seat.wait = counted  # type: ignore[method-assign]  # in this process only

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def seat_reads(self) -> int:
        return self.reads

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def converse(self, other: Any) -> None:
        for number in range(CALLS):
            assert await other.echo.call_one(number) == number

    @endpoint
    async def wait_for(self, other: Any) -> str:
        try:
            await other.hang.call_one()
        except SupervisionError as error:
            return str(error)
        return "no error"

    @endpoint
    async def tick_while_waiting(self, other: Any) -> int:
        """Return how often a timer and another thread got through while a call was awaited."""

        async def tick() -> None:
            while self.ticks < 20:
                await asyncio.sleep(0.001)
                self.ticks += 1

        loop = asyncio.get_running_loop()
        called = asyncio.Event()
        call = other.hang.call_one()
        waiting = call.as_asyncio()
        await asyncio.wait_for(tick(), WAIT)
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(called.set,))
        thread.start()
        await asyncio.wait_for(called.wait(), WAIT)
        thread.join()
        call.cancel()
        await asyncio.wait([waiting], timeout=WAIT)
        return self.ticks

    @endpoint
    async def fork(self) -> int:
        """Return the exit code of a child that ends at once."""
        child = os.fork()
        if not child:
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # noqa: ASYNC222 - at once


@pytest.fixture
def peers() -> Iterator[tuple[Any, Any, Any]]:
    """Return procs, and an actor in each of two, which have called one another."""
    procs = this_host().spawn_procs({"gpus": 2})
    mesh = procs.spawn("peer", Peer)
    one, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
    one.converse.call_one(other).get(timeout=WAIT)
    yield procs, one, other
    procs.stop().get(timeout=WAIT)


def test_both_loops_read_their_link(peers: Any) -> None:
    _, one, other = peers
    assert one.seat_reads.call_one().get(timeout=WAIT) > 0
    assert other.seat_reads.call_one().get(timeout=WAIT) > 0


def test_messages_of_others_arrive(peers: Any) -> None:
    _, one, other = peers
    for number in range(CALLS):
        assert other.echo.call_one(number).get(timeout=WAIT) == number
        assert one.echo.call_one(bytes(100_000)).get(timeout=WAIT) == bytes(100_000)
    one.converse.call_one(other).get(timeout=WAIT)


def test_timers_and_threads_get_through(peers: Any) -> None:
    _, one, other = peers
    assert one.tick_while_waiting.call_one(other).get(timeout=WAIT) == 20


def test_the_peer_is_killed(peers: Any, faults: Any) -> None:
    _, one, other = peers
    pid = other.pid.call_one().get(timeout=WAIT)
    answer = one.wait_for.call_one(other)
    os.kill(pid, signal.SIGKILL)
    assert "SIGKILL" in answer.get(timeout=WAIT)
    assert one.echo.call_one(1).get(timeout=WAIT) == 1


def test_a_child_is_forked(peers: Any) -> None:
    _, one, other = peers
    assert other.fork.call_one().get(timeout=WAIT) == 0
    one.converse.call_one(other).get(timeout=WAIT)
    assert one.fork.call_one().get(timeout=WAIT) == 0
    one.converse.call_one(other).get(timeout=WAIT)
