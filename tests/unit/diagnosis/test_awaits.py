"""A task that waits is part of a deadlock only if no timer will end its wait."""

from __future__ import annotations

import asyncio

from monarch._deadlock.awaits import _is_limited


def test_a_timer_limits_the_task_that_it_will_cancel_and_no_other() -> None:
    async def wait_limited(stop: asyncio.Event) -> None:
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
