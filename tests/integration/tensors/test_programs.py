"""Random programs give what the same programs give on local tensors, one copy for each process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch import Stream, inspect, no_mesh

pytestmark = [pytest.mark.torch, pytest.mark.slow]

COORDINATES = [(host, gpu) for host in (0, 1) for gpu in (0, 1)]


class Pair:
    """A distributed tensor, and the local tensors that its processes should have."""

    def __init__(self, far: Any, near: list[Any]) -> None:
        self.far = far
        self.near = near


def group(rank: int, dim: str) -> list[int]:
    """Return the ranks that a reduction along `dim` combines with `rank`."""
    host, gpu = COORDINATES[rank]
    return [
        number
        for number, (other_host, other_gpu) in enumerate(COORDINATES)
        if (other_host == host if dim == "gpu" else other_gpu == gpu)
    ]


class Program:
    def __init__(self, mesh: Any, draw: Any) -> None:
        self.mesh = mesh
        self.draw = draw
        self.other = Stream("other")
        self.pairs: list[Pair] = []

    def start(self) -> None:
        for _ in range(2):
            far = torch.arange(4.0) + self.mesh.process_idx()
            with no_mesh.activate():
                near = [torch.arange(4.0) + rank for rank in range(4)]
            self.pairs.append(Pair(far, near))

    def pick(self) -> Pair:
        return self.draw(st.sampled_from(self.pairs))

    def local(self, far: Any, make: Any) -> None:
        with no_mesh.activate():
            self.pairs.append(Pair(far, [make(rank) for rank in range(4)]))

    def step(self) -> None:
        one, two = self.pick(), self.pick()
        number = float(self.draw(st.integers(-2, 2)))
        kind = self.draw(
            st.sampled_from(["add", "both", "write", "view", "reduce", "reduce_", "copy", "borrow"])
        )
        if kind == "add":
            self.local(one.far + number, lambda rank: one.near[rank] + number)
        elif kind == "both" and one.far.shape == two.far.shape:
            self.local(one.far * two.far, lambda rank: one.near[rank] * two.near[rank])
        elif kind == "write":
            one.far.mul_(number)
            self.each(lambda rank: one.near[rank].mul_(number))
        elif kind == "view" and len(one.far) > 1:
            self.local(one.far[1:], lambda rank: one.near[rank][1:])
        elif kind in ("reduce", "reduce_"):
            dim = self.draw(st.sampled_from(["host", "gpu"]))
            with no_mesh.activate():
                sums = [sum(one.near[other] for other in group(rank, dim)) for rank in range(4)]
            if kind == "reduce":
                self.local(one.far.reduce(dim), lambda rank: sums[rank])
            else:
                one.far.reduce_(dim)
                self.each(lambda rank: one.near[rank].copy_(sums[rank]))
        elif kind == "copy":
            far = one.far.slice_mesh(host=1).to_mesh(self.mesh)
            self.local(far, lambda rank: one.near[2 + rank % 2].clone())
        elif kind == "borrow":
            borrowed, borrow = self.other.borrow(one.far, mutable=True)
            with borrow, self.other.activate():
                borrowed.add_(number)
            self.each(lambda rank: one.near[rank].add_(number))

    def each(self, change: Any) -> None:
        with no_mesh.activate():
            for rank in range(4):
                change(rank)

    def check(self) -> None:
        for pair in self.pairs:
            rank = self.draw(st.integers(0, 3))
            host, gpu = COORDINATES[rank]
            found = inspect(pair.far, host=host, gpu=gpu)
            with no_mesh.activate():
                torch.testing.assert_close(found, pair.near[rank])


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_random_programs(active: Any, data: st.DataObject) -> None:
    program = Program(active, data.draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copies to several processes
        program.start()
        for _ in range(data.draw(st.integers(1, 15))):
            program.step()
        program.check()
