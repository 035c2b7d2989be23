"""Gradients pass through reductions and copies as through those of torch.distributed.nn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import inspect, reduce, slice_mesh

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:to_mesh copies to several processes"),
]

PLACES = [(host, gpu) for host in range(2) for gpu in range(2)]
INPUTS = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank for rank in range(4)]
FACTORS = [2.0 + rank for rank in range(4)]  # of the loss of each process


def given(procs: ProcMesh) -> tuple[Any, Any]:
    """Return an input of each process, and the factor of its loss."""
    rank = 2 * procs.rank_tensor("host") + procs.rank_tensor("gpu")
    x = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank).requires_grad_()
    return x, 2.0 + rank


def expected(combine: Any) -> list[Any]:
    """Return the gradients of the sum of all losses; `combine` gives each process's result."""
    inputs = [x.clone().requires_grad_() for x in INPUTS]
    results = combine(inputs)
    loss = sum((result**2 * factor).sum() for result, factor in zip(results, FACTORS, strict=True))
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def along_gpu(inputs: list[Any], rank: int) -> list[Any]:
    return inputs[:2] if rank < 2 else inputs[2:]


@pytest.mark.parametrize(
    ("kind", "scatter", "combine"),
    [
        ("sum", False, lambda parts, _own: sum(parts)),
        ("avg", False, lambda parts, _own: sum(parts) / 2),
        ("stack", False, lambda parts, _own: torch.stack(parts)),
        ("sum", True, lambda parts, own: sum(parts)[own]),
        ("avg", True, lambda parts, own: (sum(parts) / 2)[own]),
        ("stack", True, lambda parts, own: torch.stack([part[own] for part in parts])),
    ],
)
def test_a_reduction(kind: str, scatter: bool, combine: Any, procs: ProcMesh) -> None:
    wanted = expected(
        lambda inputs: [combine(along_gpu(inputs, rank), rank % 2) for rank in range(4)]
    )
    with procs.activate():
        x, factor = given(procs)
        (reduce(x, "gpu", kind, scatter=scatter) ** 2 * factor).sum().backward()
        for rank, (host, gpu) in enumerate(PLACES):
            torch.testing.assert_close(inspect(x.grad, host=host, gpu=gpu), wanted[rank])


def test_a_reduction_without_a_gradient_says_which_have_one(procs: ProcMesh) -> None:
    with procs.activate():
        x, _ = given(procs)
        with pytest.raises(TypeError, match="sum, avg, stack"):
            reduce(x, "gpu", "max")


def test_a_copy_of_a_part_to_another_part(procs: ProcMesh) -> None:
    with procs.activate():
        x, factor = given(procs)
        second = x.mesh.slice(host=1)
        there = slice_mesh(x, host=0).to_mesh(second)
        with second.activate():
            loss = (there**2 * slice_mesh(factor, host=1).to_mesh(second)).sum()
        loss.backward()
        for rank, (host, gpu) in enumerate(PLACES):
            wanted = (
                2 * INPUTS[rank] * FACTORS[2 + gpu] if host == 0 else torch.zeros_like(INPUTS[0])
            )
            torch.testing.assert_close(inspect(x.grad, host=host, gpu=gpu), wanted)


def test_a_copy_to_several_processes_adds_up_what_comes_back(procs: ProcMesh) -> None:
    with procs.activate():
        x, factor = given(procs)
        there = slice_mesh(x, host=0).to_mesh(x.mesh)
        (there**2 * factor).sum().backward()
        for rank, (host, gpu) in enumerate(PLACES):
            total = FACTORS[gpu] + FACTORS[2 + gpu]
            wanted = 2 * INPUTS[rank] * total if host == 0 else torch.zeros_like(INPUTS[0])
            torch.testing.assert_close(inspect(x.grad, host=host, gpu=gpu), wanted)
