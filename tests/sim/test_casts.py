"""Casts between simulated hosts: their order among other messages, and hosts lost meanwhile."""

from __future__ import annotations

import random
import time

import pytest

import monarch.actor
from monarch._engine.protocol.session.channel import Channel
from monarch.actor import Actor, SupervisionError, endpoint, this_host
from monarch.config import configured
from monarch.testing import (
    CrashHost,
    Delay,
    Duplicate,
    Partition,
    Reorder,
    simulate,
)

HOSTS = 7


class Ledger(Actor):
    def __init__(self):
        self.notes = {}

    @endpoint
    def note(self, who, number):
        self.notes.setdefault(who, []).append(number)
        return number

    @endpoint
    def noted(self):
        return self.notes


class Caller(Actor):
    """A caller of numbered notes to all, to some and to one, in any mixture."""

    def __init__(self, ledgers):
        self.ledgers = ledgers
        self.failures = []

    @endpoint
    def run(self, who, seed, count):
        chance = random.Random(seed)
        ledgers = self.ledgers
        sizes = dict(ledgers.extent.items())
        pending = []
        lost = 0
        for number in range(count):
            hosts, gpus = chance.randrange(sizes["hosts"]), chance.randrange(sizes["gpus"])
            some = chance.choice(
                [
                    ledgers,
                    ledgers.slice(hosts=hosts),
                    ledgers.slice(gpus=gpus),
                    ledgers.slice(hosts=slice(hosts // 2, hosts + 1)),
                    ledgers.slice(hosts=hosts, gpus=gpus),
                ]
            )
            how = chance.choice(["call", "broadcast", "stream", "call"])
            if how == "broadcast":
                some.note.broadcast(who, number)
            elif how == "stream":
                pending += [(number, future) for future in some.note.stream(who, number)]
            else:
                pending.append((number, some.note.options(on_failure="partial").call(who, number)))
            if chance.random() < 0.3:
                time.sleep(chance.random() / 20)
            if len(pending) > 20:
                lost += sum(self.settle(*pending.pop(0)) for _ in range(15))
        return lost + sum(self.settle(*each) for each in pending)

    def settle(self, number, future):
        try:
            value = future.get()
        except SupervisionError:
            return 1
        values = [value] if isinstance(value, int) else list(value.values())
        assert all(isinstance(each, SupervisionError) or each == number for each in values)
        return sum(each != number for each in values)

    def __supervise__(self, failure):
        self.failures.append(failure)
        return True


class Owner(Actor):
    def __init__(self, hosts):
        self.hosts = hosts
        self.ledgers = hosts.spawn_procs({"gpus": 2}).spawn("ledger", Ledger)
        self.ledgers.noted.call().get()
        self.callers = (
            hosts.slice(hosts=slice(0, 3)).spawn_procs().spawn("caller", Caller, self.ledgers)
        )

    @endpoint
    def run(self, seed, count):
        """Return what was lost to each caller, and whether every ledger has all notes in order."""
        running = [
            self.callers.slice(hosts=host).run.call_one(host, 10 * seed + host, count)
            for host in range(3)
        ]
        lost = []
        for future in running:
            try:
                lost.append(future.get())
            except SupervisionError:
                lost.append(None)
        noted = 0
        for future in self.ledgers.noted.stream():
            try:
                notes = future.get()
            except SupervisionError:
                continue
            noted += 1
            for numbers in notes.values():
                assert numbers == sorted(set(numbers)), f"out of order or twice: {numbers}"
        return lost, noted

    def __supervise__(self, failure):
        return True


def program(seed, count=60, fanout=2):
    def main(hosts):
        with configured(max_cast_fanout=fanout):
            owner = this_host().spawn_procs().spawn("owner", Owner, hosts)
            return owner.run.call_one(seed, count).get()

    return main


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fanout", [1, 2, 16])
def test_any_mixture_keeps_its_order(seed, fanout):
    """The simulator's own invariant checks every call as well."""
    faults = [
        Reorder(0.0, seconds=60, by=0.05),
        Duplicate(0.0, seconds=60, probability=0.3),
        Delay(0.0, seed % HOSTS, (seed + 1) % HOSTS, seconds=60, by=0.3),
    ]
    done = simulate(program(seed, fanout=fanout), hosts=HOSTS, seed=seed, faults=faults)
    assert done.value == ([0, 0, 0], 2 * HOSTS)


@pytest.mark.parametrize("seed", range(12))
def test_hosts_that_are_lost_in_the_middle(seed, monkeypatch):
    """Inner hosts of the tree, too: all other hosts get all notes, and every call ends."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    chance = random.Random(seed)
    lost = chance.sample(range(3, HOSTS), 2)
    faults = [CrashHost(0.2 + 0.3 * chance.random(), host) for host in lost]
    done = simulate(program(seed, 100, fanout=1 + seed % 3), hosts=HOSTS, seed=seed, faults=faults)
    losses, noted = done.value
    assert None not in losses
    assert noted == 2 * (HOSTS - 2)


@pytest.mark.parametrize("seed", range(6))
def test_two_hosts_that_do_not_reach_each_other(seed, monkeypatch):
    """The caller reaches both hosts, so that it loses neither."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    a, b = random.Random(seed).sample(range(3, HOSTS), 2)
    faults = [Partition(0.2, a, b, seconds=1e6)]
    done = simulate(program(seed, fanout=1), hosts=HOSTS, seed=seed, faults=faults)
    assert done.value == ([0, 0, 0], 2 * HOSTS)


class Weigher(Actor):
    @endpoint
    def weigh(self, data):
        return len(data)


def test_the_network_carries_a_payload_once_for_each_host(monkeypatch):
    carried = []
    former = Channel.send

    def send(self, lane, buffers, token=None):
        carried.append(sum(map(len, buffers)))
        return former(self, lane, buffers, token)

    def main(hosts):
        there = hosts.slice(hosts=slice(1, None))
        weighers = there.spawn_procs({"gpus": 4}).spawn("weighers", Weigher)
        weighers.weigh.call(b"").get()
        carried.clear()
        weights = list(weighers.weigh.call(bytes(1_000_000)).get().values())
        return weights, sum(carried), len(carried)

    monkeypatch.setattr(Channel, "send", send)
    weights, size, messages = simulate(main, hosts=6).value
    assert weights == [1_000_000] * 20
    assert 5_000_000 < size < 5_100_000
    assert messages <= 3 * 5  # a cast, an answer, and a release for each
