"""`stream`: what an endpoint sends while it runs, in order; errors, losses, early ends."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, SupervisionError, endpoint, this_host
from monarch.recipes import stream

from .conftest import WAIT


class Source(Actor):
    @endpoint
    def send(self, port: Any, n: int, end: str = "return") -> int:
        for i in range(n):
            port.send(i)
        if end == "raise":
            raise ValueError("no more")
        if end == "exit":
            os._exit(3)
        return n


class Endless(Actor):
    def __init__(self) -> None:
        self.sent = 0
        self.cancelled = asyncio.Event()

    @endpoint
    async def send(self, port: Any) -> None:
        port.send("first")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @endpoint
    async def is_cancelled(self) -> bool:
        return await asyncio.wait_for(self.cancelled.wait(), WAIT)


@pytest.fixture
def source(procs: Any) -> Any:
    source = procs.slice(procs=0).spawn("source", Source)
    yield source
    source.stop().get(timeout=WAIT)


@pytest.fixture
def endless(procs: Any) -> Any:
    endless = procs.slice(procs=0).spawn("endless", Endless)
    yield endless
    endless.stop().get(timeout=WAIT)


async def items_of(items: Any, into: list[Any], began: asyncio.Event | None = None) -> list[Any]:
    async for item in items:
        into.append(item)
        if began is not None:
            began.set()
    return into


def collect(items: Any, into: list[Any], is_async: bool) -> list[Any]:
    if is_async:
        return asyncio.run(items_of(items, into))
    into.extend(items)
    return into


both = pytest.mark.parametrize("is_async", [False, True], ids=["for", "async for"])


@both
@pytest.mark.parametrize("n", [0, 1, 5000])
def test_all_items_in_order_and_the_result(source: Any, n: int, is_async: bool) -> None:
    sent = stream(lambda port: source.send.call_one(port, n), timeout=WAIT)
    assert collect(sent, [], is_async) == list(range(n))
    assert sent.call.get(timeout=WAIT) == n


@both
def test_an_error_comes_after_the_items(source: Any, is_async: bool) -> None:
    items: list[int] = []
    with pytest.raises(ActorError, match="no more"):
        collect(stream(lambda port: source.send.call_one(port, 3, "raise")), items, is_async)
    assert items == [0, 1, 2]


@both
@pytest.mark.failures
def test_a_lost_actor_ends_the_iteration(is_async: bool) -> None:
    procs = this_host().spawn_procs()
    source = procs.spawn("source", Source)
    items: list[int] = []
    with pytest.raises(SupervisionError):
        collect(stream(lambda port: source.send.call_one(port, 3, "exit")), items, is_async)
    assert items == list(range(len(items)))
    procs.stop().get(timeout=WAIT)


def test_an_iteration_that_is_left_cancels_the_call(endless: Any) -> None:
    for item in stream(lambda port: endless.send.call_one(port)):
        assert item == "first"
        break
    assert endless.is_cancelled.call_one().get(timeout=WAIT)


def test_a_task_that_is_cancelled_cancels_the_call(endless: Any) -> None:
    async def main() -> None:
        began = asyncio.Event()
        items = stream(lambda port: endless.send.call_one(port))
        task = asyncio.create_task(items_of(items, [], began))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await endless.is_cancelled.call_one()

    asyncio.run(main())


@both
def test_an_item_that_takes_too_long(endless: Any, is_async: bool) -> None:
    items: list[str] = []
    with pytest.raises(TimeoutError, match=r"no item within 0\.5 s"):
        collect(stream(lambda port: endless.send.call_one(port), timeout=0.5), items, is_async)
