"""A mesh that has ended as a whole no longer belongs to its owner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.runtime.proc.proc import Proc

MESH = 7
FAILURE = Failure("actor", Verdict(FAILED, "it failed"))


@pytest.mark.parametrize("supervised", [False, True])
def test_the_owner_forgets_a_mesh_when_its_last_rank_has_ended(
    proc: Proc, supervised: bool
) -> None:
    """A supervisor is its owner for longer: it spawns the ranks again."""
    told: list[Any] = []
    owner = SimpleNamespace(
        _disown=told.append, child_ended=lambda mesh, rank, failure: told.append(f"rank {rank}")
    )
    mesh: Any = SimpleNamespace(
        uid=MESH, owner=owner, links=[None, None], gone={}, supervised=supervised
    )
    proc.owned[MESH] = mesh
    proc.mesh_failed(MESH, 1, FAILURE)
    proc.mesh_failed(MESH, 1, FAILURE)
    assert told == ["rank 1"]
    proc.mesh_failed(MESH, 0, FAILURE)
    assert told == ["rank 1", *([] if supervised else [MESH]), "rank 0"]
    assert (MESH in proc.owned) is supervised
