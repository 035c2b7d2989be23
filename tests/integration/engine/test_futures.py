"""Futures used with asyncio and `concurrent.futures`, and cancelled calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch._engine.runtime.proc.proc import Proc
from monarch.actor import Actor, Channel, concurrent_endpoint, endpoint, this_host

WAIT = 60.0


class Plain(Actor):
    def __init__(self) -> None:
        self.handled: list[Any] = []

    @endpoint
    def hold(self, opened: Any) -> str:
        """Send a gate to `opened` and block until a message arrives through the gate."""
        gate, receiver = Channel.open()
        opened.send(gate)
        receiver.recv().get()
        self.handled.append("hold")
        return "held"

    @endpoint
    def note(self, value: Any) -> Any:
        self.handled.append(value)
        return value

    @endpoint
    def fail(self) -> None:
        raise ValueError("as told")

    @endpoint
    def seen(self) -> list[Any]:
        return self.handled


class Async(Actor):
    def __init__(self) -> None:
        self.handled: list[Any] = []

    @endpoint
    async def hold(self, opened: Any) -> None:
        await self._hold("hold", opened)

    @concurrent_endpoint
    async def aside(self, opened: Any) -> None:
        await self._hold("aside", opened)

    async def _hold(self, name: str, opened: Any) -> None:
        gate, receiver = Channel.open()
        opened.send(gate)
        try:
            await receiver.recv()
        except asyncio.CancelledError:
            self.handled.append(f"{name} was cancelled")
            raise

    @endpoint
    async def note(self, value: Any) -> Any:
        self.handled.append(value)
        return value

    @endpoint
    async def seen(self) -> list[Any]:
        return self.handled

    @endpoint
    async def cancelling(self) -> int:
        """Return how many cancellations of the actor's task are not accounted for."""
        task: Any = asyncio.current_task()
        return int(task.cancelling()) if sys.version_info >= (3, 11) else 0


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    mesh.stop().get()


@pytest.fixture
def plain(procs: Any) -> Any:
    return procs.slice(gpus=0).spawn("plain", Plain)


@pytest.fixture
def held(plain: Any) -> tuple[Any, Any]:
    """Return the future of a call in progress, and the port that ends the call."""
    opened, receiver = Channel.open()
    future = plain.hold.call_one(opened)
    return future, receiver.recv().get(timeout=WAIT)


# -- asyncio and concurrent.futures --------------------------------------------------------------


def test_done(held: Any) -> None:
    future, gate = held
    assert not future.done()
    gate.send(None)
    assert future.get(timeout=WAIT) == "held"
    assert future.done()
    assert not future.cancelled()
    assert not future.cancel(), "it has an outcome"


def test_a_callback_off_the_loop(held: Any, plain: Any) -> None:
    future, gate = held
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    removed: list[Any] = []
    future.add_done_callback(lambda done: called.put((done, threading.current_thread())))
    future.add_done_callback(removed.append)
    assert future.remove_done_callback(removed.append) == 1
    assert future.remove_done_callback(removed.append) == 0
    gate.send(None)
    done, thread = called.get(timeout=WAIT)
    assert done is future
    assert done.result() == "held"
    assert thread.name == "monarch-callback", "it may block, and the reactor may not"
    at_once: list[Any] = []
    future.add_done_callback(at_once.append)
    assert at_once == [future]
    assert removed == []


