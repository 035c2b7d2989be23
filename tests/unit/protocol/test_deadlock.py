"""The deadlock detector finds all cycles of waits and nothing else, whatever the network does.

The model is a cluster of actors that call each other at random, over FIFO links that deliver when
the test decides. A brute-force search determines at every moment which waits are in a cycle.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._deadlock.search import (
    PAUSE,
    Break,
    Call,
    Chase,
    Deadlocks,
    Effect,
    Node,
    Probe,
    Story,
)


class Link:
    """One of possibly several links between two procs: a FIFO queue in each direction."""

    def __init__(self, ends: tuple[Proc, Proc]) -> None:
        self.ends = ends
        self.queues: dict[Proc, deque[Any]] = {end: deque() for end in ends}  # by receiver

    def send(self, sender: Proc, message: Any) -> None:
        here, there = self.ends
        self.queues[there if sender is here else here].append(message)


class ModelCall:
    """A call from a wait to an actor, and its present state."""

    def __init__(self, wait: ModelWait, callee: ModelActor, link: Link, port: int) -> None:
        self.wait = wait
        self.callee = callee
        self.link = link
        self.port = port
        self.missing = True  # whether the caller still lacks the answer
        # When the call stopped being able to be stuck: it was answered or handed aside.
        self.settled = float("inf")


class ModelWait:
    """The model's implementation of `deadlock.Wait`."""

    def __init__(self, actor: ModelActor, number: int, now: int) -> None:
        self.actor_ = actor
        self.actor = actor.uid
        self.number = number
        self.story: Story = (str(actor.proc.uid), str(actor.uid), str(number))
        self.calls: list[ModelCall] = []
        self.begun = now
        self.ended = float("inf")
        self.told = False

    @property
    def standing(self) -> bool:
        return self.ended == float("inf")

    def unanswered(self) -> list[Call]:
        return [Call(c.link, c.callee.uid, c.port) for c in self.calls if c.missing]

    def owes(self, link: Any, port: int) -> bool:
        return (link, port) not in self.actor_.aside


class ModelActor:
    def __init__(self, proc: Proc, uid: int) -> None:
        self.proc = proc
        self.uid = uid
        self.mailbox: deque[ModelCall | None] = deque()
        self.current: ModelCall | None = None
        self.busy = False
        self.wait: ModelWait | None = None
        self.aside: dict[tuple[Any, int], ModelCall] = {}


class Proc:
    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.core = Deadlocks(uid)
        self.actors: dict[int, ModelActor] = {}
        self.ports: dict[int, ModelCall] = {}
        self.numbers = itertools.count(1)


