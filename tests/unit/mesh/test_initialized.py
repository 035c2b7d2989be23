"""The error of `initialized` says whether a process could not be started, or was lost later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED, NOT_CREATED, Verdict
from monarch._engine.mesh.meshes.actor_mesh import _Acks


def test_a_process_that_never_began_is_no_failure_of_an_actor() -> None:
    asked: Any = _Acks._new()
    asked._mesh = SimpleNamespace(failure_of_rank=lambda rank, verdict: Failure("actor", verdict))
    error = asked._error(0, Verdict(FAILED, "no such program", code=NOT_CREATED))
    assert (type(error), str(error)) == (ValueError, "no such program")
    assert type(asked._error(0, Verdict(FAILED, "killed"))) is SupervisionError
