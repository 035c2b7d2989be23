"""Random programs give what the same programs give on local tensors, one copy for each process.

They have views, writes (also of a view, and by remote functions), reductions of all forms, copies
within a mesh and to another `spawn_procs`, streams and borrows, blocks that are sent together, and
compiled functions with any of these. `python tests/soak/programs.py` runs thousands.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch import Stream, coalescing, inspect, no_mesh, remote
from monarch._tensors.recording import compile as compiled
from monarch.actor import ProcMesh, this_host

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


def mix(x: Any, y: Any, number: float) -> Any:
    """Write into one tensor, and return another."""
    made = x + number
    x.sub_(y.clone())
    return made


mixed = remote(mix, propagate=mix)

KINDS = [
    *("add", "both", "write", "into", "mix", "choose", "view", "strided", "reversed"),
    *("reduce", "reduce_", "max", "stack", "exchange", "scatter"),
    *("copy", "borrow", "read", "away"),
]


class Program:
    """A random program, on a mesh and on local tensors.

    Args:
        mesh: the mesh of four processes.
        away: another mesh of the same dimensions.
        draw: draws from a strategy.
    """

    def __init__(self, mesh: Any, away: Any, draw: Any) -> None:
        self.mesh = mesh
        self.away = away
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

    def step(self) -> None:
        form = self.draw(st.sampled_from(["plain", "plain", "plain", "block", "compiled"]))
        if form == "plain":
            self.one()
        elif form == "block":
            with coalescing():
                for _ in range(self.draw(st.integers(1, 4))):
                    self.one()
        else:
            self.function()

    def one(self) -> None:
        """Issue one operation, on two of the tensors."""
        one, two = self.pick(), self.pick()
        kind = self.draw(st.sampled_from(KINDS))
        number = float(self.draw(st.integers(-2, 2)))
        dim = self.draw(st.sampled_from(["host", "gpu"]))
        made = self.far(kind, one.far, two.far, number, dim)
        near = self.near(kind, one.near, two.near, number, dim)
        if made is not None:
            self.pairs.append(Pair(made, near))

    def function(self) -> None:
        """Call a compiled function of some operations: recorded, compared, and replayed."""
        steps = [
            (
                self.draw(st.sampled_from(KINDS)),
                float(self.draw(st.integers(-2, 2))),
                self.draw(st.sampled_from(["host", "gpu"])),
                *(self.draw(st.integers(0, 9)) for _ in range(2)),
            )
            for _ in range(self.draw(st.integers(1, 5)))
        ]
        captured = self.pick()
        results = self.draw(st.integers(1, 3))

        def issue(values: list[Any], issued: Any) -> list[Any]:
            for kind, number, dim, one, two in steps:
                made = issued(
                    kind, values[one % len(values)], values[two % len(values)], number, dim
                )
                if made is not None:
                    values.append(made)
            return values[-results:]

        @compiled
        def far(x: Any, y: Any) -> Any:
            return issue([x, y, captured.far], self.far)

        for _ in range(self.draw(st.integers(1, 4))):
            x, y = self.pick(), self.pick()
            made = far(x.far, y.far)
            near = issue([x.near, y.near, captured.near], self.near)
            self.pairs += map(Pair, made, near)

    def far(self, kind: str, one: Any, two: Any, number: float, dim: str) -> Any:
        """Issue an operation on distributed tensors; return its result, if it makes one."""
        if kind == "add":
            return one + number
        if kind == "both":
            return (one * two).clamp(-99, 99) if one.shape == two.shape else None
        if kind == "write":
            one.mul_(number)
        elif kind == "into" and one.shape == two.shape:
            one.add_(two * number)
        elif kind == "mix" and one.shape == two.shape:
            return mixed(one, two, number)
        elif kind == "choose":
            return torch.where(one > number, one, -one)
        elif kind == "view":
            return one[1:] if len(one) > 1 else None
        elif kind == "strided":
            return one[::2]
        elif kind == "reversed":
            return one.flip(0)
        elif kind == "max":
            return one.reduce(dim, "max")
        elif kind == "stack":
            return one.reduce(dim, "stack")[1]
        elif kind == "exchange":
            return one.reduce(dim, "stack", scatter=True) if len(one) == 2 else None
        elif kind == "scatter":
            return one.reduce(dim, scatter=True).unsqueeze(0) if len(one) == 2 else None
        elif kind == "reduce":
            return one.reduce(dim)
        elif kind == "reduce_":
            one.reduce_(dim)
        elif kind == "copy":
            return one.slice_mesh(host=1).to_mesh(self.mesh)
        elif kind == "borrow":
            borrowed, borrow = self.other.borrow(one, mutable=True)
            with borrow, self.other.activate():
                borrowed.add_(number)
        elif kind == "read":
            borrowed, borrow = self.other.borrow(one)
            with borrow, self.other.activate():
                made = borrowed + number
            return made.to_mesh(self.mesh, stream=one.stream)
        elif kind == "away":
            there = one.to_mesh(self.away)
            with self.away.activate():
                there = there + number
            return there.to_mesh(self.mesh)
        return None

    def near(self, kind: str, one: Any, two: Any, number: float, dim: str) -> Any:
        """Do the same on local tensors, one for each process."""
        with no_mesh.activate():
            if kind in ("add", "read", "away"):
                return [value + number for value in one]
            if kind == "both":
                same = one[0].shape == two[0].shape
                pairs = zip(one, two, strict=True)
                return [(a * b).clamp(-99, 99) for a, b in pairs] if same else None
            if kind == "into" and one[0].shape == two[0].shape:
                for a, b in zip(one, two, strict=True):
                    a.add_(b * number)
            if kind == "mix" and one[0].shape == two[0].shape:
                return [mix(a, b, number) for a, b in zip(one, two, strict=True)]
            if kind == "choose":
                return [torch.where(value > number, value, -value) for value in one]
            if kind == "view":
                return [value[1:] for value in one] if len(one[0]) > 1 else None
            if kind == "strided":
                return [value[::2] for value in one]
            if kind == "reversed":
                return [value.flip(0) for value in one]
            if kind in ("max", "stack", "exchange", "scatter"):
                return self.combined(kind, one, dim)
            if kind in ("reduce", "reduce_"):
                sums = [sum(one[other] for other in group(rank, dim)) for rank in range(4)]
                if kind == "reduce":
                    return sums
                for value, total in zip(one, sums, strict=True):
                    value.copy_(total)
            elif kind == "copy":
                return [one[2 + rank % 2].clone() for rank in range(4)]
            for value in one:
                if kind == "write":
                    value.mul_(number)
                elif kind == "borrow":
                    value.add_(number)
        return None

    def combined(self, kind: str, one: Any, dim: str) -> Any:
        """Return what the other reductions give; in each group two processes take part."""
        groups = [[one[other] for other in group(rank, dim)] for rank in range(4)]
        if kind == "max":
            return [torch.maximum(*values) for values in groups]
        if kind == "stack":
            return [values[1].clone() for values in groups]
        if len(one[0]) != 2:
            return None
        own = [group(rank, dim).index(rank) for rank in range(4)]
        if kind == "exchange":
            return [
                torch.stack([value[place] for value in values])
                for values, place in zip(groups, own, strict=True)
            ]
        return [sum(values)[place : place + 1] for values, place in zip(groups, own, strict=True)]

    def check(self) -> None:
        for pair in self.pairs:
            rank = self.draw(st.integers(0, 3))
            host, gpu = COORDINATES[rank]
            found = inspect(pair.far, host=host, gpu=gpu)
            with no_mesh.activate():
                torch.testing.assert_close(found, pair.near[rank])


@pytest.fixture(scope="module")
def away() -> Iterator[Any]:
    """Return the device mesh of other processes."""
    procs: ProcMesh = this_host().spawn_procs({"host": 2, "gpu": 2})
    yield procs.rank_tensor("gpu").mesh
    procs.stop().get(timeout=60)


@settings(
    max_examples=int(os.environ.get("PROGRAMS", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_random_programs(active: Any, away: Any, data: st.DataObject) -> None:
    program = Program(active, away, data.draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copies to several processes
        program.start()
        for _ in range(data.draw(st.integers(1, 12))):
            program.step()
        program.check()
