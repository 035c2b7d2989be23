"""Futures and receives under races: one outcome, the same for all waiters, and no message lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.mesh.results.future import RAISED, VALUE, Future, _looks
from monarch._engine.runtime.io.stacks import NO_STACK, stacks
from monarch.actor import Channel

WAIT = 60.0


class Racy(list[Any]):
    """A list of waiters whose resolver runs between the membership test and the removal."""

    def __contains__(self, item: object) -> bool:
        found = super().__contains__(item)
        if found:
            self.remove(item)
        return found


def test_a_time_out_while_the_result_arrives() -> None:
    future: Future[int] = Future._new()
    future._parked = Racy()
    with contextlib.suppress(TimeoutError):
        future.get(timeout=0)
    future._resolve(VALUE, 1)
    assert future.get(timeout=WAIT) == 1


def test_many_threads_and_loops_see_the_same_result() -> None:
    for outcome in ((VALUE, object()), (RAISED, ValueError("no"))):
        future: Future[Any] = Future._new()
        seen: list[Any] = []
        ready = threading.Barrier(13)

        def look(future: Any = future, seen: Any = seen, ready: Any = ready) -> None:
            ready.wait(WAIT)
            seen.append(future.exception(timeout=WAIT) or future.get(timeout=WAIT))

        def look_async(future: Any = future, seen: Any = seen, ready: Any = ready) -> None:
            async def one() -> None:
                try:
                    seen.append(await future)
                except ValueError as error:
                    seen.append(error)

            async def all_of_them() -> None:
                tasks = [asyncio.ensure_future(one()) for _ in range(5)]
                mirror = future.as_asyncio()
                ready.wait(WAIT)
                await asyncio.gather(*tasks)
                error = await asyncio.wait_for(asyncio.wait([mirror]), WAIT) and mirror.exception()
                seen.append(error or mirror.result())

            asyncio.run(all_of_them())

        threads = [threading.Thread(target=look) for _ in range(8)]
        threads += [threading.Thread(target=look_async) for _ in range(4)]
        for thread in threads:
            thread.start()
        ready.wait(WAIT)
        future._resolve(*outcome)
        for thread in threads:
            thread.join(WAIT)
        assert len(seen) == 8 + 4 * 6
        assert all(value is outcome[1] for value in seen)
        assert future._parked == []


def test_a_thread_is_about_to_see_its_result_once_that_is_there() -> None:
    """A failure lets such threads go on first, and does not wait for the others."""
    future: Future[int] = Future._new()
    blocked: Any = SimpleNamespace(
        steps=[SimpleNamespace(code=Future._block.__code__)], variables=[{"self": future}]
    )
    assert _looks(blocked) is None
    future._resolve(VALUE, 1)
    assert _looks(blocked) is True


def test_a_thread_without_a_future_sees_no_result() -> None:
    assert _looks(NO_STACK) is False
    assert _looks(stacks()[threading.get_ident()]) is False


def test_resolving_twice_changes_nothing() -> None:
    future: Future[int] = Future._new()
    assert future._resolve(VALUE, 1)
    assert not future._resolve(RAISED, ValueError())
    assert future.get() == 1


def test_short_time_outs_lose_no_message() -> None:
    """A receive that times out leaves its message for the next receive."""
    port, receiver = Channel[int].open()
    count = 30_000
    sender = threading.Thread(target=lambda: [port.send(number) for number in range(count)])
    sender.start()
    got = []
    while sender.is_alive() or receiver._queue.messages:
        with contextlib.suppress(TimeoutError):
            got.append(receiver.recv().get(timeout=0))
    sender.join()
    with contextlib.suppress(TimeoutError):
        while True:
            got.append(receiver.recv().get(timeout=0))
    assert got == list(range(count))


def test_a_cancelled_receive_takes_no_message() -> None:
    port, receiver = Channel[int].open()

    async def program() -> int:
        waiting = asyncio.ensure_future(asyncio.wait_for(receiver.recv(), WAIT))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        port.send(7)
        return await asyncio.wait_for(receiver.recv(), 5)

    assert asyncio.run(program()) == 7


@pytest.mark.parametrize("how", ["await", "as_asyncio"])
@pytest.mark.parametrize("arrived", [False, True])
def test_a_receive_cancelled_as_its_message_comes_gives_it_back(how: str, arrived: bool) -> None:
    """An arrived message that the loop has not seen yet is given back, too, in its order."""
    port, receiver = Channel[int].open()

    async def observe() -> int:
        future = receiver.recv()
        return await (future if how == "await" else future.as_asyncio())

    async def program() -> list[int]:
        waiting = asyncio.ensure_future(observe())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if arrived:
            port.send(1)
        waiting.cancel()
        if not arrived:
            port.send(1)
        port.send(2)
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
            pytest.fail("the cancellation was swallowed")
        return [await asyncio.wait_for(receiver.recv(), WAIT) for _ in range(2)]

    assert asyncio.run(program()) == [1, 2]


def test_a_message_that_is_given_back_goes_to_the_next_in_line() -> None:
    port, receiver = Channel[int].open()

    async def observe(future: Future[int]) -> int:
        return await future

    async def program() -> tuple[int, int]:
        first = asyncio.ensure_future(observe(receiver.recv()))
        second = asyncio.ensure_future(observe(receiver.recv()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        port.send(1)
        first.cancel()
        got = await asyncio.wait_for(second, WAIT)
        port.send(2)
        return got, await asyncio.wait_for(receiver.recv(), WAIT)

    assert asyncio.run(program()) == (1, 2)


def test_a_receive_that_one_of_two_gives_up_still_waits_for_the_other() -> None:
    port, receiver = Channel[int].open()
    future = receiver.recv()
    got: list[int] = []
    other = threading.Thread(target=lambda: got.append(future.get(timeout=WAIT)))
    other.start()
    while not future._parked:
        pass
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    port.send(7)
    other.join(WAIT)
    assert got == [7]
    assert future.get() == 7


def test_a_receive_that_was_given_up_can_be_asked_again() -> None:
    port, receiver = Channel[int].open()
    future = receiver.recv()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.get(timeout=0)
    port.send(7)
    assert future.get(timeout=WAIT) == 7
    port.send(8)
    assert future.get() == 7
    assert receiver.recv().get(timeout=WAIT) == 8


def test_waits_that_are_given_up_leave_nothing_behind() -> None:
    future: Future[int] = Future._new()

    async def program() -> None:
        for _ in range(20):
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(future, 0.001)
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(future.as_asyncio(), 0.001)

    asyncio.run(program())
    assert future._parked == []


def test_receives_of_many_threads_share_the_messages() -> None:
    port, receiver = Channel[int].open()
    got: list[int] = []

    def consume() -> None:
        while (number := receiver.recv().get(timeout=WAIT)) >= 0:
            got.append(number)

    def produce(first: int) -> None:
        for number in range(first, first + 1000):
            port.send(number)

    consumers = [threading.Thread(target=consume) for _ in range(4)]
    producers = [threading.Thread(target=produce, args=(n * 1000,)) for n in range(4)]
    for thread in consumers + producers:
        thread.start()
    for thread in producers:
        thread.join(WAIT)
    for _ in consumers:
        port.send(-1)
    for thread in consumers:
        thread.join(WAIT)
    assert sorted(got) == list(range(4000))


def test_a_result_for_a_loop_that_is_gone(tmp_path: Any) -> None:
    """The loop's descriptor is closed, and its number may belong to another file by now."""
    future: Future[int] = Future._new()
    blocked: Future[int] = Future._new()

    async def program() -> None:
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(asyncio.shield(future.as_asyncio()), 0)
        task = asyncio.ensure_future(asyncio.wait_for(blocked, WAIT))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(program())
    gc.collect()
    files = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT) for n in range(16)]
    try:
        future._resolve(VALUE, 1)
        blocked._resolve(VALUE, 2)
        assert [os.fstat(fd).st_size for fd in files] == [0] * len(files)
    finally:
        for fd in files:
            os.close(fd)
    assert (future.get(), blocked.get()) == (1, 2)


@pytest.mark.parametrize("bad", [-1, float("inf"), float("nan"), "1"])
def test_impossible_time_outs(bad: Any) -> None:
    with pytest.raises(ValueError, match="invalid timeout"):
        Future._of(1).get(timeout=bad)
