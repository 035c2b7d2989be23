"""Calls from other threads reach an event loop: all of them, in order, in batches."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from monarch._engine.runtime.io.bridge import LoopGate, gate_of, new_loop

WAIT = 60.0


@pytest.fixture(params=["eventfd", "pipe"], autouse=True)
def wakeups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd")


@pytest.fixture(params=[asyncio.new_event_loop, new_loop], ids=["program", "actor"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    """Run a loop in its own thread: as programs make one, or as actors do."""
    loop: asyncio.AbstractEventLoop = request.param()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT)
    loop.close()


def gate_on(loop: asyncio.AbstractEventLoop) -> LoopGate:
    async def make() -> LoopGate:
        return gate_of(loop)

    return asyncio.run_coroutine_threadsafe(make(), loop).result(WAIT)


def settle(gate: LoopGate) -> None:
    event = threading.Event()
    gate.post(lambda _: event.set(), None)
    assert event.wait(WAIT)


def test_posts_arrive_in_order_on_the_loops_thread(loop: asyncio.AbstractEventLoop) -> None:
    gate = gate_on(loop)
    seen: list[tuple[int, Any]] = []
    for number in range(5000):
        gate.post(lambda n: seen.append((n, asyncio.get_running_loop())), number)
    settle(gate)
    assert seen == [(number, loop) for number in range(5000)]


def test_posts_of_many_threads_each_in_order_and_none_lost(
    loop: asyncio.AbstractEventLoop,
) -> None:
    gate = gate_on(loop)
    seen: list[tuple[int, int]] = []

    def post(who: int) -> None:
        for number in range(3000):
            gate.post(seen.append, (who, number))

    threads = [threading.Thread(target=post, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(gate)
    assert len(seen) == 18_000
    for who in range(6):
        assert [number for other, number in seen if other == who] == list(range(3000))


def test_each_post_to_an_idle_loop_wakes_it(loop: asyncio.AbstractEventLoop) -> None:
    gate = gate_on(loop)
    for _ in range(2000):
        settle(gate)


def test_a_batch_costs_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = os.write

    def counted(fd: int, data: bytes) -> int:
        writes.append(fd)
        return write(fd, data)

    async def program() -> list[int]:
        gate = gate_of(asyncio.get_running_loop())
        seen: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", counted)
            for number in range(1000):  # this call keeps the loop busy
                gate.post(seen.append, number)
        arrived = asyncio.get_running_loop().create_future()
        gate.post(arrived.set_result, None)
        await arrived
        return seen

    assert asyncio.run(program()) == list(range(1000))
    assert len(writes) == 1


def test_posts_from_a_callback_run_too(loop: asyncio.AbstractEventLoop) -> None:
    gate = gate_on(loop)
    seen: list[int] = []

    def again(left: int) -> None:
        seen.append(left)
        if left:
            gate.post(again, left - 1)

    gate.post(again, 100)
    for _ in range(102):
        settle(gate)
    assert seen == list(range(100, -1, -1))


@pytest.mark.internal_errors
def test_a_callback_that_raises_does_not_hold_back_the_others(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """A callback behind the failing one may be the only one that ever wakes a waiting thread."""
    told: list[Any] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    gate = gate_on(loop)
    seen = threading.Event()

    async def at_once() -> None:
        gate.post(lambda _: 1 / 0, None)
        gate.post(lambda _: seen.set(), None)

    asyncio.run_coroutine_threadsafe(at_once(), loop).result(WAIT)
    assert seen.wait(WAIT)
    assert [type(error) for error in told] == [ZeroDivisionError]


def test_one_gate_per_loop(loop: asyncio.AbstractEventLoop) -> None:
    other = asyncio.new_event_loop()
    try:
        assert gate_on(loop) is gate_on(loop)
        assert gate_of(other) is not gate_on(loop)
    finally:
        other.close()


def test_loops_do_not_get_each_others_posts() -> None:
    count, seen = 4, {number: [] for number in range(4)}  # type: ignore[var-annotated]
    gates: dict[int, LoopGate] = {}
    ready, sent = threading.Barrier(count + 1), threading.Event()

    def run(number: int) -> None:
        async def program() -> None:
            mine = asyncio.get_running_loop()
            gates[number] = gate_of(mine)
            await asyncio.to_thread(ready.wait, WAIT)
            await asyncio.to_thread(sent.wait, WAIT)
            done = mine.create_future()
            gates[number].post(done.set_result, None)
            await done

        asyncio.run(program())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    ready.wait(WAIT)
    for item in range(1000):
        for number in range(count):
            gates[number].post(seen[number].append, (threading.get_ident(), item))
    sent.set()
    for thread in threads:
        thread.join(WAIT)
    expected = [(threading.get_ident(), item) for item in range(1000)]
    assert all(seen[number] == expected for number in range(count))


def test_posts_to_a_closed_loop_are_taken_and_forgotten() -> None:
    loop = asyncio.new_event_loop()
    gate = gate_of(loop)
    loop.close()
    seen: list[int] = []
    for number in range(1000):
        gate.post(seen.append, number)
    assert seen == []


def test_a_gate_whose_loop_is_gone_writes_into_nobodys_file(tmp_path: Any) -> None:
    loop = asyncio.new_event_loop()
    gate = gate_of(loop)
    loop.close()
    del loop
    gc.collect()
    files = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT) for n in range(8)]
    try:
        with contextlib.suppress(OSError):
            gate.post(print, "never")
        assert [os.fstat(fd).st_size for fd in files] == [0] * 8
    finally:
        for fd in files:
            os.close(fd)


def test_gates_go_with_their_loops() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async def program() -> None:
        gate_of(asyncio.get_running_loop()).post(print, "")

    before = descriptors()
    for _ in range(20):
        asyncio.run(program())
    assert descriptors() == before


def test_closing_twice() -> None:
    loop = asyncio.new_event_loop()
    gate = LoopGate(loop)
    loop.remove_reader(gate._read_fd)
    gate.close()
    gate.close()
    loop.close()


def turns_of_a_wait(loop: asyncio.AbstractEventLoop) -> int:
    """Return how often a loop turns until a task resumes that a post of another thread wakes."""

    async def wait() -> int:
        gate = gate_of(loop)
        await asyncio.sleep(0)
        arrived = loop.create_future()
        poster = threading.Thread(target=gate.post, args=(arrived.set_result, None))
        with pytest.MonkeyPatch.context() as patch:
            turns: list[int] = []
            selector: Any = loop._selector  # type: ignore[attr-defined]
            select = selector.select

            def counted(timeout: float | None) -> Any:
                turns.append(1)
                return select(timeout)

            patch.setattr(selector, "select", counted)
            loop.call_soon(poster.start)
            await arrived
        poster.join(WAIT)
        return len(turns)

    try:
        return loop.run_until_complete(asyncio.wait_for(wait(), WAIT))
    finally:
        loop.close()


def test_a_post_to_an_actors_loop_costs_one_turn_less() -> None:
    assert turns_of_a_wait(new_loop()) == turns_of_a_wait(asyncio.new_event_loop()) - 1


def test_posts_and_other_descriptors_both_get_their_turn(loop: asyncio.AbstractEventLoop) -> None:
    gate = gate_on(loop)
    read_fd, write_fd = os.pipe()
    seen: list[str] = []
    both = threading.Event()

    def note(what: str) -> None:
        seen.append(what)
        if len(seen) == 2:
            both.set()

    def read() -> None:
        loop.remove_reader(read_fd)
        note("descriptor")

    async def at_once() -> None:
        loop.add_reader(read_fd, read)
        os.write(write_fd, b"x")
        gate.post(note, "post")

    asyncio.run_coroutine_threadsafe(at_once(), loop).result(WAIT)
    assert both.wait(WAIT)
    assert {"descriptor", "post"} == set(seen)
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.internal_errors
def test_a_callback_that_is_cancelled_does_not_end_the_loop(
    loop: asyncio.AbstractEventLoop,
) -> None:
    loop.set_exception_handler(lambda *_: None)
    gate = gate_on(loop)

    def cancel(_: None) -> None:
        raise asyncio.CancelledError

    gate.post(cancel, None)
    settle(gate)


def test_an_actors_loop_keeps_context_variables_apart(loop: asyncio.AbstractEventLoop) -> None:
    """A callback sets them for itself and for later callbacks, as with any reader."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    gate = gate_on(loop)
    gate.post(variable.set, 1)
    settle(gate)

    async def look() -> int:
        return variable.get()

    assert asyncio.run_coroutine_threadsafe(look(), loop).result(WAIT) == 0


@pytest.mark.filterwarnings("ignore:'?asyncio.*[pP]olicy:DeprecationWarning")
def test_a_policy_of_the_program_makes_the_loops() -> None:
    class Loop(asyncio.SelectorEventLoop):
        pass

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return Loop()

    asyncio.set_event_loop_policy(Policy())
    try:
        loop = new_loop()
    finally:
        asyncio.set_event_loop_policy(None)
    assert isinstance(loop, Loop)
    loop.close()
