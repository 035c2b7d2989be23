"""Procs that are spawned down the tree of hosts: all run once, whichever host is lost meanwhile."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

import monarch.actor
from monarch._engine.base.home import HOME
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.agent.core import AgentCore
from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.hosts.peer_host import PeerHost
from monarch.actor import Actor, SupervisionError, current_rank, endpoint, this_host
from monarch.config import configured
from monarch.testing import CrashHost, Delay, Duplicate, Partition, Reorder, simulate
from monarch.testing.scheduler import Vanished

HOSTS = 14  # home, and three levels below it with a fan-out of 2 (2, 4 and 7 hosts)
FANOUT = 2


class Rank(Actor):
    @endpoint
    def rank(self):
        return current_rank().rank


def connect(hosts):
    hosts.spawn_procs().spawn("ranks", Rank).rank.call().get()
    time.sleep(1.0)


class Spawner(Actor):
    """Spawns meshes on all hosts, one after the other, and calls them."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.lost = Counter()

    @endpoint
    def connect(self):
        """Begin the sessions of this host with all others."""
        connect(self.hosts)

    @endpoint
    def run(self, meshes, pause):
        """Return the ranks of each mesh that answered, and the errors of the others."""
        answered, errors = [], []
        spawned = []
        for _ in range(meshes):
            ranks = self.hosts.spawn_procs({"gpus": 2}).spawn("ranks", Rank)
            spawned.append(ranks.rank.options(on_failure="partial").call())
            time.sleep(pause)
        for future in spawned:
            outcomes = future.get().values()
            answered.append([rank for rank, out in enumerate(outcomes) if rank == out])
            errors += [str(out) for out in outcomes if isinstance(out, SupervisionError)]
        return answered, errors

    def __supervise__(self, failure):
        self.lost.update(failure.crashed_ranks)
        return True


@pytest.fixture
def launched(monkeypatch):
    """Count the launches of each proc."""
    counts: Counter[int] = Counter()
    former = AgentCore._spawn_here

    def spawn_here(self, parent, spec, procs, ends):
        counts.update(proc["uid"] for proc in procs)
        former(self, parent, spec, procs, ends)

    monkeypatch.setattr(AgentCore, "_spawn_here", spawn_here)
    return counts


@pytest.fixture
def direct(monkeypatch):
    """Count the direct messages between agents, by kind and sender."""
    counts: Counter[tuple[str, str]] = Counter()
    former = PeerHost._handle

    def handle(self, message):
        counts[message["op"], self.name] += 1
        former(self, message)

    monkeypatch.setattr(PeerHost, "_handle", handle)
    return counts


def program(meshes=3, pause=0.0, fanout=FANOUT, at=None, before=None):
    """Return a script that spawns from the host of number `at`, or from home."""

    def main(hosts):
        with configured(max_cast_fanout=fanout):
            there = this_host() if at is None else hosts.slice(hosts=at)
            spawner = there.spawn_procs().spawn("spawner", Spawner, hosts)
            if before is not None:
                connect(hosts)  # first, as only home can begin the job on a host
                spawner.connect.call_one().get()
                before()
            return spawner.run.call_one(meshes, pause).get()

    return main


ALL = list(range(2 * HOSTS))


@pytest.mark.parametrize("at", [None, 5])
@pytest.mark.parametrize("seed", range(3))
def test_a_spawn_goes_down_the_tree(seed, at, launched, direct):
    """From home, and from another host: no host but home gets a direct message for it."""
    there = HOME if at is None else f"host{at}"
    faults = [
        Reorder(0.0, seconds=60, by=0.05),
        Duplicate(0.0, seconds=60, probability=0.3),
        Delay(0.0, 1 + seed, 4 + seed, seconds=60, by=0.2),
    ]

    def begin():
        launched.clear()
        direct.clear()

    done = simulate(program(at=at, before=begin), hosts=HOSTS, seed=seed, faults=faults)
    assert done.value == ([ALL] * 3, [])
    assert set(launched.values()) == {1}
    assert len(launched) == 3 * len(ALL)
    # Only home gets copies, since it hears at once where the next procs live.
    spawns = sum(number for (op, _), number in direct.items() if op in ("spawn", "open"))
    assert direct["spawn", there] == spawns <= (0 if at is None else 3)


def test_up_to_the_fan_out_procs_are_spawned_directly(launched, direct):
    done = simulate(program(fanout=HOSTS - 1), hosts=HOSTS)
    assert done.value == ([ALL] * 3, [])
    assert direct["spawn", HOME] == 3 * (HOSTS - 1)
    assert direct["open", HOME] == 2 * 3 * (HOSTS - 1)
    assert set(launched.values()) == {1}


