"""Distributed tensors as arguments of actors on the same processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import inspect, remote
from monarch.actor import Actor, ActorError, ProcMesh, endpoint, this_host

pytestmark = pytest.mark.torch


class Keeper(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def take(self, value: Any, rest: Any = None) -> Any:
        self.seen.append(value.tolist() if isinstance(value, torch.Tensor) else value)
        return self.seen[-1], None if rest is None else rest["inner"][0].tolist()

    @endpoint
    def all(self) -> list[Any]:
        return self.seen


class AsyncKeeper(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    async def take(self, value: Any, rest: Any = None) -> Any:
        self.seen.append(value.tolist() if isinstance(value, torch.Tensor) else value)
        return self.seen[-1], None if rest is None else rest["inner"][0].tolist()

    @endpoint
    async def all(self) -> list[Any]:
        return self.seen


@pytest.fixture(params=[Keeper, AsyncKeeper])
def keepers(request: pytest.FixtureRequest, procs: ProcMesh) -> Iterator[Any]:
    actors = procs.spawn("keepers", request.param)
    yield actors
    actors.stop().get(timeout=60)


def test_each_actor_gets_the_tensor_of_its_process(active: Any, keepers: Any) -> None:
    rank = active.process_idx()
    answers = keepers.take.call(rank + 1, rest={"inner": [rank * 2]}).get(timeout=60)
    assert [value for _, value in answers.items()] == [(1, 0), (2, 2), (3, 4), (4, 6)]


def test_slices_and_chosen_actors_do_not_hang(active: Any, keepers: Any) -> None:
    rank = active.process_idx()
    assert keepers.slice(host=1, gpu=0).take.call_one(rank).get(timeout=60) == (2, None)
    assert keepers.take.choose(rank).get(timeout=60)[0] in range(4)
    part = rank.slice_mesh(host=1).to_mesh(active.slice(host=1))
    assert keepers.slice(host=1, gpu=1).take.call_one(part).get(timeout=60) == (3, None)
    with pytest.raises(ValueError, match="must be located on the same process as the actor"):
        keepers.take.call(part)


def test_calls_are_handled_in_the_order_of_the_program(active: Any, keepers: Any) -> None:
    slow = remote(_slow, propagate=lambda x: x.clone())
    for number in range(3):
        keepers.take.broadcast(slow(active.rank("gpu") * 0 + number))
        keepers.take.broadcast(f"after {number}")
    seen = keepers.slice(host=0, gpu=0).all.call_one().get(timeout=60)
    assert seen == [0, "after 0", 1, "after 1", 2, "after 2"]


def _slow(x: Any) -> Any:
    total = torch.ones(300, 300)
    for _ in range(20):
        total = total @ total / 300
    return x.clone()


def test_a_lost_tensor_fails_the_call_and_not_the_actor(active: Any, keepers: Any) -> None:
    lost = remote(_fail, propagate=lambda x: x.clone())(torch.ones(2))
    with pytest.raises(ActorError, match="not today"):
        keepers.take.call(lost).get(timeout=60)
    answers = keepers.take.call(torch.ones(1)).get(timeout=60)
    assert [value for _, value in answers.items()] == [([1.0], None)] * 4
    with pytest.raises(Exception, match="not today"):
        inspect(lost)


def _fail(x: Any) -> Any:
    raise ValueError("not today")


def test_actors_on_other_processes_are_refused(active: Any) -> None:
    others = this_host().spawn_procs({"gpus": 1})
    keeper = others.spawn("keeper", Keeper)
    with pytest.raises(ValueError, match="must be located on the same process"):
        keeper.take.call(torch.ones(1))
    others.stop().get(timeout=60)
