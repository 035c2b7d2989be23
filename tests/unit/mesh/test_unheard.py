"""The failures that wait for an actor when it stops: the first that is not handled counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from monarch._engine.mesh.call.context import Instance

HANDLED, UNHANDLED, LATER = "handled", "unhandled", "later"


@pytest.mark.parametrize(
    ("failures", "found", "left"),
    [
        ([], None, []),
        ([HANDLED, HANDLED], None, []),
        ([HANDLED, UNHANDLED, LATER], UNHANDLED, [LATER]),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_failure_that_is_not_handled_counts(
    monkeypatch: pytest.MonkeyPatch, failures: Any, found: Any, left: Any, is_async: bool
) -> None:
    def judge(instance: Any) -> Any:
        failure = instance._unheard.popleft()
        return None if failure == HANDLED else (failure, None)

    async def judge_async(instance: Any) -> Any:
        return judge(instance)

    monkeypatch.setattr(Instance, "_judge", judge)
    monkeypatch.setattr(Instance, "_judge_async", judge_async)
    nothing: Any = None
    instance = Instance(nothing, nothing, "an actor", None, None, None)
    instance._turn = asyncio.Lock()
    instance._unheard.extend(failures)
    if is_async:
        assert asyncio.run(instance._unhandled_async()) == found
    else:
        assert instance._unhandled() == found
    assert list(instance._unheard) == left
