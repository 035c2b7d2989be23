"""Faults: the points at which they are injected, and their effects on the program."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

import monarch.testing
from monarch.actor import Actor, endpoint, this_host
from monarch.testing import (
    Crash,
    CrashHost,
    FaultPlan,
    MissedFaultError,
    Partition,
    Pause,
    Rates,
    Request,
    Slow,
    random_faults,
    simulate,
)
from tests.sim.test_simulate import Owner

DONE: list = []
"""What was written, as if to a disk: it survives processes."""


class Writer(Actor):
    @endpoint
    def write(self, what):
        DONE.append(what)
        time.sleep(0.001)
        DONE.append(f"{what} again")
        return what

    @endpoint
    def write_at_once(self, what):
        DONE.append(what)
        return what


class AsyncWriter(Actor):
    @endpoint
    async def write(self, what):
        DONE.append(what)
        await asyncio.sleep(0.001)
        DONE.append(f"{what} again")
        return what

    @endpoint
    async def write_at_once(self, what):
        DONE.append(what)
        return what


def owner_calls(cls, method, *args):
    def main():
        owner = this_host().spawn_procs(name="o").spawn("owner", Owner, cls)
        outcome = owner.call.call_one(method, *args).get()
        time.sleep(1)
        return outcome, owner.told.call_one().get()

    return main


@pytest.mark.parametrize("cls", [Writer, AsyncWriter])
@pytest.mark.parametrize(
    ("place", "method", "done"),
    [
        ("before_arrival", "write", []),
        ("while_running", "write", ["x"]),
        ("before_reply", "write", ["x", "x again"]),
        ("while_running", "write_at_once", ["x"]),
        ("before_reply", "write_at_once", ["x"]),
    ],
)
def test_a_crash_at_a_place_of_a_request(cls, place, method, done):
    """Both ranks should write; each crashes at the given place of its request."""
    DONE.clear()
    plan = FaultPlan.of(Crash(Request(1, "w", place)), Crash(Request(2, "w", place)))
    outcome, told = simulate(owner_calls(cls, method, "x"), faults=plan).value

    assert "Killed(sig=9), SIGKILL" in outcome
    assert sorted(told) == [[0], [1]]
    assert sorted(done * 2) == sorted(DONE)


def test_a_crash_at_a_time():
    done = simulate(owner_calls(Writer, "write_at_once", "x"), faults=[Crash(0.5, "w-1")])

    outcome, told = done.value
    assert outcome == ["x", "x"]
    assert told == [[1]]
    assert FaultPlan.of(Crash(0.5, "w-1")) == done.faults


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Crash(0.0, 3), "found no process; there are none"),
        (Crash(0.5, "w-2"), "found no process; there are o-0, w-0, w-1"),
        (Crash(5000.0, "w-1"), r"was due when the program was over \(\d"),
        (Crash(Request(1, "v")), "waited for request 1 to actors named 'v', and saw 0"),
        (Crash(Request(99)), r"waited for request 99, and saw [1-9]"),
        (CrashHost(0.5, 2), "found no host to crash; there are 1"),
        (Partition(0.5, 0, 7), "found no host 7; there are 0, 1"),
    ],
)
def test_a_fault_that_finds_no_target_fails_the_test(fault, why):
    main = owner_calls(Writer, "write_at_once", "x")
    with pytest.raises(MissedFaultError, match=rf"^fault {re.escape(repr(fault))} {why}"):
        simulate(main, hosts=2, faults=[fault])
    done = simulate(main, hosts=2, faults=[fault], strict=False)
    assert done.value[1] == []
    assert len(done.faults) == 0


@pytest.mark.parametrize("cls", [Writer, AsyncWriter])
@pytest.mark.parametrize("place", ["before_arrival", "while_running", "before_reply"])
def test_a_pause_only_delays(cls, place):
    done = simulate(
        owner_calls(cls, "write", "x"), faults=[Pause(Request(1, "w", place), seconds=20)]
    )
    outcome, told = done.value
    assert outcome == ["x", "x"]
    assert told == []
    assert 21 <= done.elapsed < 22


def test_a_slow_process_takes_longer_for_everything():
    plan = [Slow(Request(1, "w"), lag=0.5, seconds=10)]
    done = simulate(owner_calls(Writer, "write_at_once", "x"), faults=plan)
    assert done.value[0] == ["x", "x"]
    assert 1.5 <= done.elapsed < 3


def test_plans_are_values():
    rates = Rates(crash=3, partition=2, drop=1, reorder=1, crash_host=1)
    plan = random_faults(3, rates, hosts=4)
    assert len(plan)
    assert plan == FaultPlan.from_json(plan.to_json())
    assert plan == eval(repr(plan), vars(monarch.testing))
    assert plan == random_faults(3, rates, hosts=4)
    assert plan != random_faults(4, rates, hosts=4)
