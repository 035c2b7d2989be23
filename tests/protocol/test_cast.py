"""Casts reach each host once and account for each rank once, whichever hosts are lost when."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import accumulate, count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch._engine.protocol import cast as cast_module
from monarch._engine.protocol.cast import (
    Answer,
    Casts,
    Deliver,
    Forward,
    Loss,
    Outcomes,
    Release,
    Reply,
    Route,
)

ROOT = "root"


# --------------------------------------------------------------------------------------------------
# The tree
# --------------------------------------------------------------------------------------------------


def tree(hosts: int, fanout: int) -> dict[int, tuple[int, int]]:
    """Return parent and depth of each host, as the routes define them. The root is host 0."""
    places = {0: (-1, 0)}
    stack = [Route(tuple(range(hosts)), tuple(range(hosts + 1)), fanout)]
    while stack:
        route = stack.pop()
        assert route.starts == tuple(range(route.hosts[0], route.hosts[-1] + 2))
        parts = route.parts()
        assert len(parts) <= fanout
        sizes = [len(part.hosts) for part in parts]
        assert not sizes or max(sizes) - min(sizes) <= 1
        assert route.hosts[1:] == tuple(host for part in parts for host in part.hosts)
        for part in parts:
            assert part.hosts[0] not in places, "two parents"
            places[part.hosts[0]] = route.hosts[0], places[route.hosts[0]][1] + 1
        stack += parts
    return places


@pytest.mark.parametrize("fanout", [1, 2, 3, 8, 32])
def test_the_tree_is_the_shallowest_there_is(fanout) -> None:
    for hosts in [*range(1, 120), 1000, 10_000][: 60 if fanout == 1 else None]:
        places = tree(hosts, fanout)
        assert set(range(hosts)) == set(places)
        depth = 0
        while sum(fanout**level for level in range(depth + 1)) < hosts:
            depth += 1
        assert depth == max(depth for _, depth in places.values())


# --------------------------------------------------------------------------------------------------
# Hosts in a network
# --------------------------------------------------------------------------------------------------


class World:
    """Hosts that forward casts in virtual time; they crash or lose the connection to each other.

    Two hosts that were cut apart exchange no more messages. Each is notified later at its own time,
    as by failure detectors. Messages in transit between them are lost.
    """

    def __init__(self, seed: int, hosts: int, *, patience: float = 10.0) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, object]] = []
        self.number = count()
        self.patience = patience
        self.names = [ROOT, *range(hosts)]
        self.nodes = {name: Casts(name, hold=0.05, patience=patience) for name in self.names}
        self.crashed: set[object] = set()
        self.cut_pairs: set[frozenset] = set()
        self.told: set[tuple] = set()
        self.arrivals: dict[tuple, float] = {}
        self.delivered: Counter = Counter()
        self.outcomes: dict[object, list] = {}
        self.done: set[object] = set()
        self.sent: Counter = Counter()
        self.think = lambda rank: self.random.random() * 0.1

    def at(self, delay: float, event) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.number), event))

    def carry_out(self, me, effects) -> None:
        for effect in effects:
            match effect:
                case Deliver(cast, first, last):
                    self.delivered[cast, me] += 1
                    for rank in range(first, last):
                        self.at(self.think(rank), lambda c=cast, r=rank: self.answer(me, c, r))
                case Forward(to, cast, level, route):
                    assert route.hosts[0] == to
                    self.carry(me, to, "on_forward", me, cast, level, route)
                case Reply(to, cast, answers):
                    assert answers
                    self.carry(me, to, "on_reply", cast, answers)
                case Release(to, cast, done):
                    self.carry(me, to, "on_release", me, cast, done)
                case Outcomes(cast, answers, done):
                    assert me == ROOT
                    assert cast not in self.done
                    self.outcomes.setdefault(cast, []).extend(answers)
                    if done:
                        self.done.add(cast)

    def answer(self, me, cast, rank) -> None:
        if me not in self.crashed:
            self.carry_out(me, self.nodes[me].answered(cast, rank, (me, rank), self.now))

    def carry(self, me, to, what, *arguments) -> None:
        """Carry a message; messages between two hosts keep their order."""
        self.sent[what] += 1
        if frozenset((me, to)) in self.cut_pairs or to in self.crashed:
            return
        arrives = max(self.now + self.random.random() * 0.05, self.arrivals.get((me, to), 0.0))
        self.arrivals[me, to] = arrives

        def arrive() -> None:
            if to in self.crashed or (to, me) in self.told or (me, to) in self.told:
                return
            if frozenset((me, to)) in self.cut_pairs:
                return
            self.carry_out(to, getattr(self.nodes[to], what)(*arguments, self.now))

        heapq.heappush(self.events, (arrives, next(self.number), arrive))

    def tell(self, me, host) -> None:
        if me in self.crashed or (me, host) in self.told or me == host:
            return
        self.told.add((me, host))
        self.carry_out(me, self.nodes[me].host_lost(host, "cut off", self.now))

    def cut(self, one, other) -> None:
        self.cut_pairs.add(frozenset((one, other)))
        for me, host in ((one, other), (other, one)):
            self.at(self.random.random() * 3, lambda me=me, host=host: self.tell(me, host))

    def crash(self, host) -> None:
        self.crashed.add(host)
        for me in self.names:
            if me != host:
                self.cut(me, host)

    def begin(self, cast, hosts, sizes, fanout) -> None:
        starts = [0, *accumulate(sizes)]
        self.carry_out(ROOT, self.nodes[ROOT].cast(cast, hosts, starts, fanout, self.now))

    def run(self, until: float = float("inf")) -> None:
        while True:
            times = [
                node.deadline
                for name, node in self.nodes.items()
                if name not in self.crashed and node.deadline is not None
            ]
            times += [self.events[0][0]] if self.events else []
            now = min(times, default=float("inf"))
            if now > until or now == float("inf"):
                return
            self.now = now
            if self.events and self.events[0][0] == now:
                heapq.heappop(self.events)[2]()
            else:
                for name, node in self.nodes.items():
                    if name not in self.crashed and node.deadline == now:
                        self.carry_out(name, node.tick(now))
                        assert node.deadline is None or node.deadline > now

    def ranks(self, cast) -> tuple[dict[int, object], dict[int, object]]:
        """Return the ranks' answers at the root, and the lost ranks with their hosts."""
        answers: dict[int, object] = {}
        losses: dict[int, object] = {}
        for answer in self.outcomes.get(cast, []):
            if isinstance(answer, Answer):
                assert answer.rank not in answers, "accounted for twice"
                assert answer.rank not in losses, "accounted for twice"
                answers[answer.rank] = answer.outcome
            else:
                assert isinstance(answer, Loss)
                for rank in answer.ranks:
                    assert rank not in answers, "accounted for twice"
                    assert rank not in losses, "accounted for twice"
                    losses[rank] = answer.host
        return answers, losses

    def check(self, cast, hosts, sizes) -> None:
        """Check the result of a cast at the end."""
        assert cast in self.done
        answers, losses = self.ranks(cast)
        owner = [host for host, size in zip(hosts, sizes, strict=True) for _ in range(size)]
        assert answers.keys() | losses.keys() == set(range(len(owner)))
        assert all(outcome == (owner[rank], rank) for rank, outcome in answers.items())
        assert all(host == owner[rank] for rank, host in losses.items())
        suspected = {host for _, host in self.told}
        if self.patience > 3.0:  # the time until hosts are notified of a cut
            assert set(losses.values()) <= suspected, "lost without a reason"
        for host, size in zip(hosts, sizes, strict=True):
            times = self.delivered[cast, host]
            assert times <= 1, "delivered twice"
            assert times == (size > 0) or host in suspected
        for name, node in self.nodes.items():
            if name not in self.crashed:
                assert len(node) == 0, "something is kept"


