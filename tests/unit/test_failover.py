"""A job has one driver at a time, and ends once it lacks a driver for the grace period."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from monarch._failover.state import Failover

GRACE = 10.0


def test_a_successor_within_the_period_takes_over() -> None:
    job = Failover(GRACE)
    assert (job.driven, job.reign, job.deadline) == (True, 0, math.inf)
    assert job.left(5)
    assert (job.driven, job.deadline) == (False, 15)
    assert not job.tick(14.9)
    assert job.claim()
    job.taken()
    assert (job.driven, job.reign, job.deadline) == (True, 1, math.inf)
    assert not job.tick(100)


def test_without_a_successor_it_is_over() -> None:
    job = Failover(GRACE)
    job.left(5)
    assert job.tick(15)
    assert not job.claim()
    assert not job.left(16)


def test_a_claim_that_comes_to_nothing_gains_no_time() -> None:
    job = Failover(GRACE)
    job.left(0)
    assert job.claim()
    assert job.left(9)
    assert job.deadline == 10
    assert job.claim()
    assert not job.left(10)


def test_a_claim_is_taken_once() -> None:
    job = Failover(GRACE)
    job.left(0)
    job.claim()
    job.taken()
    job.left(20)
    job.taken()  # a late acknowledgement for the driver that left
    assert not job.driven
    assert job.deadline == 30


def test_no_period_is_no_time() -> None:
    assert not Failover(0.0).left(1)


def test_saved_handles_can_be_taken_back() -> None:
    job = Failover(GRACE)
    job.keep(1, "one")
    job.keep(2, "two")
    job.drop(1)
    job.drop(1)
    job.left(0)
    assert list(job.saved_handles.values()) == ["two"]


class Drivers(RuleBasedStateMachine):
    """Drivers come and go in any order: one at a time, each with its own epoch number."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.job = Failover(GRACE)
        self.there = True  # a driver is connected or about to connect
        self.vacant_since = math.inf
        self.reigns = [0]

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        over = self.job.tick(self.now)
        assert over == (self.now >= self.vacant_since + GRACE)

    @rule()
    def claim(self) -> None:
        may = not self.there and self.now < self.vacant_since + GRACE
        self.job.tick(self.now)
        assert self.job.claim() == may
        if may:
            self.there = True
            self.reigns.append(self.job.reign)

    @precondition(lambda self: self.there and not self.job.driven)
    @rule()
    def take(self) -> None:
        self.job.taken()
        if self.job.driven:
            self.vacant_since = math.inf

    @precondition(lambda self: self.there)
    @rule()
    def leave(self) -> None:
        if self.job.driven:
            self.vacant_since = self.now
        self.there = False
        assert self.job.left(self.now) == (self.now < self.vacant_since + GRACE)

    @invariant()
    def numbers_rise(self) -> None:
        assert self.reigns == sorted(set(self.reigns))


TestDrivers = Drivers.TestCase