def test_a_callback_on_a_loop_is_called_there(plain: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        called: asyncio.Future[Any] = loop.create_future()
        future = plain.note.call_one(3)
        future.add_done_callback(called.set_result)
        assert await asyncio.wait_for(called, WAIT) is future
        assert future.result() == 3

    asyncio.run(main())


@pytest.mark.parametrize("when", [asyncio.FIRST_COMPLETED, asyncio.ALL_COMPLETED])
def test_asyncio_wait(held: Any, plain: Any, procs: Any, when: str) -> None:
    other = procs.slice(gpus=1).spawn("other", Plain)

    async def main() -> None:
        slow, gate = held
        quick = other.note.call_one(1)
        if when == asyncio.ALL_COMPLETED:
            gate.send(None)
        done, pending = await asyncio.wait([slow, quick], return_when=when, timeout=WAIT)
        both = when == asyncio.ALL_COMPLETED
        if sys.version_info < (3, 11):  # `wait` returns tasks for foreign futures
            assert (len(done), len(pending)) == ((2, 0) if both else (1, 1))
        else:
            assert (done, pending) == (({slow, quick}, set()) if both else ({quick}, {slow}))
        if not both:
            gate.send(None)
        assert [quick.result(), await slow] == [1, "held"]
        bad = plain.fail.call_one()
        (done,), _ = await asyncio.wait([bad], return_when=asyncio.FIRST_EXCEPTION)
        assert (done is bad) == (sys.version_info >= (3, 11))
        assert "as told" in str(done.exception())

    asyncio.run(main())


def test_concurrent_futures_wait_and_as_completed(held: Any, plain: Any, procs: Any) -> None:
    slow, gate = held
    others = procs.spawn("others", Plain)
    own: concurrent.futures.Future[int] = concurrent.futures.Future()
    futures = [slow, others.note.call("a"), own]
    done, pending = concurrent.futures.wait(
        futures, timeout=WAIT, return_when=concurrent.futures.FIRST_COMPLETED
    )
    assert (done, pending) == ({futures[1]}, {slow, own})
    assert concurrent.futures.wait(futures, timeout=0).not_done == {slow, own}
    own.set_result(1)
    gate.send(None)
    assert concurrent.futures.wait(futures, timeout=WAIT).done == set(futures)
    stream = list(others.note.stream("s"))
    assert set(concurrent.futures.as_completed(stream, timeout=WAIT)) == set(stream)
    bad = plain.fail.call_one()
    opened, receiver = Channel.open()
    endless = others.slice(gpus=1).hold.call_one(opened)
    done, pending = concurrent.futures.wait(
        [bad, endless], timeout=WAIT, return_when=concurrent.futures.FIRST_EXCEPTION
    )
    assert (done, pending) == ({bad}, {endless})
    assert bad.exception() is not None
    gate = receiver.recv().get(timeout=WAIT)  # a call that has not begun would be recalled
    assert endless.cancel()
    gate.send(None)  # a stop would wait for the endpoint


# -- cancelling ----------------------------------------------------------------------------------


def test_a_cancelled_call_ends_all_waits(held: Any) -> None:
    future, gate = held
    waits = concurrent.futures.ThreadPoolExecutor(2)
    blocked = waits.submit(future.get)
    finished = waits.submit(lambda: concurrent.futures.wait([future], timeout=WAIT))
    deadline = time.monotonic() + WAIT
    while len(future._parked) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert future.cancel()
    assert future.cancel(), "again is fine"
    assert future.done()
    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        blocked.result(timeout=WAIT)
    assert finished.result(timeout=WAIT).done == {future}
    waits.shutdown()

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await future
        assert future.as_asyncio().cancelled()

    asyncio.run(main())
    gate.send(None)


def test_what_waits_is_dropped_and_what_runs_goes_on(held: Any, plain: Any, proc: Proc) -> None:
    future, gate = held
    waiting = [plain.note.call_one(number) for number in range(5)]
    seen = plain.seen.call_one()
    ports = len(proc.ports)
    for call in (future, waiting[1], waiting[3]):
        assert call.cancel()
    assert len(proc.ports) == ports - 3
    gate.send(None)
    assert seen.get(timeout=WAIT) == ["hold", 0, 2, 4]
    assert plain.note.call_one("more").get(timeout=WAIT) == "more"


def test_a_call_that_was_answered_meanwhile_is_not_missed(plain: Any) -> None:
    for number in range(50):
        plain.note.call_one(number).cancel()
    assert plain.note.call_one("last").get(timeout=WAIT) == "last"
    seen = plain.seen.call_one().get(timeout=WAIT)
    assert seen[-1] == "last"
    assert seen[:-1] == sorted(seen[:-1])


@pytest.mark.parametrize("method", ["hold", "aside"])
def test_an_async_endpoint_is_cancelled(procs: Any, method: str) -> None:
    mesh = procs.spawn("async", Async)
    opened, receiver = Channel.open()
    future = getattr(mesh, method).call(opened)
    for _ in range(2):
        receiver.recv().get(timeout=WAIT)
    dropped = mesh.note.call("dropped") if method == "hold" else None
    if dropped is not None:
        assert dropped.cancel()
    assert future.cancel()
    assert mesh.note.call("next").get(timeout=WAIT).values() == ["next", "next"]
    # A task of the endpoint's learns of it at a later turn of its loop.
    expected = [[f"{method} was cancelled", "next"]] * 2
    deadline = time.monotonic() + WAIT
    while (
        seen := [sorted(rank) for rank in mesh.seen.call().get(timeout=WAIT).values()]
    ) != expected:
        assert time.monotonic() < deadline, seen
    # A task group, or a time limit, of a later message would take it for a cancellation of its own.
    assert mesh.cancelling.call().get(timeout=WAIT).values() == [0, 0]