class Cluster:
    """The model; the module's header describes it.

    The checks measure time in steps of the model; the detectors under test see seconds.
    """

    def __init__(self, chance: random.Random, procs: int, actors: int, links: int) -> None:
        self.chance = chance
        self.step = 0
        self.now = 0.0
        self.procs = [Proc(uid) for uid in chance.sample(range(100), procs)]
        self.links: dict[tuple[Proc, Proc], Link] = {}
        self.all_links: list[Link] = []
        for here, there in itertools.combinations_with_replacement(self.procs, 2):
            between = [Link((here, there)) for _ in range(1 if here is there else links)]
            self.all_links += between
            # Each side chooses its own link, as when both procs introduce each other at once.
            self.links[here, there] = chance.choice(between)
            self.links[there, here] = chance.choice(between)
        self.actors: list[ModelActor] = []
        for proc in self.procs:
            for uid in chance.sample(range(100), actors):
                proc.actors[uid] = ModelActor(proc, uid)
                self.actors.append(proc.actors[uid])
        self.waits: dict[Node, ModelWait] = {}
        self.broken: list[list[ModelWait]] = []
        self.external = 0

    # -- what actors do --------------------------------------------------------------------------

    def call(self, wait: ModelWait, callee: ModelActor) -> None:
        proc = wait.actor_.proc
        port = next(proc.numbers)
        call = ModelCall(wait, callee, self.links[proc, callee.proc], port)
        wait.calls.append(call)
        proc.ports[port] = call
        call.link.send(proc, ("call", call))

    def begin_wait(self, actor: ModelActor, callees: list[ModelActor]) -> None:
        actor.wait = wait = ModelWait(actor, next(actor.proc.numbers), self.step)
        self.waits[Node(actor.proc.uid, actor.uid, wait.number)] = wait
        for callee in callees:
            self.call(wait, callee)

    def end_wait(self, wait: ModelWait) -> None:
        if wait.standing:
            wait.ended = self.step
            wait.actor_.wait = None

    def answer(self, call: ModelCall | None) -> None:
        if call is not None:
            call.settled = min(call.settled, self.step)
            call.link.send(call.callee.proc, ("answer", call))

    def take(self, actor: ModelActor) -> None:
        actor.current, actor.busy = actor.mailbox.popleft(), True

    def done(self, actor: ModelActor) -> None:
        self.answer(actor.current)
        actor.current, actor.busy = None, False

    def hand_aside(self, actor: ModelActor) -> None:
        """Let the current call, to a concurrent endpoint, continue beside the mailbox."""
        call = actor.current
        if call is not None:
            call.settled = min(call.settled, self.step)
            actor.aside[call.link, call.port] = call
        actor.current, actor.busy = None, False

    # -- what procs do ---------------------------------------------------------------------------

    def deliver(self, link: Link, receiver: Proc) -> None:
        kind, *content = link.queues[receiver].popleft()
        if kind == "call":
            (call,) = content
            call.callee.mailbox.append(call)
        elif kind == "answer":
            (call,) = content
            call.missing = False
            if all(not c.missing for c in call.wait.calls):
                self.end_wait(call.wait)
        elif kind == "chase":
            actor, port, data = content
            probe = Probe.from_bytes(data)
            self.do(receiver, receiver.core.chased(self.now, link, actor, port, probe))
        else:
            actor, data = content
            self.do(receiver, receiver.core.proven(link, actor, Probe.from_bytes(data)))

    def tell(self, wait: ModelWait) -> None:
        """Report to the detector that the wait has become long."""
        wait.told = True
        proc = wait.actor_.proc
        self.do(proc, proc.core.begin(self.now, wait))

    def tick(self, proc: Proc) -> None:
        if proc.core.deadline is not None and proc.core.deadline <= self.now:
            self.do(proc, proc.core.tick(self.now))

    def do(self, proc: Proc, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Chase):
                for link, actor, port in effect.calls:
                    link.send(proc, ("chase", actor, port, effect.probe.to_bytes()))
            elif isinstance(effect, Break):
                self.check(effect)
                assert isinstance(effect.wait, ModelWait)
                self.end_wait(effect.wait)
            else:
                effect.link.send(proc, ("proof", effect.actor, effect.probe.to_bytes()))

    # -- the expected result ---------------------------------------------------------------------

    def check(self, effect: Break) -> None:
        """Check that at one moment all these waits stood, each stuck behind the next.

        They must still stand, unless something other than an answer ended one: an outside event, or
        another cycle that chose it as its victim.
        """
        nodes = [Node(*(int(part) for part in story)) for story in effect.cycle]
        waits = [self.waits[node] for node in nodes]
        assert waits[0] is effect.wait
        assert nodes[0] == max(nodes)
        since = max(wait.begun for wait in waits)
        until = min(wait.ended for wait in waits)
        for wait, following in zip(waits, [*waits[1:], waits[0]], strict=True):
            stuck = [c.settled for c in wait.calls if c.callee is following.actor_]
            until = min(until, max(stuck))
        assert since < until
        others = {id(waits[0]) for waits in self.broken}
        if not self.external and not any(id(wait) in others for wait in waits):
            assert until == float("inf")
        self.broken.append(waits)

    def edges(self, wait: ModelWait) -> Iterator[ModelWait]:
        for call in wait.calls:
            if call.settled == float("inf") and call.callee.wait is not None:
                yield call.callee.wait

    def stuck(self) -> list[ModelWait]:
        """Return the waits that are on a cycle."""
        found: list[ModelWait] = []
        for wait in self.standing():
            seen: set[int] = set()
            pending = list(self.edges(wait))
            while pending:
                other = pending.pop()
                if other is wait:
                    found.append(wait)
                    break
                if id(other) not in seen:
                    seen.add(id(other))
                    pending += self.edges(other)
        return found

    def standing(self) -> list[ModelWait]:
        return [wait for wait in self.waits.values() if wait.standing]

    # -- running ---------------------------------------------------------------------------------

    def loaded(self) -> list[tuple[Link, Proc]]:
        return [(link, to) for link in self.all_links for to, queue in link.queues.items() if queue]

    def act(self, *, external: bool) -> None:
        """Perform one random event of the cluster."""
        self.step += 1
        chance = self.chance
        loaded = self.loaded()
        if loaded and chance.random() < 0.5:
            self.deliver(*chance.choice(loaded))
            return
        actor = chance.choice(self.actors)
        wait = actor.wait
        if wait is not None:
            if external and chance.random() < 0.1:
                self.external += 1
                self.end_wait(wait)
            elif not wait.told:
                self.tell(wait)
            else:
                self.now += chance.random() * PAUSE
                self.tick(actor.proc)
        elif actor.aside and chance.random() < 0.3:
            self.answer(actor.aside.pop(next(iter(actor.aside))))
        elif actor.busy:
            kind = chance.random()
            if kind < 0.3:
                self.done(actor)
            elif kind < 0.4:
                self.hand_aside(actor)
            else:
                count = chance.choice((1, 1, 1, 2, 3))
                self.begin_wait(actor, chance.choices(self.actors, k=count))
        elif actor.mailbox:
            self.take(actor)
        else:
            actor.mailbox.append(None)  # the client calls

    def settle(self) -> None:
        """Make no more calls; deliver and answer everything that can be answered."""
        for _ in range(200):
            self.step += 1
            for link, receiver in self.loaded():
                self.deliver(link, receiver)
            for actor in self.actors:
                for key in list(actor.aside):
                    self.answer(actor.aside.pop(key))
                if actor.wait is not None:
                    if not actor.wait.told:
                        self.tell(actor.wait)
                elif actor.busy:
                    self.done(actor)
                elif actor.mailbox:
                    self.take(actor)
            if not self.loaded() and not any(a.busy and a.wait is None for a in self.actors):
                return
        pytest.fail("the cluster never comes to rest")