shapes = st.tuples(
    st.lists(st.integers(0, 3), min_size=0, max_size=30),  # ranks of each host
    st.integers(1, 5),  # fan-out
)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), shape=shapes)
def test_all_is_well(seed, shape) -> None:
    sizes, fanout = shape
    world = World(seed, len(sizes))
    world.begin("c", range(len(sizes)), sizes, fanout)
    world.run()
    world.check("c", range(len(sizes)), sizes)
    assert world.ranks("c")[1] == {}
    assert len(sizes) == world.sent["on_forward"] == world.sent["on_release"]


def test_messages_and_hops() -> None:
    """A call to 10,000 hosts needs two messages per host, few at the root, and four hops down."""
    hosts, fanout = 10_000, 16
    world = World(0, 0)
    world.names += range(hosts)
    world.nodes |= {name: Casts(name, hold=10.0) for name in range(hosts)}
    world.random = random.Random(0)
    at_root = Counter()

    def carry(me, to, what, *arguments) -> None:
        world.sent[what] += 1
        at_root[what] += ROOT in (me, to)
        world.at(
            1.0, lambda: world.carry_out(to, getattr(world.nodes[to], what)(*arguments, world.now))
        )

    world.carry = carry
    world.think = lambda rank: 0.0
    world.begin("c", range(hosts), [8] * hosts, fanout)
    while world.events:  # no step of the cast has to wait for a timer
        world.now, _, event = heapq.heappop(world.events)
        event()
    assert world.now == 3 * 4.0  # down, up, and the release
    assert len(world.ranks("c")[0]) == 8 * hosts
    assert {"on_forward": hosts, "on_reply": hosts, "on_release": hosts} == world.sent
    assert {"on_forward": fanout, "on_reply": fanout, "on_release": fanout} == at_root


