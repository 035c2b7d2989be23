"""An alarm ticks at the earliest deadline that was set since the last tick, and never without one.

The timers are those of the simulator's clock, so nothing waits.
"""

import math
from collections.abc import Callable, Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.runtime.io import environment
from monarch._engine.runtime.io.alarm import Alarm


class Clock(environment.Environment):
    """A clock that stands still until it is moved, with its timers."""

    def __init__(self) -> None:
        self.time = 100.0
        self.timers: list[Entry] = []

    def now(self) -> float:
        return self.time

    def call_later(self, delay: float, callback: Callable[[], None]) -> "Entry":
        assert delay >= 0
        self.timers.append(Entry(self, self.time + delay, callback))
        return self.timers[-1]

    def move(self, to: float) -> None:
        while due := [timer for timer in self.timers if timer.when <= to]:
            first = min(due, key=lambda timer: timer.when)
            self.time = max(self.time, first.when)
            self.timers.remove(first)
            first.callback()
        self.time = to


class Entry:
    def __init__(self, clock: Clock, when: float, callback: Callable[[], None]) -> None:
        self.clock, self.when, self.callback = clock, when, callback

    def cancel(self) -> None:
        self.clock.timers.remove(self)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Generator[Clock]:
    with monkeypatch.context() as patch:
        clock = Clock()
        patch.setattr(environment, "current", clock)
        yield clock


def test_a_deadline_in_the_past_is_due_at_once(clock: Clock) -> None:
    ticks: list[float] = []
    Alarm(clock.call_later, lambda: ticks.append(clock.time)).set(3.0)
    clock.move(100.0)
    assert ticks == [100.0]


def test_no_deadline_sets_no_timer(clock: Clock) -> None:
    alarm = Alarm(clock.call_later, lambda: None)
    alarm.set(None)
    alarm.set(math.inf)
    assert clock.timers == []


def test_a_later_deadline_keeps_the_timer(clock: Clock) -> None:
    ticks: list[float] = []
    alarm = Alarm(clock.call_later, lambda: ticks.append(clock.time))
    alarm.set(105.0)
    (timer,) = clock.timers
    alarm.set(107.0)
    alarm.set(None)
    assert clock.timers == [timer]
    clock.move(110.0)
    assert ticks == [105.0]


def test_a_tick_may_set_the_next_deadline(clock: Clock) -> None:
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(clock.time)
        alarm.set(clock.time + 2)

    alarm = Alarm(clock.call_later, tick)
    alarm.set(101.0)
    clock.move(106.0)
    assert ticks == [101.0, 103.0, 105.0]


def test_a_cancelled_alarm_can_be_set_again(clock: Clock) -> None:
    ticks: list[float] = []
    alarm = Alarm(clock.call_later, lambda: ticks.append(clock.time))
    alarm.set(101.0)
    alarm.cancel()
    alarm.cancel()
    clock.move(102.0)
    assert ticks == []
    alarm.set(103.0)
    clock.move(104.0)
    assert ticks == [103.0]


@given(st.lists(st.tuples(st.sampled_from(["set", "move", "cancel"]), st.integers(1, 9))))
def test_it_ticks_at_the_earliest_deadline(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(environment, "current", clock)
        ticks: list[float] = []
        expected: list[float] = []
        alarm = Alarm(clock.call_later, lambda: ticks.append(clock.time))
        earliest = math.inf
        for step, value in steps:
            if step == "set":
                alarm.set(clock.time + value)
                earliest = min(earliest, clock.time + value)
            elif step == "cancel":
                alarm.cancel()
                earliest = math.inf
            else:
                clock.move(clock.time + value)
                if earliest <= clock.time:
                    expected.append(earliest)
                    earliest = math.inf
            assert ticks == expected
            assert len(clock.timers) == (earliest < math.inf)
