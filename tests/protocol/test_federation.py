"""The federation keeps the roster's promises across hosts, whatever happens in which order."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.protocol.federation import (
    HOME,
    Admit,
    Federation,
    Keep,
    Refuse,
    Send,
    Tunnel,
)
from monarch._engine.protocol.roster import Condemn, Hand, Kill, Roster, Tell

CLIENT = 1 << 40
LOST = Verdict(FAILED, "the host is unreachable")


class Host:
    """A federation with the simplest of drivers: messages in queues, processes that obey."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.federation = Federation(Roster(CLIENT), name)
        self.running: set[int] = {CLIENT} if name == HOME else set()

    def perform(self, effects: list[Any]) -> None:
        world = self.world
        for effect in effects:
            if isinstance(effect, Tell):
                assert effect.to in self.running, "told to one that is not here"
                world.told(effect.to, effect.notice)
            elif isinstance(effect, Send):
                world.send(self.name, effect.host, effect.message)
            elif isinstance(effect, Tunnel):
                message = {"op": "open", "near": effect.near, "far": effect.far}
                world.send(self.name, effect.host, {**message, "first": effect.first})
            elif isinstance(effect, Hand):
                world.ends[effect.sender, effect.to] += 1
            elif isinstance(effect, Refuse):
                world.refused[effect.near, effect.far] += 1
            elif isinstance(effect, Keep):
                world.kept[effect.near, effect.far] += 1
            elif isinstance(effect, Admit):
                hands = self.federation.introduce_here(effect.near, effect.far, stream=False)
                world.refused[effect.near, effect.far] += not hands
                self.perform(hands)
            elif isinstance(effect, Condemn):
                self.end(effect.uid)
            else:
                assert isinstance(effect, Kill)
                for uid in effect.uids:
                    world.dying.append((self, uid))

    def end(self, uid: int) -> None:
        if uid in self.running:
            self.running.remove(uid)
            self.perform(self.federation.exited([uid]))
            self.perform(self.federation.ended([(uid, Verdict(FAILED, f"{uid} ended"))]))

    def request(self, asker: int, request: dict[str, Any]) -> None:
        if request["op"] == "autopsy":
            effects = self.federation.autopsy(asker, request["uid"], self.world.now)
        else:
            effects = self.federation.kill(request["uids"])
        self.perform(effects)

    def heard(self, host: str, message: dict[str, Any]) -> None:
        federation = self.federation
        op = message["op"]
        if op == "open":
            if message["first"]:
                federation.admit(message["near"], host)
                return
            effects = federation.opened(host, message["near"], message["far"], self.world.now)
            if not any(isinstance(effect, Hand | Keep) for effect in effects):
                self.world.refused[message["near"], message["far"]] += 1
            self.perform(effects)
        elif op == "spawn":
            federation.admit(message["parent"], host)
            self.spawn(message["parent"], message["procs"])
        elif op == "ask":
            if "from" in message:
                federation.admit(message["from"], host)
            self.request(message.get("from", 0), message["request"])
        else:
            self.perform(federation.heard(host, message, self.world.now))

    def spawn(self, parent: int, procs: list[dict[str, Any]]) -> None:
        if not self.federation.roster.alive(parent):
            return  # the driver reports them as ended; here nobody is left to hear it
        effects = self.federation.roster.spawn(parent, procs, "launcher", self.world.now)
        self.running.update(proc["uid"] for proc in procs)
        self.perform(self.federation.route(effects))
        self.perform(self.federation.started([proc["uid"] for proc in procs], self.world.now))