troubles = st.lists(
    st.tuples(
        st.sampled_from(["crash", "crash", "cut"]),
        st.floats(0.0, 1.0),
        st.integers(0, 29),
        st.integers(-1, 29),
    ),
    max_size=6,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), shape=shapes, troubles=troubles, slow=st.booleans())
def test_whatever_is_lost_whenever(seed, shape, troubles, slow) -> None:
    sizes, fanout = shape
    world = World(seed, len(sizes))
    if slow:
        world.think = lambda rank: world.random.random() * 5
    for what, when, one, other in troubles:
        if one >= len(sizes) or other >= len(sizes) or one == other:
            continue
        two = ROOT if other < 0 else other
        if what == "crash":
            world.at(when, lambda one=one: world.crash(one))
        else:
            world.at(when, lambda one=one, two=two: world.cut(one, two))
    casts = ["c", "d"]
    for number, cast in enumerate(casts):
        world.at(0.4 * number, lambda c=cast: world.begin(c, range(len(sizes)), sizes, fanout))
    world.run()
    for cast in casts:
        world.check(cast, range(len(sizes)), sizes)


@pytest.mark.parametrize("batch", range(50))
def test_partitions_within_the_tree(batch) -> None:
    """Small deep trees whose links break anywhere while forwards and answers are in transit."""
    for seed in range(100 * batch, 100 * batch + 100):
        chance = random.Random(seed)
        hosts = chance.randint(3, 14)
        fanout = chance.randint(1, 3)
        sizes = [chance.randint(0, 2) for _ in range(hosts)]
        world = World(seed, hosts, patience=chance.choice([1.0, 10.0]))
        slow = chance.choice([0.01, 1.0, 10.0])
        world.think = lambda rank, world=world, slow=slow: world.random.random() * slow
        world.begin("c", range(hosts), sizes, fanout)
        for _ in range(chance.randint(1, hosts)):
            one, two = sorted(chance.sample(range(-1, hosts), 2))
            when = chance.random() * chance.choice([0.1, 1.0, 5.0])
            if chance.random() < 0.2:
                world.at(when, lambda two=two, world=world: world.crash(two))
            else:
                one = ROOT if one < 0 else one
                world.at(when, lambda one=one, two=two, world=world: world.cut(one, two))
        world.run()
        world.check("c", range(hosts), sizes)


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_that_falls_apart(seed) -> None:
    """One host after another crashes, inner ones first, while the ranks take their time."""
    sizes = [2] * 40
    world = World(seed, len(sizes))
    world.think = lambda rank: world.random.random() * 20
    world.begin("c", range(40), sizes, 3)
    for number, host in enumerate([0, 1, 5, 14, 15, 27, 28, 2, 3]):
        world.at(0.5 * number, lambda host=host: world.crash(host))
    world.run()
    world.check("c", range(40), sizes)
    answers, losses = world.ranks("c")
    assert set(losses.values()) <= world.crashed
    assert len(answers) >= 2 * (40 - 9)


