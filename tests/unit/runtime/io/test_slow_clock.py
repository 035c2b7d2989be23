"""The clock of checks that are in no hurry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.io.slow_clock import SlowClock


class Over(BaseException):
    """Ends the clock, which a test runs in its own thread."""


@pytest.mark.internal_errors
def test_timers_fire_when_they_are_due_whatever_the_others_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One fails, and another is set meanwhile. Then the clock sleeps until the last is due."""
    clock: Any = SlowClock()
    clock._started = True
    fired: list[str] = []
    sleeps: list[float] = []

    def sleep(limit: float) -> None:
        sleeps.append(limit)
        if len(sleeps) == 3:
            raise Over

    def fail() -> None:
        fired.append("fails")
        clock.call_later(0, lambda: fired.append("set meanwhile"))
        raise ValueError("this check cannot be made")

    clock._changed = SimpleNamespace(set=lambda: None, clear=lambda: None, wait=sleep)
    clock.call_later(3600, lambda: fired.append("too early"))
    clock.call_later(0, fail)
    with pytest.raises(Over):
        clock._run()
    assert fired == ["fails", "set meanwhile"]
    assert max(sleeps[:2]) <= 0 < sleeps[2] <= 3600
    assert "this check cannot be made" in capsys.readouterr().err
