"""Direct connections between simulated hosts keep what a link promises, whatever happens to them.

A program sees no connection. Each message arrives once, in the order of its sender, and each call
has an outcome, while connections are made, lose packets, break and give way to the tunnel, and
while processes exit and hosts are lost.
"""

from __future__ import annotations

import random
import time

import pytest

import monarch.actor
from monarch._engine.runtime.direct import manager, ticket
from monarch.actor import Actor, SupervisionError, Supervisor, endpoint
from monarch.config import configured
from monarch.testing import (
    Crash,
    CrashAgent,
    CrashHost,
    Drop,
    Partition,
    Pause,
    Rates,
    Reorder,
    random_faults,
    simulate,
)

COUNT = 300


class Reader(Actor):
    """An actor that stores what it receives, by sender."""

    def __init__(self):
        self.notes = []

    @endpoint
    def read(self, sender, number, data=b""):
        self.notes.append((sender, number))
        return number

    @endpoint
    def all_notes(self):
        return self.notes


class Writer(Actor):
    """An actor that sends numbers to readers, in every way that takes another path."""

    @endpoint
    def write(self, name, seed, reader, readers, count=COUNT):
        chance = random.Random(f"{seed} {name}")
        pending, outcomes = [], []
        for number in range(count):
            how = chance.random()
            if how < 0.5:
                reader.read.broadcast(name, number)
            elif how < 0.93:
                pending.append((number, reader.read.call_one(name, number)))
            elif how < 0.96:  # more than a socket takes at once
                pending.append((number, reader.read.call_one(name, number, bytes(1 << 19))))
            else:  # a cast, which only the tunnel carries
                readers.read.broadcast(name, number)
            if chance.random() < 0.2:
                time.sleep(chance.random() / 50)
        for number, future in pending:
            try:
                assert future.get(timeout=300) == number
                outcomes.append("value")
            except SupervisionError:
                outcomes.append("lost")
        return outcomes


def exchange(seed, rounds=1):
    """Return a program in which actors of two hosts send to a reader of the other host."""

    def main(hosts):
        procs = hosts.spawn_procs(name="p")
        readers = procs.spawn("reader", Reader)
        writers = procs.spawn("writer", Writer)
        outcomes = []
        for turn in range(rounds):
            futures = [
                writers.slice(hosts=host).write.call_one(
                    (host, turn), seed, readers.slice(hosts=1 - host), readers
                )
                for host in (0, 1)
            ]
            outcomes += [outcome_of(future) for future in futures]
            time.sleep(1)
        notes = [readers.slice(hosts=host).all_notes.call_one() for host in (0, 1)]
        return outcomes, list(map(outcome_of, notes))

    return main


def outcome_of(future):
    try:
        return future.get(timeout=600)
    except SupervisionError:
        return None


def in_order(notes):
    """Check that no message arrived twice or before an earlier one of its sender."""
    for sender in {sender for sender, _ in notes}:
        numbers = [number for name, number in notes if name == sender]
        assert numbers == sorted(set(numbers)), f"{sender}: out of order or twice: {numbers}"


def direct(done):
    """Return the direct connections that were made or refused, as (moment, reason)."""
    return [(each[0], each[3]) for each in done.trace if each[1] == "direct"]


def check_whole(done, rounds=1):
    """Check that all messages arrived."""
    outcomes, notes = done.value
    assert [set(each) for each in outcomes] == [{"value"}] * 2 * rounds
    for host, got in enumerate(notes):
        in_order(got)
        theirs = [number for (sender, _), number in got if sender == 1 - host]
        assert theirs == list(range(COUNT)) * rounds


