"""A cancelled message of an async actor ends alone."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from monarch._engine.runtime.actor.dispatch_async import _absorb_cancel


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 counts no cancellations")
def test_the_task_of_the_actor_forgets_cancellations_of_its_messages() -> None:
    async def main() -> int:
        task: Any = asyncio.current_task()
        for _ in range(2):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        _absorb_cancel()
        return int(task.cancelling())

    assert asyncio.run(main()) == 0
