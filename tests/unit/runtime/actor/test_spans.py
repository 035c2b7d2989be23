"""The record of a call of an endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from monarch._engine.runtime.actor.cell import Handler
from monarch._engine.runtime.actor.spans import Recorded


async def succeeds_async() -> None:
    pass


async def fails_async() -> None:
    raise ValueError("no")


def succeeds() -> None:
    pass


def fails() -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("function", "is_async", "raises"),
    [
        (succeeds, False, False),
        (fails, False, True),
        (succeeds_async, True, False),
        (fails_async, True, True),
    ],
)
def test_a_message_says_when_its_call_ended_and_whether_it_raised(
    function: Any, is_async: bool, raises: bool
) -> None:
    begun: list[Any] = []
    recorded = Recorded(Handler("e", function, is_async=is_async), begun.append, lambda: 5)
    message = recorded.pending = [0, False]
    failed = False
    try:
        result = recorded.handler.function()
        if is_async:
            asyncio.run(result)
    except ValueError:
        failed = True
    assert failed == raises
    assert begun == [message]
    assert message == [5, raises]
