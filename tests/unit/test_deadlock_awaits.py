"""A task that waits is part of a deadlock only if no timer will end its wait."""

from __future__ import annotations

import asyncio
import sys

import pytest

from monarch._deadlock.awaits import _is_limited


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