@pytest.fixture
def losses(monkeypatch):
    """Let failures reach the script: the plan causes them."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)


def test_busy_links_get_a_connection_and_quiet_ones_do_not():
    def quiet(hosts):
        readers = hosts.spawn_procs().spawn("reader", Reader)
        return [readers.read.call("script", number).get() and number for number in range(20)]

    assert direct(simulate(quiet, hosts=2, trace=True)) == []
    done = simulate(exchange(0), hosts=2, trace=True)
    check_whole(done)
    assert "" in {reason for _, reason in direct(done)}


def test_the_setting_switches_connections_off():
    with configured(direct_connections=False):
        done = simulate(exchange(0), hosts=2, trace=True)
    check_whole(done)
    assert direct(done) == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "faults",
    [
        [Drop(0.0, seconds=9, probability=0.1)],
        [Reorder(0.0, seconds=9, by=0.1)],
        [Partition(0.2, 0, 1, seconds=2.0)],  # more than a connection waits, less than a host
        [Partition(0.1, 0, 1, seconds=2.0, one_way=True)],
        [Partition(0.1, 1, 0, seconds=2.0, one_way=True), Pause(0.2, "p-0", seconds=3)],
        [Pause(0.1, "p-1", seconds=6), Drop(0.1, seconds=1, probability=0.2)],
    ],
    ids=["drop", "reorder", "cut", "cut one way", "cut and paused", "paused"],
)
def test_nothing_is_lost_or_doubled_when_a_connection_breaks(faults, seed):
    check_whole(simulate(exchange(seed), hosts=2, faults=faults, seed=seed, trace=True))


def test_after_a_break_messages_take_the_tunnel_then_another_connection(monkeypatch):
    monkeypatch.setattr(manager, "_LESS", 1)  # as many messages as for the first connection
    faults = [Partition(0.3, 0, 1, seconds=2.0)]
    done = simulate(exchange(3, rounds=3), hosts=2, faults=faults, seed=3, trace=True)
    check_whole(done, rounds=3)
    made = [moment for moment, reason in direct(done) if not reason]
    assert made[0] < 0.3
    assert made[-1] > 2.3


@pytest.mark.parametrize("how", ["wrong key", "closed port", "no ticket"])
def test_a_connection_that_cannot_be_made_leaves_the_tunnel_in_use(monkeypatch, how):
    invite = ticket.Door.invite

    def altered(door, arrived):
        good = invite(door, arrived)
        if how == "no ticket":
            raise OSError("no port is free")
        return good._replace(key=bytes(32)) if how == "wrong key" else good._replace(port=1)

    monkeypatch.setattr(ticket.Door, "invite", altered)
    done = simulate(exchange(1), hosts=2, trace=True)
    check_whole(done)
    reasons = {reason for _, reason in direct(done)}
    assert "" not in reasons
    assert len(reasons) == (how == "wrong key")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", [Crash(0.25, "p-1"), CrashAgent(0.25, 1), CrashHost(0.25, 1)])
@pytest.mark.usefixtures("losses")
def test_calls_over_a_connection_end_when_the_other_side_does(fault, seed):
    done = simulate(exchange(seed), hosts=2, faults=[fault], seed=seed, trace=True)
    outcomes, notes = done.value
    assert "" in {reason for _, reason in direct(done)}
    assert (outcomes[1], notes[1]) == (None, None)
    assert set(outcomes[0]) == {"value", "lost"}
    assert outcomes[0] == sorted(outcomes[0], reverse=True), "answers of an exited process"
    in_order(notes[0])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("losses")
def test_random_faults(seed):
    """Any fault may cost answers, never the order, and each call has an outcome."""
    rates = Rates(
        crash=0.2, pause=1, slow=0.5, partition=1.5, drop=1, reorder=0.5, within=1.0, longest=2.5
    )
    faults = random_faults(seed, rates, hosts=2)
    done = simulate(exchange(seed, 2), hosts=2, faults=faults, seed=seed, trace=True, strict=False)
    for got in filter(None, done.value[1]):
        in_order(got)


def test_a_rank_that_is_restarted_gets_a_connection_of_its_own(monkeypatch):
    monkeypatch.setattr(manager, "_LESS", 1)

    def main(hosts):
        supervisor = Supervisor("one_for_one", max_restarts=3, within=60)
        procs = hosts.slice(hosts=slice(1, 2)).spawn_procs(name="p")
        readers = supervisor.spawn(procs, "reader", Reader)
        writer = hosts.slice(hosts=0).spawn_procs().spawn("writer", Writer)
        first = writer.write.call_one("first", 0, readers, readers).get()
        time.sleep(5)
        supervisor.healthy.get()
        second = writer.write.call_one("second", 0, readers, readers).get()
        return first, second, readers.all_notes.call_one().get()

    done = simulate(main, hosts=2, faults=[Crash(0.2, "p-0")], trace=True)
    first, second, notes = done.value
    assert set(first) <= {"value", "lost"}
    assert set(second) == {"value"}
    in_order(notes)
    assert [number for name, number in notes if name == "second"] == list(range(COUNT))
    assert len([reason for _, reason in direct(done) if not reason]) >= 2


def test_the_same_seed_gives_the_same_steps():
    faults = [Drop(0.0, seconds=2, probability=0.2), Partition(0.3, 0, 1, seconds=2)]
    first, again = (
        simulate(exchange(5), hosts=2, faults=faults, seed=5, trace=True) for _ in range(2)
    )
    assert (first.steps, first.elapsed, first.trace) == (again.steps, again.elapsed, again.trace)
