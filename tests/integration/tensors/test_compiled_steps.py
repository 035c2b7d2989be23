"""Whole steps under `compile`, as people write them, give the numbers of plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from monarch import compile as compiled
from monarch import inspect, no_mesh, reduce_, to_mesh
from monarch.actor import this_host

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

pytestmark = pytest.mark.torch

CALLS = 7
Made = tuple[Callable[[int], Any], Callable[[Any], Any]]
"""A step, which gets the number of the call, and what compiles a function."""


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"gpus": 1})
    yield mesh
    mesh.stop().get(timeout=60)


class World:
    """Where a step runs: in plain torch, or compiled on a mesh."""

    def __init__(self, procs: Any = None) -> None:
        self.procs = procs
        self.runs: list[int] = []  # of the function, in Python

    def moved(self, value: Any) -> Any:
        return value if self.procs is None else to_mesh(value, self.procs)

    def network(self) -> Any:
        with no_mesh.activate():
            torch.manual_seed(1)
            made = torch.nn.Sequential(
                torch.nn.Linear(4, 6), torch.nn.Dropout(0.0), torch.nn.Tanh(), torch.nn.Linear(6, 2)
            )
        return self.moved(made)

    def data(self, seed: int = 0, rows: int = 8) -> Any:
        with no_mesh.activate():
            torch.manual_seed(seed)
            made = torch.rand(rows, 4), torch.rand(rows, 2)
        return self.moved(made)

    def compiled(self, function: Any) -> Any:
        if self.procs is None:
            return function

        def counted(*args: Any, **kwargs: Any) -> Any:
            runs.append(1)
            return function(*args, **kwargs)

        runs = self.runs
        return compiled(counted)


CASES: dict[str, tuple[Callable[[World], Callable[[int], Any]], int]] = {}


def case(runs: int) -> Any:
    """Add a case whose function runs in Python so often, of `CALLS` calls."""

    def add(function: Any) -> Any:
        CASES[function.__name__] = function, runs
        return function

    return add


def step_of(model: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """Return a step of a training."""

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained(world: World, make: Any, each: Any = None) -> Callable[[int], Any]:
    model, (x, y) = world.network(), world.data()
    optimizer = make(model.parameters())
    run = world.compiled(step_of(model, optimizer))

    def call(number: int) -> Any:
        result = run(x, y)
        if each is not None:
            each(number, optimizer, model)
        return result, list(model.parameters())

    return call


@case(3)
def sgd(world: World) -> Any:
    return trained(world, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


@case(3)
def momentum(world: World) -> Any:
    return trained(world, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))


@case(3)
def adam(world: World) -> Any:
    return trained(world, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))


@case(3)
def other_optimizers(world: World) -> Any:
    calls = [
        trained(world, lambda p: torch.optim.RMSprop(p, lr=0.01)),
        trained(world, lambda p: torch.optim.Adagrad(p, lr=0.01)),
        trained(world, lambda p: torch.optim.NAdam(p, lr=0.01)),
    ]
    return lambda number: [call(number) for call in calls]


@case(3)
def learning_rate_changes(world: World) -> Any:
    def change(number: int, optimizer: Any, _model: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)

    return trained(world, lambda parameters: torch.optim.AdamW(parameters, lr=0.02), change)


@case(3)
def schedule(world: World) -> Any:
    made: list[Any] = []

    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        made.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5))
        return optimizer

    return trained(world, make, lambda *_: made[0].step())


@case(3)
def clipping(world: World) -> Any:
    model, (x, y) = world.network(), world.data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach(), norm

    run = world.compiled(step)
    return lambda _number: (run(x, y), list(model.parameters()))


@case(5)
def other_shapes(world: World) -> Any:
    model = world.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = world.compiled(step_of(model, optimizer))
    batches = [world.data(rows=8), world.data(rows=5)]
    return lambda number: (run(*batches[number % 2]), list(model.parameters()))


@case(2)
def numbers_as_arguments(world: World) -> Any:
    x, y = world.data()

    def mixed(x: Any, y: Any, weight: float, power: float = 2.0) -> Any:
        return (x * weight).sum(1) + (1 - weight) / 3 * y.sum(1) ** power

    run = world.compiled(mixed)
    return lambda number: run(x, y, 0.1 * number, power=1.0 + number)


@case(4)
def a_branch_on_a_number(world: World) -> Any:
    x, _ = world.data()

    def bent(x: Any, limit: float) -> Any:
        return x.clamp(max=limit) * 2 if limit > 0.35 else x - limit

    run = world.compiled(bent)
    return lambda number: run(x, 0.1 * number)


@case(4)
def train_and_eval(world: World) -> Any:
    model, (x, _) = world.network(), world.data()
    seen: list[Any] = []

    def forward(x: Any) -> Any:
        with torch.no_grad():
            return model(x) * (2 if model.training else 3)

    run = world.compiled(forward)

    def call(number: int) -> Any:
        model.train(number % 2 == 0)
        seen.append(number)
        return run(x)

    return call


@case(4)
def under_and_outside_of_no_grad(world: World) -> Any:
    x, _ = world.data()

    def forward(x: Any) -> Any:
        return x * (2 if torch.is_grad_enabled() else 3)

    run = world.compiled(forward)

    def call(number: int) -> Any:
        with torch.set_grad_enabled(number % 2 == 0):
            return run(x)

    return call


@case(4)
def an_exchanged_parameter(world: World) -> Any:
    model, (x, _) = world.network(), world.data()
    other = world.network()

    def forward(x: Any) -> Any:
        with torch.no_grad():
            return model(x)

    run = world.compiled(forward)

    def call(number: int) -> Any:
        if number == 3:
            model[0].weight = torch.nn.Parameter(other[0].weight.detach() * 2)
        return run(x)

    return call


@case(CALLS)
def a_captured_counter(world: World) -> Any:
    x, _ = world.data()
    count = 0

    def counted(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * count

    run = world.compiled(counted)
    return lambda _number: run(x)


@case(2)
def a_counter_that_is_a_tensor(world: World) -> Any:
    x, _ = world.data()
    count = torch.zeros(())

    def counted(x: Any) -> Any:
        count.add_(1)
        return x * (1 - 0.5 ** count.item())

    run = world.compiled(counted)
    return lambda _number: (run(x), count.item())


@pytest.mark.parametrize("name", CASES)
def test_a_step_gives_the_numbers_of_plain_torch(name: str, procs: ProcMesh) -> None:
    make, most = CASES[name]
    expected = copies(make)
    world = World(procs)
    with procs.activate(), warnings.catch_warnings():
        warnings.simplefilter("error")
        call = make(world)
        found = [inspect_all(call(number)) for number in range(CALLS)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert len(world.runs) <= most * (3 if name == "other_optimizers" else 1), "it ran in Python"


def copied(result: Any) -> Any:
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.detach().clone(), result
    )


def copies(make: Any) -> list[Any]:
    call = make(World())
    return [copied(call(number)) for number in range(CALLS)]


def inspect_all(result: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, inspect, result)


@pytest.mark.parametrize(
    "change", [lambda total, x: total.add_(x.sum()), lambda total, _x: reduce_(total, "gpus")]
)
def test_a_number_that_the_processes_have_changed_is_not_read_as_it_was(
    change: Any, procs: ProcMesh
) -> None:
    with procs.activate():
        total, x = torch.zeros(()), torch.rand(2)

        @compiled
        def scaled(x: Any) -> Any:
            total.add_(1)
            change(total, x)
            return x * total.item()

        with pytest.raises(NotImplementedError, match="fetching results"):
            scaled(x)


def test_what_changes_in_each_call_runs_uncompiled_after_a_warning(procs: ProcMesh) -> None:
    runs: list[int] = []

    @compiled
    def rounded(x: Any, number: float) -> Any:
        runs.append(1)
        return x * int(number)

    with procs.activate():
        x = torch.ones(2)
        with pytest.warns(UserWarning, match="has 8 recordings, and this call fits none"):
            found = [inspect(rounded(x, float(number))).tolist() for number in range(12)]
    assert found == [[number, number] for number in range(12)]
    assert len(runs) == 12