class World:
    def __init__(self, names: list[str], seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.wires: dict[tuple[str, str], deque[dict[str, Any]]] = {}
        self.cut: set[str] = set()
        self.dying: list[tuple[Host, int]] = []
        self.ends: Counter[tuple[int, int]] = Counter()  # links that were handed over
        self.refused: Counter[tuple[int, int]] = Counter()
        self.kept: Counter[tuple[int, int]] = Counter()
        self.heard_of: Counter[tuple[int, int]] = Counter()  # who was told of whose end
        self.parents: dict[int, int] = {}
        self.lives: dict[int, str] = {}
        self.hosts = {name: Host(self, name) for name in names}
        self.next_base = 1

    def send(self, here: str, there: str, message: dict[str, Any]) -> None:
        if here not in self.cut and there not in self.cut:
            self.wires.setdefault((here, there), deque()).append(message)

    def told(self, uid: int, notice: dict[str, Any]) -> None:
        if notice["op"] == "gone":
            for gone, *_ in notice["procs"]:
                self.heard_of[uid, gone] += 1

    def host_of(self, uid: int) -> Host:
        return self.hosts[HOME if uid == CLIENT else self.lives[uid]]

    def running(self) -> list[int]:
        return [uid for host in self.hosts.values() for uid in sorted(host.running)]

    def spawn(self, parent: int, where: list[str]) -> list[int]:
        """One spawn of a proc on each of these hosts."""
        host = self.host_of(parent)
        base = self.next_base << 20
        self.next_base += 1
        uids = [base + rank for rank in range(len(where))]
        for uid, name in zip(uids, where, strict=True):
            self.parents[uid] = parent
            self.lives[uid] = name
        host.perform(host.federation.spawned(uids, where))
        for name in sorted(set(where)):
            procs = [{"uid": uid} for uid in uids if self.lives[uid] == name]
            if name == host.name:
                host.spawn(parent, procs)
            else:
                host.perform(host.federation.spawn_there(parent, name, {}, procs))
        return uids

    def step(self) -> bool:
        """Something that is under way happens; False when nothing is."""
        ready = [wire for wire, queue in self.wires.items() if queue]
        if self.dying and (not ready or self.random.random() < 0.3):
            host, uid = self.dying.pop(self.random.randrange(len(self.dying)))
            host.end(uid)
            return True
        if not ready:
            return False
        here, there = self.random.choice(ready)
        message = self.wires[here, there].popleft()
        self.hosts[there].heard(here, message)
        return True

    def settle(self, rounds: int = 120) -> None:
        for _ in range(rounds):
            while self.step():
                pass
            self.now += 0.05
            for host in self.hosts.values():
                host.perform(host.federation.tick(self.now))

    def lose(self, name: str) -> None:
        self.cut.add(name)
        for wire in list(self.wires):
            if name in wire:
                del self.wires[wire]
        for host in self.hosts.values():
            if host.name == name:
                for other in self.hosts:
                    if other != name:
                        host.perform(host.federation.host_lost(other, LOST))
                if name != HOME:
                    host.perform(host.federation.roster.client_lost())
            else:
                host.perform(host.federation.host_lost(name, LOST))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["spawn", "spawn", "introduce", "autopsy", "kill", "end", "step", "step"]),
        st.integers(0, 1 << 30),
        st.integers(0, 1 << 30),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 4),
    operations=OPERATIONS,
    lose=st.booleans(),
)
def test_promises(seed: int, count: int, operations: Any, lose: bool) -> None:
    names = [HOME, "b", "c", "d"][:count]
    world = World(names, seed)
    asked: Counter[tuple[int, int]] = Counter()
    introduced: Counter[tuple[int, int]] = Counter()
    everybody = [CLIENT]
    for operation, first, second in operations:
        running = world.running()
        actor = running[first % len(running)]
        host = world.host_of(actor)
        other = everybody[second % len(everybody)]
        if operation == "spawn":
            where = [names[(second + n) % count] for n in range(1 + second % 3)]
            everybody += world.spawn(actor, where)
        elif operation == "introduce" and other != actor:
            introduced[actor, other] += 1
            host.perform(host.federation.introduce(actor, other))
        elif operation == "autopsy" and other not in (actor, CLIENT) and other not in running:
            if asked[actor, other] == 0:
                asked[actor, other] += 1
                host.perform(host.federation.autopsy(actor, other, world.now))
        elif operation == "kill" and other not in (actor, CLIENT):
            host.perform(host.federation.kill([other]))
        elif operation == "end" and actor != CLIENT:
            host.end(actor)
        elif operation == "step":
            world.step()
    if lose and count > 1:
        world.lose(names[-1])
    world.settle()
    alive = set(world.running())
    for uid, parent in world.parents.items():
        if parent not in alive:
            assert uid not in alive, "it outlived its parent"
        elif uid not in alive or world.lives[uid] in world.cut:
            told = world.heard_of[parent, uid] - asked[parent, uid]
            assert told == 1 or (asked[parent, uid] and told == 0), "a parent hears of each end"
        else:
            assert world.heard_of[parent, uid] == 0, "a parent was told of an end that was none"
    for (asker, uid), count_ in asked.items():
        if asker in alive:
            assert world.heard_of[asker, uid] >= count_, "a question was not answered"
    for pair, count_ in introduced.items():
        if pair[0] in alive and not world.cut:
            assert world.ends[pair] + world.refused[pair] == count_, "an end went astray"


