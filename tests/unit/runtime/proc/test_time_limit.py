"""Time limits that are put off while a debugger has stopped the program."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.mesh.call.endpoint import _OptionedEndpoint
from monarch._engine.mesh.results.future import VALUE, Future
from monarch._engine.runtime.proc import time_limit
from monarch._engine.runtime.proc.time_limit import TimeLimit, wait_within


class Timer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Reactor:
    """Time that passes by `go`."""

    def __init__(self) -> None:
        self.time = 100.0
        self.timers: list[Timer] = []

    def now(self) -> float:
        return self.time

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    def go(self, until: float) -> None:
        self.time = until
        for timer in [each for each in self.timers if each.when <= until]:
            self.timers.remove(timer)
            if timer.callback is not None:
                timer.callback()


@pytest.fixture
def reactor(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Reactor()
    monkeypatch.setattr("monarch._engine.runtime.io.environment.current", made)
    return made


def limited(reactor: Any, ended: list[float]) -> TimeLimit:
    """Return a limit of 10 seconds that has begun."""
    limit = TimeLimit(reactor, 10, 100, lambda: ended.append(reactor.time))
    limit.start()
    return limit


def pauses(monkeypatch: pytest.MonkeyPatch, left: dict[float, float], reactor: Any) -> None:
    """Have the feature say at these moments that so much time is left."""

    def settle_limit(limit: float, began: float, settle: Callable[[float], None]) -> None:
        assert (limit, began) == (10, 100)
        settle(left.get(reactor.time, 0.0))

    monkeypatch.setattr(time_limit, "find", {"settle_limit": settle_limit}.get)


@pytest.mark.parametrize("left", [None, {}])
def test_it_ends_on_time_without_a_pause(
    reactor: Any, monkeypatch: pytest.MonkeyPatch, left: dict[float, float] | None
) -> None:
    if left is None:  # the debugger is not installed
        monkeypatch.setattr(time_limit, "find", lambda name: None)
    else:
        pauses(monkeypatch, left, reactor)
    ended: list[float] = []
    limited(reactor, ended)
    reactor.go(109)
    assert ended == []
    reactor.go(110)
    assert ended == [110]
    assert reactor.timers == []


def test_pauses_put_it_off(reactor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses(monkeypatch, {110: 4, 114: 0.5}, reactor)
    ended: list[float] = []
    limited(reactor, ended)
    for moment in (110, 113, 114, 114.4):
        reactor.go(moment)
    assert ended == []
    reactor.go(114.5)
    assert ended == [114.5]


@pytest.mark.parametrize("moment", [105, 112])
def test_a_cancelled_one_does_not_end(
    reactor: Any, monkeypatch: pytest.MonkeyPatch, moment: float
) -> None:
    pauses(monkeypatch, {110: 4}, reactor)
    ended: list[float] = []
    limit = limited(reactor, ended)
    for each in (105, 110, 112):
        reactor.go(each)
        if each == moment:
            limit.cancel()
    reactor.go(200)
    assert ended == []


def test_a_wait_goes_on_for_the_time_that_is_left(
    reactor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [3.0, 1.0, 0.0]
    monkeypatch.setattr(time_limit, "find", lambda name: lambda limit, began: left.pop(0))
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return False

    assert not wait_within(10, wait)
    assert waited == [10, 3, 1]
    assert wait_within(5, lambda seconds: True)


@pytest.mark.parametrize("left", [None, 3.0])
def test_without_a_debugger_a_limit_that_has_passed_is_over(
    monkeypatch: pytest.MonkeyPatch, left: float | None
) -> None:
    feature = None if left is None else lambda limit, began: left
    monkeypatch.setattr(time_limit, "find", lambda name: feature)
    assert time_limit.time_left(10, 100) == (left or 0.0)


def test_an_answer_ends_the_limit_of_a_call_that_was_put_off(
    reactor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses(monkeypatch, {110: 4}, reactor)

    class Reply(Future[None]):
        __slots__ = ()

        def _expire(self) -> None:
            raise AssertionError

    call = Reply._new()
    reactor.time = 110
    _OptionedEndpoint._due(SimpleNamespace(proc=SimpleNamespace(reactor=reactor)), call, 10, 100)  # type: ignore[arg-type]
    assert [timer.when for timer in reactor.timers] == [114]
    call._resolve(VALUE, None)
    assert [timer.callback for timer in reactor.timers] == [None]
