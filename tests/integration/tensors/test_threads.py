"""Threads of the script that issue operations on distributed tensors at the same time."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import Stream, coalescing, fetch_shard, inspect, no_mesh, remote
from monarch._engine.runtime.agent.client import client_proc
from monarch._tensors import engine as engine_module
from monarch._tensors.engine import engine_of
from monarch.actor import Actor, endpoint, this_host
from monarch.common._coalescing import compile  # noqa: A004 - the interface's name

pytestmark = pytest.mark.torch

WAIT = 60  # seconds


def together(*works: Callable[[], Any]) -> list[Any]:
    """Return what functions return that run in threads of their own, at the same time."""
    found: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            found[index] = works[index]()
        except BaseException as error:  # raised below
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive(), "it hangs"
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def elsewhere(work: Callable[[], Any]) -> Any:
    """Return what a function returns in another thread, which this one waits for."""
    return together(work)[0]


def train(steps: int, scale: float) -> Any:
    """Return the weights of a small network after some steps, without random numbers."""
    weights = [
        (torch.arange(12.0).reshape(4, 3) - 6) / 20,
        (torch.arange(4.0).reshape(1, 4) - 2) / 4,
    ]
    weights = [(weight * scale).detach().requires_grad_() for weight in weights]
    x = torch.arange(24.0).reshape(8, 3) / 24
    y = x.sum(1, keepdim=True) * scale
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _ in range(steps):
        loss = ((torch.tanh(x @ weights[0].T) @ weights[1].T - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("shared", [True, False], ids=["one mesh", "a mesh each"])
def test_four_threads_train_at_once(shared: bool) -> None:
    procs = this_host().spawn_procs({"gpus": 4})
    meshes = [procs] * 4 if shared else [procs.slice(gpus=slice(i, i + 1)) for i in range(4)]

    def work(rank: int) -> Any:
        with meshes[rank].activate():
            return [inspect(weight) for weight in train(20, 1 + rank / 4)]

    try:
        for found in together(*[lambda rank=rank: (rank, work(rank)) for rank in range(4)]):
            rank, weights = found
            for weight, expected in zip(weights, train(20, 1 + rank / 4), strict=True):
                torch.testing.assert_close(weight, expected)
    finally:
        procs.stop().get(timeout=WAIT)


def test_threads_that_are_the_first_on_a_mesh_share_its_places() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    barrier = threading.Barrier(4)

    def work() -> Any:
        barrier.wait(WAIT)
        with procs.activate():
            return torch.ones(2)

    try:
        assert len({made._place for made in together(*[work] * 4)}) == 1
    finally:
        procs.stop().get(timeout=WAIT)


# -- threads that wait for each other --------------------------------------------------------------


class _Backward(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The identity, whose backward is computed in another thread."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return elsewhere(lambda: gradient * 2)


def in_function(x: Any) -> Any:
    return elsewhere(lambda: x * 2) * 1


def in_backward(x: Any) -> Any:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (_Backward.apply(leaf) * x).sum().backward()
    return leaf.grad


def in_a_hook(x: Any) -> Any:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = leaf * x
        y.register_hook(lambda gradient: elsewhere(lambda: gradient * 2))
        y.sum().backward()
    return leaf.grad


def in_a_hook_of_a_gradient(x: Any) -> Any:
    seen = []
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(
            lambda leaf: seen.append(elsewhere(lambda: leaf.grad * 2))
        )
        (leaf * x).sum().backward()
    return seen[0]


def in_a_checkpoint(x: Any) -> Any:
    def region(leaf: Any) -> Any:
        return elsewhere(lambda: leaf * leaf) * 1

    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(region, leaf, use_reentrant=False)
        y.sum().backward()
    return leaf.grad


def in_saved_tensors_hooks(x: Any) -> Any:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: elsewhere(lambda: saved * 2), lambda packed: packed
        ):
            y = leaf * x
        y.sum().backward()
    return leaf.grad


def in_torch_func(x: Any) -> Any:
    def loss(leaf: Any) -> Any:
        elsewhere(lambda: x * 2)
        return (leaf * leaf).sum()

    return torch.func.grad(loss)(x)


def in_a_data_parallel_thread(x: Any) -> Any:
    """Threads that run at the same time, and issue operations in the same order each time."""
    turns = [threading.Event() for _ in range(4)]

    def work(number: int, part: Any) -> Any:
        assert turns[number].wait(WAIT)
        try:
            return part * 2
        finally:
            turns[number + 1].set()

    turns[0].set()
    works = [functools.partial(work, number, part) for number, part in enumerate(x.chunk(3))]
    return torch.cat(together(*works))


USES = [
    in_function,
    in_backward,
    in_a_hook,
    in_a_hook_of_a_gradient,
    in_a_checkpoint,
    in_saved_tensors_hooks,
    in_torch_func,
    in_a_data_parallel_thread,
]


@pytest.mark.parametrize("use", USES, ids=[use.__name__ for use in USES])
@pytest.mark.parametrize("how", ["plainly", "coalesced", "compiled"])
def test_code_of_the_program_may_wait_for_a_thread(active: Any, use: Any, how: str) -> None:
    """All of these come to twice the tensor, and each waits for another thread."""
    x = torch.arange(1.0, 4.0)
    if how == "coalesced":
        with coalescing():
            results = [use(x)]
    else:
        function = compile(use) if how == "compiled" else use
        results = [function(x), function(x), function(x)]
        x.add_(1)
        results.append(function(x))
    for result, first in zip(results, (1.0, 1.0, 1.0, 2.0), strict=False):
        expected = [2 * first, 2 * first + 2, 2 * first + 4]
        assert inspect(result).tolist() == expected


def test_a_propagator_may_wait_for_a_thread(active: Any) -> None:
    x = torch.ones(3)

    def shape(given: Any) -> Any:
        elsewhere(lambda: x * 3)
        return torch.empty_like(given)

    double = remote(_double, propagate=shape)
    step = compile(lambda given: double(given) + 1)
    assert [inspect(step(x)).tolist() for _ in range(3)] == [[3.0] * 3] * 3


def _double(x: Any) -> Any:
    return x * 2


def test_others_go_on_while_a_function_is_recorded(active: Any) -> None:
    x, other = torch.ones(3), torch.zeros(3)
    recorded = threading.Event()
    done: list[float] = []

    @compile
    def step(given: Any) -> Any:
        made = given * 2
        recorded.set()
        thread.join(WAIT)
        return made + 1

    def work() -> None:
        assert recorded.wait(WAIT)
        with active.activate():
            for _ in range(3):
                other.add_(torch.ones(3))
                done.append(inspect(other).tolist()[0])  # also a fetch is answered meanwhile

    for _ in range(2):  # the second call is recorded, too, for the comparison
        recorded.clear()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert inspect(step(x)).tolist() == [3.0] * 3
        assert not thread.is_alive()
    assert done == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    thread = threading.Thread(target=recorded.clear)
    thread.start()
    assert inspect(step(x + 1)).tolist() == [5.0] * 3
    assert inspect(other).tolist() == [6.0] * 3  # what others did is no part of the recording


def _wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def _make(path: str) -> None:
    open(path, "w").close()


def test_a_thread_that_waits_for_slow_processes_lets_others_issue_operations(
    active: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes wait for what another thread is to issue, on another stream."""
    monkeypatch.setattr(engine_module, "_AHEAD", 0)
    monkeypatch.setattr(engine_module, "_CONFIRM", 4)
    engine, path = active.client, str(tmp_path / "go")
    wait = remote(_wait_for, propagate=lambda _: None)
    make = remote(_make, propagate=lambda _: None)

    def be_ahead() -> Any:
        with active.activate():
            wait(path)
            x = torch.zeros(2)
            for _ in range(2000):
                x = x.add(1)
            return inspect(x).tolist()

    def release() -> None:
        while not engine._excess():
            time.sleep(0.01)
        with active.activate(), Stream("side").activate():
            make(path)
            inspect(torch.ones(1))

    assert together(be_ahead, release)[0] == [2000.0, 2000.0]


