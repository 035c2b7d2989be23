"""`Queue`: who waits, who gives up, who is served first; from scripts, actors and other queues."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.actor import Actor, SupervisionError, endpoint, this_host
from monarch.recipes import Closed, Queue
from monarch.testing import explore

from .conftest import WAIT

Made = Callable[..., Queue[Any]]


@pytest.fixture
def made() -> Iterator[Callable[..., Queue[Any]]]:
    """Yield a function that makes queues, which are shut down after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Queue(*args, **kwargs))


class User(Actor):
    """Uses a queue that it is sent, from a plain and from an async endpoint."""

    @endpoint
    def fill(self, items: Queue[Any], count: int) -> None:
        for i in range(count):
            items.put(i, timeout=WAIT)

    @endpoint
    def drain(self, items: Queue[Any]) -> list[Any]:
        return list(items)


class AsyncUser(Actor):
    @endpoint
    async def fill(self, items: Queue[Any], count: int) -> None:
        for i in range(count):
            await items.put_async(i, timeout=WAIT)

    @endpoint
    async def drain(self, items: Queue[Any]) -> list[Any]:
        return [item async for item in items]


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("kind", [User, AsyncUser])
def test_producers_and_consumers_in_processes(
    procs: Any, made: Made, kind: type[Any], here: bool
) -> None:
    """The items of both producers arrive once each, and each producer's in its order."""
    items = made(maxsize=2, procs=None if here else procs.slice(procs=0))
    users: Any = procs.spawn("users", kind)
    drained = users.slice(procs=1).drain.call_one(items)
    # The other user fills it; so does this script, at the same time.
    filled = users.slice(procs=0).fill.call_one(items, 20)
    for i in range(20):
        items.put(100 + i, timeout=WAIT)
    filled.get(timeout=WAIT)
    items.close()
    found = drained.get(timeout=WAIT)
    assert [i for i in found if i < 100] == list(range(20))
    assert [i for i in found if i >= 100] == list(range(100, 120))
    users.stop().get(timeout=WAIT)


def test_limits_of_time_and_size(procs: Any, made: Made) -> None:
    items = made(maxsize=1)
    with pytest.raises(queue.Empty, match="empty for 0 s"):
        items.get_nowait()
    with pytest.raises(queue.Empty, match=r"empty for 0\.01 s"):
        items.get(timeout=0.01)
    items.put("a")
    with pytest.raises(queue.Full, match="has had 1 items for 0 s"):
        items.put_nowait("b")
    with pytest.raises(queue.Full):
        items.put("b", timeout=0.01)
    assert items.get() == "a"
    assert items.qsize() == 0
    items.put("c", timeout=0.0)
    assert items.get_batch(5) == ["c"]
    with pytest.raises(ValueError, match="at least one item"):
        items.get_batch(0)
    with pytest.raises(ValueError, match="must not be negative"):
        Queue(maxsize=-1)
    with pytest.raises(ValueError, match="one process, and the mesh has 2"):
        Queue(procs=procs)


def test_closing_ends_those_who_wait(made: Made) -> None:
    items = made(maxsize=1)
    items.put(1)
    outcomes: queue.Queue[Any] = queue.Queue()

    def put() -> None:
        try:
            items.put(2)
        except Closed as error:
            outcomes.put(error)

    waiting = threading.Thread(target=put)
    waiting.start()
    while items._actor.waiting.call_one().get() != (0, 1):
        time.sleep(0.005)
    items.close()
    waiting.join(WAIT)
    assert "takes no more items" in str(outcomes.get(timeout=WAIT))
    with pytest.raises(Closed, match="takes no more"):
        items.put(3)
    assert list(items) == [1]
    with pytest.raises(Closed, match="and is empty"):
        items.get()
    items.close()


def test_a_cancelled_getter_gets_nothing(made: Made) -> None:
    """Its request is taken back, and an item that is on its way comes first again."""
    items = made()

    async def main() -> list[int]:
        getters = [asyncio.ensure_future(items.get_async()) for _ in range(3)]
        while await items._actor.waiting.call_one() != (3, 0):
            pass
        getters[0].cancel()
        await asyncio.wait([getters[0]])
        await items.put_async(1)
        await items.put_async(2)
        return [await getters[1], await getters[2]]

    assert asyncio.run(main()) == [1, 2]

    async def race() -> list[int]:
        for i in range(100):
            getter = asyncio.ensure_future(items.get_async())
            await asyncio.sleep(0)
            put = asyncio.ensure_future(items.put_async(i))
            for _ in range(i % 7):
                await asyncio.sleep(0)
            getter.cancel()
            await asyncio.wait([getter])
            await put
            if getter.cancelled():
                assert await items.get_async(timeout=WAIT) == i
            else:
                assert getter.result() == i
        return []

    asyncio.run(race())


def test_ctrl_c_takes_the_request_back(made: Made) -> None:
    items = made()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while items._actor.waiting.call_one().get() != (1, 0):
            time.sleep(0.005)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        items.get()
    items.put(7)
    assert items.get(timeout=WAIT) == 7


def test_the_process_of_the_items_exits() -> None:
    home = this_host().spawn_procs({"procs": 1})
    items = Queue[int](procs=home)
    items.put(1)
    home.stop().get(timeout=WAIT)
    with pytest.raises(SupervisionError):
        items.get()


def test_a_consumer_that_exits_does_not_take_later_items(procs: Any, made: Made) -> None:
    items = made()
    short = this_host().spawn_procs({"procs": 1})
    drained = short.spawn("users", User).drain.call_one(items)
    while items._actor.waiting.call_one().get() != (1, 0):
        time.sleep(0.005)
    short.stop(timeout=1.0).get(timeout=WAIT)
    with pytest.raises(SupervisionError):
        drained.get(timeout=WAIT)
    while items._actor.waiting.call_one().get() != (0, 0):
        time.sleep(0.005)
    items.put(1)
    assert items.get(timeout=WAIT) == 1


def test_many_seeds() -> None:
    """Under any order of events each item arrives once, and every wait ends."""

    def main(hosts: Any) -> None:
        procs = hosts.spawn_procs({"procs": 2})
        items = Queue[Any](maxsize=1)
        users: Any = procs.spawn("users", AsyncUser).flatten("rank")
        drained = [users.slice(rank=rank).drain.call_one(items) for rank in (0, 2)]
        filled = [users.slice(rank=rank).fill.call_one(items, 5) for rank in (1, 3)]
        for call in filled:
            call.get()
        items.close()
        found = [item for call in drained for item in call.get()]
        assert sorted(found) == sorted([*range(5), *range(5)])

    explore(main, seeds=range(30), hosts=2, time_limit=600.0)
