"""Exploring seeds and plans, shrinking what fails, and invariants."""

from __future__ import annotations

import contextlib
import time

import pytest

import monarch.actor
from monarch.actor import Actor, ActorError, SupervisionError, endpoint, this_host
from monarch.testing import (
    Case,
    Crash,
    ExplorationError,
    FaultPlan,
    Pause,
    Rates,
    Request,
    Slow,
    explore,
    random_faults,
    replay,
    simulate,
)

DISK: dict = {}


class Account(Actor):
    """An actor that writes to a disk in two steps, which is wrong if it may crash in between."""

    @endpoint
    def move(self, amount):
        DISK["left"] -= amount
        time.sleep(0.001)
        DISK["right"] += amount


class Bank(Actor):
    def __init__(self):
        self.accounts = this_host().spawn_procs(name="a").spawn("account", Account)

    @endpoint
    def run(self, times):
        for _ in range(times):
            try:
                self.accounts.move.call_one(1).get()
            except (ActorError, SupervisionError):
                return "lost"
        return "done"

    def __supervise__(self, failure):
        return True


def careless():
    DISK.update(left=100, right=0)
    this_host().spawn_procs().spawn("bank", Bank).run.call_one(5).get()
    assert DISK["left"] + DISK["right"] == 100, "money is gone"


def plan_of(seed):
    """Return a plan with much noise, and in the middle the fault that breaks the program."""
    noise = list(random_faults(seed, Rates(crash=0, pause=4, slow=4)))
    culprit = Crash(Request(3, "account", "while_running"))
    return FaultPlan((*noise[:4], culprit, *noise[4:]))


def test_a_failure_is_shrunk_to_what_causes_it_and_can_be_replayed():
    with pytest.raises(ExplorationError) as caught:
        explore(careless, seeds=range(5), faults=plan_of)

    error = caught.value
    assert error.case.plan == FaultPlan.of(Crash(Request(1, "account", "while_running")))
    assert isinstance(error.__cause__, AssertionError)
    assert error.case.to_json() in str(error)
    assert "money is gone" in str(error)
    with pytest.raises(AssertionError, match="money is gone"):
        replay(careless, error.case.to_json())


def test_seeds_that_pass_are_counted():
    done = explore(lambda: None, seeds=range(4), faults=Rates(drop=5), hosts=2)
    assert done.runs == 4
    assert done.steps > 0


def test_cases_are_values():
    case = Case(3, 2, FaultPlan.of(Pause(1.0, "x-1", 2.0), Slow(Request(4))))
    assert Case.from_json(case.to_json()) == case


def test_an_invariant_is_checked_after_each_step():
    moments = []

    def never_more_than_two(view):
        moments.append(view.now)
        for account in view.actors("account"):
            assert type(account) is Account
        assert DISK["right"] <= 2, "too much"

    with pytest.raises(AssertionError, match="too much"):
        simulate(careless, invariants=[never_more_than_two])
    assert len(moments) > 10


def test_the_programs_of_all_faults_keep_the_invariants():
    """The runtime keeps its promises under all faults of processes."""

    def survives():
        DISK.update(left=100, right=0)
        owner = this_host().spawn_procs().spawn("bank", Bank)
        with contextlib.suppress(SupervisionError):
            assert owner.run.call_one(5).get() in ("done", "lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
        explore(survives, seeds=range(60), faults=Rates(crash=1, pause=1, slow=1))