def test_two_threads_record_at_once(active: Any) -> None:
    barrier = threading.Barrier(2)

    @compile
    def step(given: Any, count: int) -> Any:
        barrier.wait(WAIT)  # both record: the first call, and the second for the comparison
        for _ in range(count):
            given = given * 2 + 1
        return given

    def work(count: int) -> list[Any]:
        with active.activate():
            x = torch.zeros(2)
            return [inspect(step(x, count)).tolist()[0] for _ in range(2)]

    assert together(lambda: work(2), lambda: work(3)) == [[3.0, 3.0], [7.0, 7.0]]


def test_what_was_not_sent_cannot_be_fetched_by_another_thread(active: Any) -> None:
    x = torch.ones(3)
    with coalescing():
        made = x * 2
        with pytest.raises(NotImplementedError, match="fetch after it"):
            elsewhere(lambda: fetch_shard(made))
        assert elsewhere(lambda: inspect(x)).tolist() == [1.0] * 3  # what is older can
    assert inspect(made).tolist() == [2.0] * 3


class Adds(Actor):
    @endpoint
    def add(self, x: Any) -> Any:
        return float(x.sum())  # (of a local tensor)


def test_what_was_not_sent_cannot_be_given_to_an_actor_by_another_thread(active: Any) -> None:
    actors = active.client.procs.spawn("adds", Adds)
    x = torch.ones(3)
    with coalescing():
        made = x * 2
        with pytest.raises(NotImplementedError, match="actors with tensors"):
            elsewhere(lambda: actors.add.call(made))
        found = elsewhere(lambda: actors.add.call(x).get(timeout=WAIT))
        assert set(found.values()) == {3.0}
    assert set(actors.add.call(made).get(timeout=WAIT).values()) == {6.0}


def test_a_tensor_that_a_block_uses_is_released_by_another_thread(active: Any) -> None:
    x = [torch.ones(1000) * 3]
    with coalescing():
        made = x[0] + 1

        def release() -> None:
            x.clear()
            with active.activate():
                inspect(torch.zeros(1) + 1)

        elsewhere(release)
    assert inspect(made).tolist() == [4.0] * 1000


def test_a_block_that_fails_drops_what_another_thread_made_of_it(active: Any) -> None:
    x = torch.ones(3)
    made: list[Any] = []

    def block() -> None:
        with coalescing():
            made.append(x * 2)
            made.append(elsewhere(lambda: made[0] + 1))
            raise KeyError

    with pytest.raises(KeyError):
        block()
    for dropped in made:
        with pytest.raises(TypeError, match="DROPPED"):
            dropped + 1
    assert inspect(x * 2).tolist() == [2.0] * 3


def test_an_engine_that_has_ended_is_not_asked_before_calls() -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    with procs.activate():
        assert inspect(torch.ones(1)).item() == 1.0
    engine = engine_of(procs)
    assert engine.push in client_proc().encode_call.before  # type: ignore[attr-defined]
    procs.stop().get(timeout=WAIT)
    for thread in threading.enumerate():
        if getattr(thread, "_target", None) == engine._flush_late:
            thread.join(WAIT)
    assert engine.push not in getattr(client_proc().encode_call, "before", ())


def test_local_work_of_a_thread_is_local(active: Any) -> None:
    assert type(elsewhere(lambda: torch.ones(2))) is torch.Tensor
    with no_mesh.activate():
        assert type(torch.ones(2)) is torch.Tensor
