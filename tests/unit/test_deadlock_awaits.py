"""A task that waits is part of a deadlock only if no timer will end its wait."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._deadlock import awaits
from monarch._deadlock.awaits import Awaits, _Await, _is_limited


@pytest.mark.parametrize("by", ["timeout", "call_later"])
def test_a_timer_limits_the_task_that_it_will_cancel_and_no_other(by: str) -> None:
    if by == "timeout" and sys.version_info < (3, 11):
        pytest.skip("asyncio.timeout is new in Python 3.11")

    async def wait_limited(stop: asyncio.Event) -> None:
        if by == "call_later":
            task = asyncio.current_task()
            assert task is not None
            timer = asyncio.get_running_loop().call_later(3600, task.cancel)
            await stop.wait()
            timer.cancel()
        else:
            async with asyncio.timeout(3600):
                await stop.wait()

    async def look() -> tuple[bool, bool]:
        stop = asyncio.Event()
        limited = asyncio.create_task(wait_limited(stop))
        unlimited = asyncio.create_task(stop.wait())
        await asyncio.sleep(0)  # both begin
        found = _is_limited(limited), _is_limited(unlimited)
        stop.set()
        await asyncio.gather(limited, unlimited)
        return found

    assert asyncio.run(look()) == (True, False)


def test_an_actor_whose_first_await_was_short_is_watched_at_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate: Any = SimpleNamespace(on_wait=None, post=lambda function, argument: function(argument))
    cell: Any = SimpleNamespace(grave=None)
    looks: list[Callable[[], None]] = []
    begun: list[Any] = []
    found: list[_Await | None] = [None]
    monkeypatch.setattr(awaits, "_awaited", lambda task: found[0])
    monkeypatch.setattr(awaits, "_is_limited", lambda task: False)
    monkeypatch.setattr(awaits, "_Suspended", lambda cell, found, gate: found)
    Awaits(cell, gate, None, looks.append, begun.append)  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    gate.on_wait(loop.create_future())
    looks.pop()()  # it is over by now
    assert begun == []
    arrived = loop.create_future()
    found[0] = _Await(SimpleNamespace(_unanswered=None), arrived, "train.py:5")
    gate.on_wait(arrived)
    looks.pop()()
    assert begun == found
    loop.close()
