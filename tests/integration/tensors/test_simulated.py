"""A simulated program has the metadata of the same program on processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch import Simulator, Stream, inspect
from monarch.actor import Actor, ProcMesh, endpoint

pytestmark = [pytest.mark.torch, pytest.mark.slow]

STEPS = ["add", "type", "mm", "view", "write", "stack", "sum", "copy", "borrow", "grad", "grow"]


def simulated() -> Any:
    return Simulator(2, 2, simulate_mode="simulate_with_report_only").mesh


def run(mesh: Any, steps: list[tuple[str, int]]) -> list[Any]:
    """Run a program on `mesh`; return what it makes, fetched from one process, and described."""
    with mesh.activate(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copies to several processes
        other = Stream("other")
        tensors: list[torch.Tensor] = [torch.ones(4, 4), torch.ones(4, 4, dtype=torch.int64)]
        for kind, number in steps:
            x: Any = tensors[number % len(tensors)]
            if kind == "add":
                tensors.append(x + 1.5)
            elif kind == "type":
                tensors.append(x.to(torch.bfloat16))
            elif kind == "mm" and x.dim() == 2:
                tensors.append(x @ x.t())
            elif kind == "view" and x.dim() and len(x) > 1:
                tensors.append(x[1:].transpose(0, -1))
            elif kind == "write":
                x.mul_(2)
            elif kind == "stack" and x.numel() < 1000:
                tensors.append(x.reduce("gpu", "stack"))
            elif kind == "sum":
                tensors.append(x.sum())
            elif kind == "copy":
                tensors.append(x.slice_mesh(host=1).to_mesh(mesh))
            elif kind == "borrow":
                borrowed, borrow = other.borrow(x, mutable=True)
                with borrow, other.activate():
                    borrowed.add_(1)
            elif kind == "grad" and x.dtype.is_floating_point:
                leaf = x.clone().requires_grad_()
                (leaf * leaf).sum().backward()
                assert leaf.grad is not None
                tensors.append(leaf.grad)
            elif kind == "grow":
                x.unsqueeze_(0)
        fetched = [inspect(tensor, host=1, gpu=0) for tensor in tensors]
        return [
            (t.shape, t.dtype, t.device, t.stride(), f.shape, f.dtype)
            for t, f in zip(tensors, fetched, strict=True)
        ]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 20)), min_size=1, max_size=12))
def test_metadata_are_those_of_processes(mesh: Any, steps: list[tuple[str, int]]) -> None:
    real = run(mesh, steps)
    assert real == run(simulated(), steps)
    for shape, dtype, _, _, *fetched in real:
        assert [shape, dtype] == fetched


class Taker(Actor):
    @endpoint
    def take(self, value: Any) -> Any:
        return value


def test_an_actor_gets_no_simulated_tensor(procs: ProcMesh, mesh: Any) -> None:
    taker = procs.spawn("taker", Taker)
    with simulated().activate():
        x = torch.ones(2)
        with pytest.raises(ValueError, match="simulated devices"):
            taker.take.call(x).get()
        with pytest.raises(ValueError, match="has no data"):
            x.to_mesh(procs)
    with mesh.activate():
        y = torch.ones(2)
        with pytest.raises(ValueError, match="they have no data"):
            y.to_mesh(simulated())
        found = inspect(y + 1)
    assert found.tolist() == [2, 2]