CLUSTERS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), CLUSTERS, st.booleans(), st.integers(0, 300))
def test_every_cycle_is_found_and_nothing_else(
    chance: random.Random, size: tuple[int, int, int], external: bool, steps: int
) -> None:
    cluster = Cluster(chance, *size)
    for _ in range(steps):
        cluster.act(external=external)  # `check` fails if anything but a cycle is reported

    # Every actor that is freed answers its calls, and may free or block other actors in turn.
    for _ in range(4 * len(cluster.actors)):
        cluster.settle()
        # All messages are delivered and every wait is reported; two pauses are then enough time.
        for _ in range(2):
            cluster.now += PAUSE
            for proc in cluster.procs:
                cluster.tick(proc)
            cluster.settle()
        assert not cluster.stuck()
        if not cluster.standing():
            break

    assert not cluster.standing()


def ring(order: list[int]) -> Cluster:
    """Return one proc whose actors each wait for the next; `order` holds their uids."""
    cluster = Cluster(random.Random(0), 1, 1, 1)
    (proc,) = cluster.procs
    proc.actors.clear()
    for uid in order:
        proc.actors[uid] = ModelActor(proc, uid)
    cluster.actors = list(proc.actors.values())
    for actor, callee in zip(cluster.actors, [*cluster.actors[1:], cluster.actors[0]], strict=True):
        actor.busy = True
        cluster.begin_wait(actor, [callee])
    return cluster


@pytest.mark.parametrize("order", [[5], [1, 2], [2, 1], [1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]])
def test_the_largest_wait_of_a_cycle_is_its_one_victim(order: list[int]) -> None:
    cluster = ring(order)
    cluster.settle()

    assert [waits[0].actor for waits in cluster.broken] == [max(order)]
    assert {wait.actor for wait in cluster.broken[0]} == set(order)


def test_the_story_goes_round_the_cycle_from_the_victim_on() -> None:
    cluster = ring([2, 4, 1, 3])
    cluster.settle()

    assert [wait.actor for wait in cluster.broken[0]] == [4, 1, 3, 2]


def test_a_wait_is_forgotten_once_it_has_ended() -> None:
    cluster = Cluster(random.Random(0), 1, 2, 1)
    (proc,) = cluster.procs
    waiting, callee = cluster.actors
    callee.busy = True
    cluster.begin_wait(waiting, [callee])
    assert waiting.wait is not None
    cluster.tell(waiting.wait)
    assert proc.core.deadline is not None

    cluster.end_wait(waiting.wait)
    cluster.now = proc.core.deadline
    cluster.tick(proc)

    assert proc.core.deadline is None
    assert not proc.core._books


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"[1,[],[]]",
        b"[1.5,[[1,2,3]],[]]",
        b"[true,[[1,2,3]],[]]",
        b"[1,[[1,2]],[]]",
        b"[1,[[1,2,3,4]],[]]",
        b'[1,[[1,2,"3"]],[]]',
        b'[1,[[1,2,3]],[["a","b","c"]]]',
        b'[1,[[1,2,3],[4,5,6]],[["a","b"]]]',
        b"[1,7,[]]",
    ],
)
def test_what_is_no_probe_is_refused_with_an_error_that_the_reader_expects(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        Probe.from_bytes(data)
