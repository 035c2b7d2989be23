"""An alarm ticks at the earliest deadline that was set since the last tick, and never without one.

The timers are those of the simulator's clock, so nothing waits.
"""

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.runtime.io.alarm import Alarm
from monarch._engine.runtime.io.reactor import Timer


class Clock:
    """A clock that stands still until it is moved, with its timers."""

    def __init__(self) -> None:
        self.time = 100.0
        self._timers: list[Timer] = []

    @property
    def timers(self) -> list[Timer]:
        return [timer for timer in self._timers if timer.callback is not None]

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self._timers.append(Timer(when, callback))
        return self._timers[-1]

    def move(self, to: float) -> None:
        while due := [timer for timer in self.timers if timer.when <= to]:
            first = min(due, key=lambda timer: timer.when)
            self.time = max(self.time, first.when)
            callback = first.callback
            first.cancel()
            assert callback is not None
            callback()
        self.time = to


def test_a_deadline_in_the_past_is_due_at_once() -> None:
    clock = Clock()
    ticks: list[float] = []
    Alarm(clock.call_at, lambda: ticks.append(clock.time)).set(3.0)
    clock.move(100.0)
    assert ticks == [100.0]


def test_no_deadline_sets_no_timer() -> None:
    clock = Clock()
    alarm = Alarm(clock.call_at, lambda: None)
    alarm.set(None)
    alarm.set(math.inf)
    assert clock.timers == []


def test_a_later_deadline_keeps_the_timer() -> None:
    clock = Clock()
    ticks: list[float] = []
    alarm = Alarm(clock.call_at, lambda: ticks.append(clock.time))
    alarm.set(105.0)
    (timer,) = clock.timers
    alarm.set(107.0)
    alarm.set(None)
    assert clock.timers == [timer]
    clock.move(110.0)
    assert ticks == [105.0]


def test_a_tick_may_set_the_next_deadline() -> None:
    clock = Clock()
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(clock.time)
        alarm.set(clock.time + 2)

    alarm = Alarm(clock.call_at, tick)
    alarm.set(101.0)
    clock.move(106.0)
    assert ticks == [101.0, 103.0, 105.0]


def test_a_cancelled_alarm_can_be_set_again() -> None:
    clock = Clock()
    ticks: list[float] = []
    alarm = Alarm(clock.call_at, lambda: ticks.append(clock.time))
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
    clock = Clock()
    ticks: list[float] = []
    expected: list[float] = []
    alarm = Alarm(clock.call_at, lambda: ticks.append(clock.time))
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