# --------------------------------------------------------------------------------------------------
# One host
# --------------------------------------------------------------------------------------------------


def test_known_losses_are_not_tried() -> None:
    root = Casts(ROOT)
    root.host_lost("b", "gone for a day", 0.0)
    effects = root.cast(1, ["a", "b", "c"], [0, 1, 2, 3], 1, 0.0)
    assert [effect.to for effect in effects] == ["a"]
    effects = root.host_lost("a", "now", 1.0)
    assert [effect.to for effect in effects if isinstance(effect, Forward)] == ["c"]
    [outcomes] = root.tick(2.0)
    assert [Loss("a", (0,), "now"), Loss("b", (1,), "gone for a day")] == outcomes.answers
    assert not outcomes.done


def test_answers_do_not_wait_for_one_that_hangs() -> None:
    node = Casts("a", hold=0.1)
    node.on_forward(ROOT, 1, 1, Route(("a",), (0, 3), 2), 0.0)
    assert node.answered(1, 2, "x", 5.0) == []
    assert node.deadline == 5.1
    assert node.answered(1, 0, "y", 5.05) == []
    assert [Reply(ROOT, 1, [Answer(2, "x"), Answer(0, "y")])] == node.tick(5.1)
    assert [Reply(ROOT, 1, [Answer(1, "z")])] == node.answered(1, 1, "z", 9.0)


def test_a_cast_to_nobody_is_done() -> None:
    assert [Outcomes(1, [], done=True)] == Casts(ROOT).cast(1, [], [0], 8, 0.0)


def test_a_root_that_wants_no_more() -> None:
    root = Casts(ROOT)
    root.cast(1, ["a", "b"], [0, 1, 2], 1, 0.0)
    assert [Release("a", 1, done=True)] == root.release(1)
    assert [] == root.release(1) == root.on_reply(1, [Answer(0, "late")], 1.0)


def test_nobody_adopts() -> None:
    node = Casts("a", patience=10.0)
    node.on_forward("p", 1, 2, Route(("a", "b"), (0, 1, 2), 2), 0.0)
    assert node.host_lost("p", "gone", 1.0) == []
    assert node.answered(1, 0, "x", 2.0) == []
    assert [Release("b", 1, done=False)] == node.tick(11.0)
    assert len(node) == 0
    # A forward that arrives later gets an answer, but no second execution.
    effects = node.on_forward(ROOT, 1, 1, Route(("a", "b"), (0, 1, 2), 2), 12.0)
    assert [Forward] == [type(effect) for effect in effects]
    [reply] = node.tick(13.0)
    [loss] = reply.answers
    assert loss[:2] == ("a", (0,))
    assert loss.dropped


def test_memory_of_what_is_over_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(cast_module, "REMEMBERED", 10)
    node = Casts("a")
    for number in range(100):
        node.on_forward(ROOT, number, 1, Route(("a",), (0, 1), 2), 0.0)
        node.on_release(ROOT, number, done=True, now=0.0)
    assert len(node._finished) == 10


