"""Distributed tensors as arguments of actors on the same processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import coalescing, get_active_mesh, inspect, no_mesh, remote
from monarch.actor import Actor, ActorError, ProcMesh, as_endpoint, endpoint, this_host
from monarch.mesh_controller import RemoteException

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
    with pytest.raises(ActorError, match="not today") as failed:
        keepers.take.call(lost).get(timeout=60)
    error = failed.value
    assert isinstance(error, RemoteException)
    assert isinstance(error.original, ValueError)
    assert error.controller_frames[-1].name == "test_a_lost_tensor_fails_the_call_and_not_the_actor"
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


def test_an_endpoint_that_raises_names_the_call_and_the_actor_lives(active: Any) -> None:
    models = get_active_mesh().client.procs.spawn("models", Model, 2)
    with pytest.raises(RemoteException, match="odd") as failed:
        models.refuse.call(torch.ones(1)).get(timeout=60)
    assert isinstance(failed.value, ActorError)
    assert isinstance(failed.value.original, ArithmeticError)
    assert failed.value.controller_frames[-1].line.strip().startswith("models.refuse.call")
    assert "in refuse" in failed.value.worker_error_string
    assert models.calls.call().get(timeout=60).item(host=0, gpu=0) == ["refuse"]
    models.stop().get(timeout=60)


def test_tensors_are_arguments_of_a_constructor(active: Any, procs: ProcMesh) -> None:
    models = procs.spawn("models", Model, active.process_idx() * 10)
    weights = models.weight.call(torch.ones(1)).get(timeout=60)
    with no_mesh.activate():
        assert [weight.item() for _, weight in weights.items()] == [0, 10, 20, 30]
        local = torch.ones(2)
    # Local tensors in results and arguments are no operations of the active mesh.
    assert weights.item(host=0, gpu=1).shape == ()
    assert "tensor(30)" in repr(models.weight.call(local).get(timeout=60))
    models.stop().get(timeout=60)


class Model(Actor):
    def __init__(self, weight: Any) -> None:
        self._weight = weight
        self._calls: list[str] = []

    @endpoint
    def weight(self, x: Any) -> Any:
        return self._weight

    @endpoint(propagate=lambda x: x.clone())
    def forward(self, x: Any) -> Any:
        self._calls.append("forward")
        return x * self._weight

    @endpoint(propagate=lambda: {"all": [torch.empty(3), "text"]})
    def make(self) -> Any:
        return {"all": [torch.full((3,), float(self._weight)), "text"]}

    @endpoint(propagate=lambda x: x.add_(1))
    def add(self, x: Any) -> Any:
        return x.add_(1)

    @endpoint(propagate="inspect")
    def note(self, text: str, x: Any) -> None:
        self._calls.append(text)

    @endpoint(propagate=lambda x: x.clone())
    def refuse(self, x: Any) -> Any:
        self._calls.append("refuse")
        raise ArithmeticError("odd")

    @endpoint(propagate=lambda x: x.clone())
    def lie(self, x: Any) -> Any:
        return x.sum()

    @endpoint
    def unknown(self, x: Any) -> Any:
        return x

    @endpoint
    def calls(self) -> list[str]:
        return self._calls

    def plain(self, x: Any) -> Any:
        return x - 1


class AsyncModel(Actor):
    @endpoint(propagate=lambda x: x.clone())
    async def forward(self, x: Any) -> Any:
        return x * 2

    @endpoint(propagate=lambda x: x.clone())
    async def refuse(self, x: Any) -> Any:
        raise ArithmeticError("odd")


@pytest.fixture
def models(procs: ProcMesh) -> Iterator[Any]:
    actors = procs.spawn("models", Model, 3)
    yield actors
    actors.stop().get(timeout=60)


def test_results_of_rref_are_tensors_for_further_operations(active: Any, models: Any) -> None:
    x = active.process_idx() - 2.0
    y = torch.relu(models.forward.rref(x)) + 1
    assert [inspect(y, host=h, gpu=g).item() for h in range(2) for g in range(2)] == [1, 1, 1, 4]
    made = models.make.rref()["all"]
    assert made[1] == "text"
    assert inspect(made[0] + 1).tolist() == [4, 4, 4]
    assert inspect(as_endpoint(models.plain, propagate=lambda x: x.clone()).rref(x)).item() == -3
    asynchronous = active.client.procs.spawn("models", AsyncModel)
    assert inspect(asynchronous.forward.rref(x) + 0).item() == -4
    with pytest.raises(RemoteException, match="odd"):
        inspect(asynchronous.refuse.rref(x))
    asynchronous.stop().get(timeout=60)


def test_rref_of_a_slice_of_actors_is_on_a_slice_of_the_mesh(active: Any, models: Any) -> None:
    x = active.process_idx() * 1.0
    y = models.slice(host=1).forward.rref(x)
    assert y.mesh is active.slice(host=1)
    assert [inspect(y, gpu=g).item() for g in range(2)] == [6, 9]
    one = models.slice(host=0, gpu=1).forward.rref(x)
    assert inspect(one + 1).item() == 4


def test_rref_counts_what_an_endpoint_writes(active: Any, models: Any) -> None:
    x = torch.zeros(2)
    version = x._version
    view = x[:1]
    y = models.add.rref(x)
    assert x._version > version
    assert [t.tolist() for t in inspect((x, y, view))] == [[1, 1], [1, 1], [1]]


def test_rref_and_calls_are_handled_in_the_order_of_the_program(active: Any, models: Any) -> None:
    slow = remote(_slow, propagate=lambda x: x.clone())
    for number in range(3):
        assert models.note.rref(f"rref {number}", slow(torch.ones(1))) is None
        models.note.broadcast(f"plain {number}", None)
    seen = models.slice(host=0, gpu=0).calls.call_one().get(timeout=60)
    assert seen == ["rref 0", "plain 0", "rref 1", "plain 1", "rref 2", "plain 2"]


def test_an_rref_that_fails_spoils_its_result_only(active: Any, models: Any) -> None:
    x = torch.ones(2)
    bad = models.refuse.rref(x)
    good = models.forward.rref(x)
    with pytest.raises(RemoteException, match="odd") as failed:
        inspect(bad + 1)
    assert isinstance(failed.value.original, ArithmeticError)
    assert failed.value.controller_frames[-1].line.strip() == "bad = models.refuse.rref(x)"
    assert inspect(good).tolist() == [3, 3]
    lost = remote(_fail, propagate=lambda x: x.clone())(x)
    with pytest.raises(RemoteException, match="not today"):
        inspect(models.forward.rref(lost))
    with pytest.raises(RemoteException, match=r"promised \[2\]"):
        inspect(models.lie.rref(x))
    assert inspect(models.forward.rref(x)).tolist() == [3, 3]
    seen = models.slice(host=0, gpu=0).calls.call_one().get(timeout=60)
    assert seen == ["refuse", "forward", "forward"]


def test_what_rref_refuses(active: Any, models: Any) -> None:
    x = torch.ones(1)
    with pytest.raises(NotImplementedError, match=r"models\.unknown\.rref\(\) cannot know"):
        models.unknown.rref(x)
    with pytest.raises(TypeError, match=r"models\.forward\(x\)"):
        models.forward.rref(x, x)
    part = x.slice_mesh(host=1).to_mesh(active.slice(host=1))
    with pytest.raises(ValueError, match="must be located on the same process as the actor"):
        models.forward.rref(part)
    with coalescing(), pytest.raises(NotImplementedError, match="in a coalescing block"):
        models.forward.rref(x)
    assert inspect(models.forward.rref(x)).item() == 3


def test_an_rref_of_actors_that_ended_is_an_error(active: Any, procs: ProcMesh) -> None:
    ended = procs.spawn("ended", Model, 1)
    ended.stop().get(timeout=60)
    lost = ended.forward.rref(torch.ones(1))
    with pytest.raises(RemoteException, match="ended"):
        inspect(lost)
    assert inspect(torch.ones(1) + 1).item() == 2


def test_a_plain_call_sends_the_operations_before_it(
    active: Any, procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a call they are sent when 256 are there, or after a time that is long here."""
    monkeypatch.setattr("monarch._tensors.engine._DELAY", 3600.0)
    waiters = procs.spawn("waiters", Waiter)
    x = torch.ones(1) + 1  # begins the wait of the thread that sends
    for _ in range(3):
        remote(_reach, propagate="inspect")(x)
        assert [reached for _, reached in waiters.wait.call().get(timeout=60).items()] == [True] * 4
    active.client._pause.set()
    active.client._pause.clear()
    waiters.stop().get(timeout=60)


_reached = threading.Event()


def _reach(x: Any) -> None:
    _reached.set()


class Waiter(Actor):
    @endpoint
    def wait(self) -> bool:
        found = _reached.wait(50)
        _reached.clear()
        return found