def test_a_stranger_finds_its_way_through_home() -> None:
    """b spawned on c; d, which has never heard of either, is given the name."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    host = world.hosts["d"]
    host.perform(host.federation.introduce(on_d, on_c))
    world.settle()
    assert world.ends[on_d, on_c] == 1
    # And the news of the end comes to who asks, straight.
    world.hosts["c"].end(on_c)
    world.settle()
    assert world.heard_of[on_b, on_c] == 1
    host.perform(host.federation.autopsy(on_d, on_c, world.now))
    world.settle()
    assert world.heard_of[on_d, on_c] == 1


def test_an_unknown_proc_is_refused_in_the_end() -> None:
    world = World([HOME, "b"], 0)
    (on_b,) = world.spawn(CLIENT, ["b"])
    world.settle()
    host = world.hosts["b"]
    host.perform(host.federation.introduce(on_b, 99 << 20))
    host.perform(host.federation.autopsy(on_b, 99 << 20, world.now))
    world.settle()
    assert world.refused[on_b, 99 << 20] == 1
    assert world.heard_of[on_b, 99 << 20] == 1


def test_news_that_come_late_are_waited_for() -> None:
    """d asks before home has heard of the spawn."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    news = world.wires.pop(("b", HOME))
    host = world.hosts["d"]
    host.perform(host.federation.introduce(on_d, on_c))
    while world.step():
        pass
    assert not world.ends[on_d, on_c]
    assert not world.refused[on_d, on_c]
    world.wires["b", HOME] = news
    world.settle()
    assert world.ends[on_d, on_c] == 1


def test_who_comes_before_a_proc_waits_for_it() -> None:
    """b spawns on c, and the order to is under way while d, who has the name, asks c for it."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    order = world.wires.pop(("b", "c"))
    asker, fellow = world.hosts["d"], world.hosts["c"]
    asker.perform(asker.federation.introduce(on_d, on_c))
    world.settle(5)
    assert world.kept[on_d, on_c] == 1
    assert fellow.federation.deadline > world.now
    world.wires["b", "c"] = order
    world.settle()
    assert world.ends[on_d, on_c] == 1
    assert not world.refused[on_d, on_c]


def test_a_fellow_who_comes_before_a_proc_waits_for_it() -> None:
    """The same from c itself, which asks home, and is told that it is the place."""
    world = World([HOME, "b", "c"], 0)
    on_b, asker = world.spawn(CLIENT, ["b", "c"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    order = world.wires.pop(("b", "c"))
    host = world.hosts["c"]
    host.perform(host.federation.introduce(asker, on_c))
    world.settle(5)
    assert not world.ends[asker, on_c]
    assert not world.refused[asker, on_c]
    world.wires["b", "c"] = order
    world.settle()
    assert world.ends[asker, on_c] == 1


def test_a_proc_that_never_comes_is_not_waited_for_for_ever() -> None:
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    del world.wires["b", "c"]
    host = world.hosts["d"]
    host.perform(host.federation.introduce(on_d, on_c))
    world.settle()
    assert world.refused[on_d, on_c] == 1
    host.perform(host.federation.autopsy(on_d, on_c, world.now))
    world.settle()
    assert world.heard_of[on_d, on_c] == 1


def test_while_home_is_silent_nobody_is_refused() -> None:
    """The network is out, for longer than home's news could take: that says nothing."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    host = world.hosts["d"]
    host.perform(host.federation.introduce(on_d, on_c))
    question = world.wires.pop(("d", HOME))
    world.now += 30.0
    host.perform(host.federation.tick(world.now))
    world.settle()
    assert not world.refused[on_d, on_c]
    world.wires["d", HOME] = question
    world.settle()
    assert world.ends[on_d, on_c] == 1


