"""Replicas of a training in the simulator: each wait for a state ends, and rounds leave nothing."""

from __future__ import annotations

import pickle
import time

import pytest

import monarch.actor
from monarch import _spi
from monarch.actor import Actor, ActorError, current_rank, endpoint, this_host
from monarch.testing import simulate
from monarch.training import Replicas

STATE = (1, 0, 0)
"""The first state of rank 1: rank, position and mark."""


class Rank(Actor):
    """Speaks to the coordinator as a manager does."""

    def __init__(self, coordinator):
        self.place = coordinator
        self.rank = current_rank().rank

    def send(self, operation, *arguments):
        body = pickle.dumps((operation, *arguments))
        return _spi.ask(self.place.uid, self.place.service, body)

    @endpoint
    def join(self, mark=None):
        """Wait for the next round."""
        answer = self.send("ask", self.rank, 0, mark, "", False, (), True).get()
        return pickle.loads(answer)[0]

    @endpoint
    def arrive(self, number, vote):
        """Wait at the first barrier of a round."""
        answer = self.send("arrive", self.rank, 0, number, 0, vote, "as asked", None, None).get()
        return pickle.loads(answer)[0]

    @endpoint
    def offer(self, manifest):
        body = pickle.dumps(("offer", self.rank, 0, STATE, manifest))
        _spi.tell(self.place.uid, self.place.service, body)

    @endpoint
    def fetch(self):
        try:
            return self.send("fetch", STATE).get()
        except _spi.Refused as error:
            return str(error)

    @endpoint
    def uid(self):
        return _spi.own_uid()


def two():
    """Return two ranks in a round, and an actor that is not in it, to fetch states."""
    replicas = Replicas(2, timeout=60)
    ranks = this_host().spawn_procs({"rank": 2}).spawn("ranks", Rank, replicas.coordinator)
    assert list(ranks.join.call().get().values()) == ["begin", "begin"]
    fetcher = this_host().spawn_procs().spawn("fetcher", Rank, replicas.coordinator)
    return ranks.slice(rank=0), ranks.slice(rank=1), fetcher


@pytest.fixture
def losses_are_expected(monkeypatch):
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)


@pytest.mark.usefixtures("losses_are_expected")
def test_who_waits_for_a_state_of_a_rank_that_exits_is_told_at_once():
    def script():
        _, other, fetcher = two()
        fetching = fetcher.fetch.call_one()
        time.sleep(1)
        _spi.client_proc().kill_procs([other.uid.call_one().get()])
        assert "rank 1 has exited" in fetching.get()
        assert fetcher.fetch.call_one().get() == "rank 1 has exited"

    assert simulate(script).elapsed < 2


@pytest.mark.usefixtures("losses_are_expected")
def test_who_waits_for_a_state_of_a_rank_that_is_expelled_is_told_at_once():
    def script():
        one, _, fetcher = two()
        fetching = fetcher.fetch.call_one()
        assert one.arrive.call_one(1, True).get() == "void"
        assert fetching.get() == "rank 1 was expelled: others waited for it for too long"

    assert simulate(script).elapsed == pytest.approx(60, abs=1)


def test_a_state_of_the_round_before_is_not_handed_out():
    """Its memory is given back by then."""

    def script():
        one, other, fetcher = two()
        other.offer.call_one(b"first").get()
        assert fetcher.fetch.call_one().get() == b"first"
        next_round(one, other)
        fetching = fetcher.fetch.call_one()
        time.sleep(1)
        other.offer.call_one(b"second").get()
        assert fetching.get() == b"second"

    simulate(script)


def test_a_wait_for_a_state_ends_with_its_round():
    def script():
        one, other, fetcher = two()
        fetching = fetcher.fetch.call_one()
        time.sleep(1)
        next_round(one, other)
        assert fetching.get() == "the round is over"

    simulate(script)


def test_a_request_that_the_training_has_no_place_for_is_refused():
    def script():
        replicas = Replicas(2)
        ranks = this_host().spawn_procs({"rank": 3}).spawn("ranks", Rank, replicas.coordinator)
        with pytest.raises(ActorError, match="rank 2 is not"):
            ranks.slice(rank=2).join.call_one().get()

    simulate(script)


def next_round(one, other):
    """End the first round without a step, and begin the next one."""
    one.arrive.call_one(1, False).get()
    joining = [rank.join.call_one(0) for rank in (one, other)]
    assert [each.get() for each in joining] == ["begin", "begin"]


# -- the manager of a rank -------------------------------------------------------------------------


class NoOptimizer:
    """Never makes a step. (The first optimizer of torch takes seconds to import.)"""

    def register_step_pre_hook(self, hook):
        pass

    register_step_post_hook = register_step_pre_hook


class Normalizing(Actor):
    """Trains a module whose buffers change in each forward pass."""

    def __init__(self, coordinator):
        import torch

        from monarch.training import Manager

        self.forward = lambda: self.module(torch.randn(8, 2))
        self.module = torch.nn.BatchNorm1d(2)
        self.manager = Manager(coordinator, self.module, NoOptimizer())

    @endpoint
    def begin_twice(self):
        buffers = []
        for _ in range(2):
            self.manager.quorum()
            buffers.append([each.clone() for each in self.module.buffers()])
            self.forward()
        return buffers


@pytest.mark.torch
def test_a_round_that_is_given_up_leaves_no_trace_in_buffers():
    torch = pytest.importorskip("torch")

    def script():
        replicas = Replicas(1)
        rank = this_host().spawn_procs({"rank": 1}).spawn("rank", Normalizing, replicas.coordinator)
        return rank.begin_twice.call_one().get()

    first, second = simulate(script).value
    assert all(map(torch.equal, first, second))