PAIR = Route(("a", "b"), (0, 1, 3), 2)


def test_the_former_parent_is_followed_again() -> None:
    """The adopter was cut off itself, and the parent that it took for lost was not lost."""
    node = Casts("a", hold=0.0)
    node.on_forward("p", 1, 3, PAIR, 0.0)
    node.answered(1, 0, "x", 0.0)
    assert [Forward("b", 1, 3, PAIR.parts()[0])] == node.on_forward("g", 1, 2, PAIR, 1.0)
    effects = [*node.on_release("g", 1, done=False, now=2.0), *node.tick(2.0)]
    assert [
        Forward("b", 1, 4, PAIR.parts()[0]),
        Reply("p", 1, [Answer(0, "x")]),
    ] == effects


def test_one_that_dropped_a_cast_is_not_lost() -> None:
    """The cast is forwarded to it as to others, or it would never be released."""
    node = Casts("a")
    node.on_forward("p", 1, 3, PAIR, 0.0)
    node.on_reply(1, [Loss("b", (1, 2), "too long ago", dropped=True)], 0.0)
    assert [Forward("b", 1, 3, PAIR.parts()[0])] == node.on_forward("g", 1, 2, PAIR, 1.0)


def test_what_others_found_lost_is_not_tried_again() -> None:
    node = Casts("p")
    node.on_forward(ROOT, 1, 1, Route(("p", "a", "b", "c"), (0, 0, 1, 2, 3), 1), 0.0)
    node.on_reply(1, [Loss("b", (1,), "gone")], 0.0)
    effects = node.host_lost("a", "gone too", 1.0)
    assert [effect.to for effect in effects] == ["c"]


def test_whom_others_found_lost_and_the_root_reaches_it_adopts() -> None:
    root = Casts(ROOT)
    root.cast(1, ["a", "b", "c"], [0, 1, 2, 3], 1, 0.0)
    alone = Route(("b",), (1, 2), 1)
    assert [Forward("b", 1, 1, alone)] == root.on_reply(1, [Loss("b", (1,), "gone")], 0.0)
    assert root.on_reply(1, [Loss("b", (1,), "gone")], 0.0) == []
    outcomes = root.on_reply(1, [Answer(rank, rank) for rank in range(3)], 1.0)
    assert [type(effect) for effect in outcomes] == [Outcomes, Release, Release]


def test_what_others_found_lost_is_lost_to_the_root_that_did_so_too() -> None:
    root = Casts(ROOT)
    root.cast(1, ["a", "b"], [0, 1, 2], 1, 0.0)
    root.host_lost("b", "gone", 0.0)
    loss = Loss("b", (1,), "gone")
    (outcomes, _) = root.on_reply(1, [loss, Answer(0, "x")], 0.0)
    assert outcomes.answers == [loss, Answer(0, "x")]


def test_children_that_a_former_parent_took_are_let_go() -> None:
    node = Casts("a")
    node.on_forward("p", 1, 3, PAIR, 0.0)
    alone = Route(("a",), (0, 1), 2)
    assert [Release("b", 1, done=False)] == node.on_forward(ROOT, 1, 1, alone, 1.0)


def test_the_lost_are_told_nothing() -> None:
    node = Casts("a", hold=0.1)
    node.on_forward("p", 1, 2, PAIR, 0.0)
    node.answered(1, 0, "x", 0.0)
    node.host_lost("p", "gone", 0.0)
    assert node.tick(0.1) == []


def test_a_complete_answer_waits_for_the_next_parent() -> None:
    node, alone = Casts("a"), Route(("a",), (0, 1), 2)
    node.on_forward("p", 1, 2, alone, 0.0)
    node.host_lost("p", "gone", 1.0)
    assert node.answered(1, 0, "x", 2.0) == []
    assert node.on_forward(ROOT, 1, 1, alone, 3.0) == [Reply(ROOT, 1, [Answer(0, "x")])]