def test_a_lost_host_takes_its_procs_and_its_guests() -> None:
    world = World([HOME, "b", "c"], 0)
    (on_b,) = world.spawn(CLIENT, ["b"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    world.lose("b")
    world.settle()
    assert on_c not in world.running()
    assert world.heard_of[CLIENT, on_b] == 1
    home = world.hosts[HOME]
    home.perform(home.federation.autopsy(CLIENT, on_b, world.now))
    assert world.heard_of[CLIENT, on_b] == 2
    (again,) = world.spawn(CLIENT, ["b"])
    assert world.heard_of[CLIENT, again] == 1
    assert world.refused[CLIENT, again] == 1


def test_an_unknown_message_is_an_error() -> None:
    federation = Federation(Roster(CLIENT), HOME)
    with pytest.raises(ValueError, match="unknown message"):
        federation.heard("b", {"op": "nonsense"}, 0.0)


# -- another home ----------------------------------------------------------------------------------

FAR = 99 << 20


@pytest.fixture
def orphaned() -> Federation:
    """A host with a proc (10) of the client, one (20) of a proc of home (55), and no home."""
    federation = Federation(Roster(CLIENT), "b")
    federation.admit(55, HOME)
    federation.roster.spawn(CLIENT, [{"uid": 10}], "launcher", 0.0)
    federation.roster.spawn(55, [{"uid": 20}], "launcher", 0.0)
    assert federation.autopsy(10, CLIENT, 0.0) == [
        Send(HOME, {"op": "ask", "from": 10, "request": {"op": "autopsy", "uid": CLIENT}})
    ]
    kill, away = federation.home_lost(LOST)
    assert {type(kill), type(away)} == {Kill, Tell}
    return federation


def test_without_a_home_the_client_is_away_and_its_procs_stay(orphaned: Federation) -> None:
    roster = orphaned.roster
    assert roster.alive(10)
    assert not roster.alive(55), "procs of the lost host are gone"
    (told,) = orphaned.autopsy(10, CLIENT, 0.0)
    assert isinstance(told, Tell)
    assert told.notice["op"] == "away"
    assert orphaned.ended([(10, Verdict(FAILED, "it ended"))]) == [], "nobody hears it"


def test_without_a_home_questions_wait_for_another(orphaned: Federation) -> None:
    assert orphaned.introduce(10, FAR) == []
    assert orphaned.spawned([FAR + (1 << 20)], ["c"]) == []
    assert orphaned.tick(100.0) == []
    found = orphaned.home_found()
    assert Send(HOME, {"op": "where", "uid": FAR}) in found
    assert Tell(10, {"op": "back", "uid": CLIENT}) in found
    answer = {"op": "lives", "uids": [FAR], "hosts": ["c"]}
    assert orphaned.heard(HOME, answer, 0.0) == [Tunnel("c", 10, FAR, first=False)]


def test_another_home_learns_what_the_hosts_hold(orphaned: Federation) -> None:
    home = Federation(Roster(CLIENT), HOME)
    home.resumed("b", orphaned.roster.families())
    assert home.host_of(10) == "b"
    assert home.autopsy(CLIENT, 10, 0.0) == [
        Send("b", {"op": "ask", "from": CLIENT, "request": {"op": "autopsy", "uid": 10}})
    ]
    orphaned.home_found()
    assert orphaned.autopsy(CLIENT, 20, 0.0) == [], "it is about to end"
    (told,) = orphaned.ended([(20, Verdict(FAILED, "it ended"))])
    assert isinstance(told, Send)
    assert told.message["to"] == CLIENT
    assert [end.notice["procs"][0][0] for end in home.host_lost("b", LOST)] == [10]  # type: ignore[union-attr]


def test_what_a_stream_is_for_is_known_where_it_goes() -> None:
    """Also when home has to be asked where that is, for a link and a stream at the same time."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    federation = world.hosts["d"].federation
    asking = [*federation.introduce(on_d, on_c), *federation.introduce(on_d, on_c, "data")]
    assert [type(effect) for effect in asking] == [Send]
    answer = {"op": "lives", "uids": [on_c], "hosts": ["c"]}
    assert federation.heard(HOME, answer, world.now) == [
        Tunnel("c", on_d, on_c, first=False),
        Tunnel("c", on_d, on_c, first=False, stream="data"),
    ]
    host = world.hosts["c"]
    assert host.federation.opened("d", on_d, on_c, 0.0, stream=True) == [Hand(on_c, on_d)]
    host.end(on_c)
    assert host.federation.opened("d", on_d, on_c, 0.0, stream=True) == []
    assert host.federation.introduce(on_b, on_c, "data") == [Refuse(on_b, on_c, "data")]
