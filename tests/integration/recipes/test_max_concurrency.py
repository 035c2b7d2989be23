"""`max_concurrency`: so many calls of an endpoint run at a time, and others meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, Port, concurrent_endpoint, endpoint
from monarch.recipes import max_concurrency

from .conftest import WAIT

both = max_concurrency(2)


class Model(Actor):
    def __init__(self) -> None:
        self.running: list[str] = []
        self.most = 0
        self.opened = asyncio.Event()

    async def stay(self, name: str) -> str:
        self.running.append(name)
        self.most = max(self.most, len(self.running))
        try:
            await self.opened.wait()
        finally:
            self.running.remove(name)
        return name

    @concurrent_endpoint
    @max_concurrency(3)
    async def complete(self, name: str) -> str:
        """Complete a text."""
        return await self.stay(name)

    @concurrent_endpoint
    @both
    async def embed(self, name: str) -> str:
        return await self.stay(name)

    @concurrent_endpoint
    @both
    async def score(self, name: str) -> str:
        return await self.stay(name)

    @concurrent_endpoint
    @max_concurrency(1)
    async def fail(self) -> None:
        raise ValueError("as told")

    @concurrent_endpoint(explicit_response_port=True)
    @max_concurrency(1)
    async def answer(self, port: Port[str], name: str) -> None:
        port.send(await self.stay(name))

    @endpoint
    async def state(self) -> tuple[list[str], int]:
        """Return which calls run, and how many ran at most, once all tasks had a turn."""
        for _ in range(5):
            await asyncio.sleep(0)
        return sorted(self.running), self.most

    @endpoint
    async def open(self) -> None:
        self.opened.set()


@pytest.fixture
def model(procs: Any) -> Any:
    model = procs.slice(procs=0).spawn("model", Model)
    yield model
    model.stop().get(timeout=WAIT)


def test_so_many_calls_run_at_a_time_and_all_have_their_turn(model: Any) -> None:
    calls = [model.complete.call_one(f"{i:02}") for i in range(20)]
    assert model.state.call_one().get(timeout=WAIT) == (["00", "01", "02"], 3)
    model.open.call_one().get(timeout=WAIT)
    assert [call.get(timeout=WAIT) for call in calls] == [f"{i:02}" for i in range(20)]
    assert model.state.call_one().get(timeout=WAIT) == ([], 3)


def test_methods_with_one_limit_share_it_and_those_of_another_actor_do_not(
    model: Any, procs: Any
) -> None:
    other = procs.slice(procs=0).spawn("other", Model)
    for i in range(3):
        model.embed.broadcast(f"embed {i}")
        model.score.broadcast(f"score {i}")
        other.embed.broadcast(f"embed {i}")
    assert model.state.call_one().get(timeout=WAIT) == (["embed 0", "score 0"], 2)
    assert other.state.call_one().get(timeout=WAIT) == (["embed 0", "embed 1"], 2)
    for each in (model, other):
        each.open.call_one().get(timeout=WAIT)
    other.stop().get(timeout=WAIT)


def test_errors_cancellation_and_answers_by_a_port_free_the_place(model: Any) -> None:
    for _ in range(2):
        with pytest.raises(ActorError, match="as told"):
            model.fail.call_one().get(timeout=WAIT)
    first, waiting, last = (model.answer.call_one(name) for name in ("first", "waiting", "last"))
    assert model.state.call_one().get(timeout=WAIT)[0] == ["first"]
    waiting.cancel()
    model.open.call_one().get(timeout=WAIT)
    assert [first.get(timeout=WAIT), last.get(timeout=WAIT)] == ["first", "last"]


def test_the_method_stays_what_it_is(model: Any) -> None:
    assert Model.complete.__doc__ == "Complete a text."
    with pytest.raises(TypeError, match=r"model.complete\(name\): missing a required argument"):
        model.complete.call_one()


def test_what_a_limit_refuses() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        max_concurrency(0)
    with pytest.raises(TypeError, match=r"max_concurrency\(2\) is for an async def"):
        max_concurrency(2)(len)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stands below @concurrent_endpoint"):
        max_concurrency(2)(Model.complete)  # type: ignore[arg-type]