@pytest.mark.parametrize("seed", range(20))
def test_hosts_that_are_lost_in_the_middle(seed, launched, monkeypatch):
    """All procs of the other hosts run, once, and errors name the lost hosts."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    chance = random.Random(seed)
    first = chance.choice([1, 2, 8])
    lost = [first, chance.choice([host for host in range(1, HOSTS) if host != first])]
    faults = [CrashHost(0.004 + 0.2 * chance.random() ** 2, host) for host in lost]
    main = program(pause=0.02, fanout=1 + seed % 3)
    answered, errors = simulate(main, hosts=HOSTS, seed=seed, faults=faults).value
    gone = {2 * host + gpu for host in lost for gpu in range(2)}
    for ranks in answered:
        assert {*ALL} - {*ranks} <= gone
    assert answered[-1] == sorted({*ALL} - gone) or len(errors) < 3 * len(gone)
    assert all(any(f"host{host}" in error for host in lost) for error in errors)
    assert set(launched.values()) == {1}


@pytest.mark.parametrize("seed", range(6))
def test_two_hosts_that_do_not_reach_each_other(seed, launched):
    """The spawning host reaches both, so that all procs run."""
    one = random.Random(seed).choice([1, 2, 8])
    faults = [Partition(0.0, one, other, seconds=1e6) for other in range(1, HOSTS) if other != one]
    done = simulate(program(), hosts=HOSTS, seed=seed, faults=faults)
    assert done.value == ([ALL] * 3, [])
    assert set(launched.values()) == {1}


@pytest.mark.parametrize("seed", range(6))
def test_direct_messages_do_not_overtake_an_order(seed, launched, monkeypatch):
    """Procs that are stopped at once, some by a direct request to kill, leave nothing behind."""
    said: Counter[str] = Counter()
    former = PeerHost._handle

    def handle(self, message):
        said[message["op"] + " copy" * ("number" in message)] += 1
        former(self, message)

    monkeypatch.setattr(PeerHost, "_handle", handle)

    def main(hosts):
        with configured(max_cast_fanout=FANOUT):
            connect(hosts)
            for pause in (0.0, 0.001):
                procs = hosts.spawn_procs({"gpus": 2})
                time.sleep(pause)
                ranks = procs.spawn("ranks", Rank)
                one = ranks.slice(hosts=HOSTS - 1, gpus=0).rank.call_one()  # by its own link
                assert one.get() == 0  # in its slice
                procs.stop().get()
            procs = hosts.spawn_procs({"gpus": 2})
            client_proc().kill_procs([procs._base + rank for rank in ALL])
            time.sleep(1.0)
            again = hosts.spawn_procs().spawn("ranks", Rank)
            return list(again.rank.call().get().values())

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    slow = [Delay(0.0, 1, other, seconds=60, by=0.1) for other in range(2, HOSTS)]
    done = simulate(main, hosts=HOSTS, seed=seed, faults=slow)
    assert done.value == list(range(HOSTS))
    assert set(launched.values()) == {1}
    assert said["spawn"] == 0
    assert said["spawn copy"], "no direct message had to take an order with it"


@pytest.mark.parametrize("hosts", [40, 100])
def test_the_messages_of_the_spawning_agent_do_not_grow_with_the_hosts(hosts, monkeypatch):
    sent: Counter[str] = Counter()
    former = PeerHost.cast
    former_say = PeerHost._say

    def cast(self, lane, buffers):
        sent[self._agent.name, "cast"] += 1
        return former(self, lane, buffers)

    def say(self, message, done=None):
        sent[self._agent.name, message["op"]] += 1
        former_say(self, message, done)

    def main(there):
        with configured(max_cast_fanout=4):
            connect(there)
            sent.clear()
            procs = there.spawn_procs({"gpus": 2})
            procs.initialized.get()
            time.sleep(0.5)
            return {what: number for (name, what), number in sent.items() if name == HOME}

    monkeypatch.setattr(PeerHost, "cast", cast)
    monkeypatch.setattr(PeerHost, "_say", say)
    sent_here = simulate(main, hosts=hosts).value
    # The order and the question whether all runs: each goes to 4 children, and is released there.
    assert sent_here.keys() == {"cast"}
    assert 2 * 4 + 4 <= sent_here["cast"] <= 2 * (4 + 4)


POINTS = {
    "sent": (CastRelay, "order"),
    "arrived": (CastRelay, "_on_cast"),
    "accepted": (PeerHost, "ordered"),
    "carried out": (PeerHost, "_carry_out_by_tree"),
    "launched": (AgentCore, "_spawn_here"),
}
"""The life of an order: at its sender, and then at each host."""

FEW = 8  # hosts: home, and with a fan-out of 2 two, four and one


def host_of(there):
    """Return the simulated host of a part of an agent."""
    if isinstance(there, CastRelay):
        return there._carrier._shell
    return there._agent._agent if isinstance(there, PeerHost) else there._shell


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    ("at", "victim", "witness"),
    [
        (None, 1, 1),  # a host in the middle
        (None, 7, 7),  # one below it
        (None, 1, 7),  # the middle, when the order is past it
        (5, 7, 1),
        (5, 5, 1),  # the sender
    ],
)
def test_a_host_that_is_lost_at_a_point_of_an_order(
    point, at, victim, witness, launched, monkeypatch
):
    """It loses power when `witness` is there. Each wait ends, and other hosts have their procs."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    owner, name = POINTS[point]
    former = getattr(owner, name)
    if point == "sent":
        witness = at or 0
    armed, crashed = [], []

    def watched(self, *args, **kwargs):
        host = host_of(self)
        world = host.world
        if point == "launched":
            former(self, *args, **kwargs)
        if armed and not crashed and host.ident == witness:
            crashed.append(world.scheduler.now)
            world.crash_host(world.hosts[victim])
            if victim == witness:
                raise Vanished
        if point != "launched":
            former(self, *args, **kwargs)

    def main(hosts):
        try:
            return program(meshes=2, at=at, before=lambda: armed.append(True))(hosts)
        except SupervisionError as error:
            return str(error)

    monkeypatch.setattr(owner, name, watched)
    done = simulate(main, hosts=FEW, seed=f"{point} {victim}")
    assert crashed
    assert set(launched.values()) == {1}
    if victim == at:
        assert "host5" in done.value
        return
    answered, errors = done.value
    lost = {2 * victim, 2 * victim + 1}
    assert all({*range(2 * FEW)} - {*ranks} <= lost for ranks in answered)
    assert {*answered[1]} == {*range(2 * FEW)} - lost
    assert all(f"host{victim}" in error for error in errors)
    assert len(errors) == 4 - len(lost & {*answered[0]})
