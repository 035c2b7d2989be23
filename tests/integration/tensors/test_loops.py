"""Loops and models as people write them give the numbers of plain torch, without a setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import torch
from torch.utils import _pytree as pytree

from monarch import inspect
from monarch.actor import this_host
from tests.integration.tensors.loops import LOOPS

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # of item(), and of torch about the loops themselves
]


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"gpus": 2})
    yield mesh
    mesh.stop().get(timeout=60)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_the_numbers_of_plain_torch(name: str, procs: ProcMesh) -> None:
    expected = pytree.tree_leaves(list(LOOPS[name]()))
    with procs.activate():
        results = list(LOOPS[name]())
    for rank in range(2):
        found = [
            inspect(leaf, gpus=rank) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in pytree.tree_leaves(results)
        ]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)
            elif isinstance(other, float):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
            else:
                assert one == other
