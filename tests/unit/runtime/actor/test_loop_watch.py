"""The watch of event loops: what it takes for a stall, and what for a debugger."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.actor import loop_watch
from monarch._engine.runtime.actor.loop_watch import Pulse


class Watched:
    """A pulse of an actor whose loop does not turn; the test makes its checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.debugged = False
        self.reports: list[float] = []
        clock = SimpleNamespace(call_later=lambda *_: None)
        cell: Any = SimpleNamespace(
            proc=SimpleNamespace(clock=clock), finished=threading.Event(), idle=False, aside=False
        )
        self.pulse = Pulse(cell, SimpleNamespace(post=lambda *_: None))  # type: ignore[arg-type]
        monkeypatch.setattr(self.pulse, "_is_debugged", lambda: self.debugged)
        monkeypatch.setattr(self.pulse, "_report", self.reports.append)
        self.pulse._look()  # asks the loop to turn

    def look(self, count: int) -> None:
        for _ in range(count):
            self.pulse._look()


def test_a_loop_that_does_not_turn_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.look(loop_watch._CHECKS - 1)
    assert watched.reports == []
    watched.look(2 * loop_watch._CHECKS)
    assert len(watched.reports) == 1


def test_a_loop_that_a_debugger_holds_by_then_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.look(loop_watch._CHECKS - 1)
    watched.debugged = True
    watched.look(1)
    watched.debugged = False  # from here on, the time counts again
    watched.look(loop_watch._CHECKS - 1)
    assert watched.reports == []
    watched.look(1)
    assert len(watched.reports) == 1


def test_without_the_debugger_no_loop_is_held_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "find", lambda name: None)
    pulse: Pulse = object.__new__(Pulse)
    assert not pulse._is_debugged()
