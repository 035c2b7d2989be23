"""A call whose errors are answers has an answer of each rank, whatever it raised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.mesh.results.reply import PartialReplies
from monarch._engine.mesh.results.value_mesh import Failed
from monarch._engine.wire.codec import encode
from monarch._engine.wire.frame import ERROR


class Odd(Exception):
    """An exception that fails when it is to be shown to the caller."""

    @staticmethod
    def for_caller(_error: Any, _made: Any) -> Any:
        raise ValueError("no picture of it")


def test_an_error_that_cannot_be_shown_here_is_an_answer_like_others() -> None:
    failure = Failure("actor", Verdict(FAILED, "it is odd"))
    body = encode(("it is odd", failure, encode(Odd(), 1 << 20).stream, "Odd"), 1 << 20).stream
    call: Any = SimpleNamespace(_endpoint=SimpleNamespace(name="trainer.step()"))
    cell = PartialReplies._cell(call, (ERROR, body))
    assert isinstance(cell, Failed)
    assert repr(cell.error) == "ValueError('no picture of it')"
