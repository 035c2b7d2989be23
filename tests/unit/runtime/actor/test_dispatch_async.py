"""A cancelled message of an async actor ends alone."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.actor import dispatch_async
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


def test_an_idle_loop_waits_in_a_seat_while_the_process_expects_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def seat(*args: Any) -> Any:
        made.append(args)
        return SimpleNamespace(wait=lambda timeout: timeout == 3.0)

    monkeypatch.setattr(dispatch_async, "Seat", seat)
    proc: Any = SimpleNamespace(expects=None)
    gate: Any = object()
    wait = dispatch_async._sit(proc, 5, gate, print)
    assert wait(3.0) is None
    assert made == []
    proc.expects = object()
    assert wait(3.0) is True
    assert wait(4.0) is False
    assert made == [(proc, 5, gate, print)]
