"""The watch of long waits: the first wait rouses it, and it rests when nothing waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from monarch._engine.runtime.proc.wait_watch import LONG, WaitWatch


def test_a_new_watch_rests_so_that_the_first_wait_rouses_it() -> None:
    later: list[tuple[float, Any]] = []
    clock = SimpleNamespace(call_later=lambda *timer: later.append(timer))
    proc: Any = SimpleNamespace(
        clock=clock, agent_watch=SimpleNamespace(look=lambda: None), cells={}
    )
    watch = WaitWatch(proc)
    assert watch.resting
    watch.rouse()
    assert not watch.resting
    (_, arm), *_ = later
    arm()
    delay, look = later[1]
    assert delay == LONG
    look()
    assert watch.resting
