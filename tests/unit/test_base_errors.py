"""Which errors of a call mean that the program has stopped the actor that was called."""

from __future__ import annotations

import pytest

from monarch._engine.base.errors import ActorError, SupervisionError, stop_behind
from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED, STOPPED, Verdict


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", [STOPPED, FAILED])
def test_a_stop_is_found_however_many_actors_have_passed_its_error_on(
    kind: str, depth: int
) -> None:
    failure = Failure("actor", Verdict(kind, "it ended"))
    error: Exception = SupervisionError.of(failure)
    for _ in range(depth):
        error = ActorError(error)
    found = stop_behind(error)
    assert (None if found is None else found.verdict.error) == (
        "it ended" if kind == STOPPED else None
    )
    assert stop_behind(ActorError(ValueError("it ended"))) is None
