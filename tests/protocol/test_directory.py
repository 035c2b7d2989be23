"""The directory keeps the membership's promises across hosts, in any order of events."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.base.verdict import FAILED, STOPPED, Verdict
from monarch._engine.protocol import membership as memberships
from monarch._engine.protocol.directory import (
    HOME,
    Admit,
    Attach,
    Directory,
    Keep,
    Refuse,
    Send,
    Spread,
    Tunnel,
)
from monarch._engine.protocol.membership import Condemn, Hand, Kill, Membership, Tell

CLIENT = 1 << 40
LOST = Verdict(FAILED, "the host is unreachable")


class Host:
    """A directory with the simplest driver: messages in queues, processes that obey."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.directory = Directory(Membership(CLIENT), name)
        self.running: set[int] = {CLIENT} if name == HOME else set()

    def perform(self, effects: list[Any]) -> None:
        world = self.world
        for effect in effects:
            if isinstance(effect, Tell):
                assert effect.to in self.running, "told to one that is not here"
                world.told(effect.to, effect.notice)
            elif isinstance(effect, Send):
                assert effect.host != self.name, "sent to itself"
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
                hands = self.directory.introduce_here(effect.near, effect.far, stream=False)
                world.refused[effect.near, effect.far] += not hands
                self.perform(hands)
            elif isinstance(effect, Attach):
                world.attached.append((self.name, effect.host))
            elif isinstance(effect, Spread):
                for name in world.hosts:
                    if name != self.name:
                        world.send(self.name, name, effect.message)
            elif isinstance(effect, Condemn):
                self.end(effect.uid)
            else:
                assert isinstance(effect, Kill)
                for uid in effect.uids:
                    world.dying.append((self, uid))

    def end(self, uid: int) -> None:
        if uid in self.running:
            self.running.remove(uid)
            self.perform(self.directory.exited([uid]))
            self.perform(self.directory.ended([(uid, Verdict(FAILED, f"{uid} ended"))]))

    def request(self, asker: int, request: dict[str, Any]) -> None:
        if request["op"] == "autopsy":
            effects = self.directory.autopsy(asker, request["uid"], self.world.now)
        else:
            effects = self.directory.kill(request["uids"])
        self.perform(effects)

    def heard(self, host: str, message: dict[str, Any]) -> None:
        directory = self.directory
        op = message["op"]
        if op == "open":
            if message["first"]:
                directory.admit(message["near"], host)
                return
            effects = directory.opened(host, message["near"], message["far"], self.world.now)
            if not any(isinstance(effect, Hand | Keep) for effect in effects):
                self.world.refused[message["near"], message["far"]] += 1
            self.perform(effects)
        elif op == "spawn":
            directory.admit(message["parent"], host)
            self.spawn(message["parent"], message["procs"])
        elif op == "ask":
            if "from" in message:
                directory.admit(message["from"], host)
            self.request(message.get("from", 0), message["request"])
        elif op == "lost":
            verdict = Verdict.from_fields(message["end"])
            self.perform(directory.host_lost(message["host"], verdict))
        else:
            self.perform(directory.heard(host, message, self.world.now))

    def spawn(self, parent: int, procs: list[dict[str, Any]]) -> None:
        if not self.directory.membership.alive(parent):
            # The driver reports the procs as ended; here the receiver of that report has exited.
            return
        effects = self.directory.spawn_here(parent, procs, "launcher", self.world.now)
        self.running.update(proc["uid"] for proc in procs)
        self.perform(effects)
        self.perform(self.directory.started([proc["uid"] for proc in procs], self.world.now))


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
        self.attached: list[tuple[str, str]] = []  # both hosts of each new session
        self.newest: dict[tuple[int, int], int] = {}  # (asker, uid) -> the proc that replaces it
        self.heard_of: Counter[tuple[int, int]] = Counter()  # (notified, exited): how often
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
        elif notice["op"] == "moved":
            self.newest[uid, notice["uid"]] = notice["to"]

    def host_of(self, uid: int) -> Host:
        return self.hosts[HOME if uid == CLIENT else self.lives[uid]]

    def running(self) -> list[int]:
        return [uid for host in self.hosts.values() for uid in sorted(host.running)]

    def spawn(self, parent: int, where: list[str], replaces: int = 0) -> list[int]:
        """Spawn one proc on each of these hosts."""
        host = self.host_of(parent)
        base = self.next_base << 20
        self.next_base += 1
        uids = [base + rank for rank in range(len(where))]
        for uid, name in zip(uids, where, strict=True):
            self.parents[uid] = parent
            self.lives[uid] = name
        for name in sorted(set(where)):
            procs = [{"uid": uid} for uid in uids if self.lives[uid] == name]
            if replaces:
                procs = [{**proc, "replaces": replaces, "former": [replaces]} for proc in procs]
            if name == host.name:
                host.spawn(parent, procs)
            else:
                host.perform(host.directory.spawn_there(parent, name, {}, procs))
        return uids

    def step(self) -> bool:
        """Let one pending event happen; return False when none is pending."""
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
                host.perform(host.directory.tick(self.now))

    def lose(self, name: str) -> None:
        self.cut.add(name)
        for wire in list(self.wires):
            if name in wire:
                del self.wires[wire]
        for host in self.hosts.values():
            if host.name == name:
                for other in self.hosts:
                    if other != name:
                        host.perform(host.directory.host_lost(other, LOST))
                if name != HOME:
                    host.perform(host.directory.membership.client_lost())
            else:
                host.perform(host.directory.host_lost(name, LOST))


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
            host.perform(host.directory.introduce(actor, other, world.now))
        elif operation == "autopsy" and other not in (actor, CLIENT) and other not in running:
            if asked[actor, other] == 0:
                asked[actor, other] += 1
                host.perform(host.directory.autopsy(actor, other, world.now))
        elif operation == "kill" and other not in (actor, CLIENT):
            host.perform(host.directory.kill([other]))
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


def test_what_ends_with_a_host_that_was_let_go_is_no_failure() -> None:
    world = World([HOME, "b", "c"], 0)
    (ours,) = world.spawn(CLIENT, ["b"])
    (owner,) = world.spawn(CLIENT, ["c"])
    (theirs,) = world.spawn(owner, ["b"])
    world.settle()
    home, other = world.hosts[HOME], world.hosts["c"]
    effects = [*home.directory.host_left("b", "b was released")]
    effects += other.directory.host_left("b", "b was released")
    told = {
        (effect.to, uid): Verdict.from_fields(fields)
        for effect in effects
        if isinstance(effect, Tell)
        for uid, *fields in effect.notice["procs"]
    }
    assert {(CLIENT, ours), (owner, theirs)} == told.keys()
    assert {(STOPPED, "b was released")} == {(end.kind, end.error) for end in told.values()}

    *_, tell = home.directory.spawn_there(CLIENT, "b", {}, [{"uid": 99 << 20}])
    ((_, *fields),) = tell.notice["procs"]
    # A proc that never began was not ended on request.
    assert Verdict.from_fields(fields).kind == FAILED


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 4), length=st.integers(1, 60))
def test_a_handle_leads_to_its_proc_from_everywhere(seed: int, count: int, length: int) -> None:
    """This holds for any spawner and any hosts, however early the handle arrives."""
    names = [HOME, "b", "c", "d"][:count]
    world = World(names, seed)
    everybody = [CLIENT]
    called: Counter[tuple[int, int]] = Counter()
    for _ in range(length):
        actor = world.random.choice(world.running())  # (the other procs are about to start)
        other = world.random.choice(everybody)
        operation = world.random.choice(["spawn", "call", "call", "step", "step", "step"])
        if operation == "spawn":
            where = world.random.choices(names, k=world.random.randint(1, 2))
            everybody += world.spawn(actor, where)
        elif operation == "call" and other != actor:
            called[actor, other] += 1
            host = world.host_of(actor)
            host.perform(host.directory.introduce(actor, other, world.now))
        elif operation == "step":
            world.step()
    world.settle()
    assert set(world.running()) == set(everybody)
    assert world.ends == called
    assert not +world.refused


@pytest.mark.parametrize("owned_by", ["the client", "a proc of another host"])
def test_a_proc_that_was_lost_with_its_host_is_replaced_there(owned_by: str) -> None:
    world = World([HOME, "b", "c", "d"], 0)
    peer, owner, stranger = world.spawn(CLIENT, ["c", "d", "c"])
    owner = CLIENT if owned_by == "the client" else owner
    (old,) = world.spawn(owner, ["b"])
    for asker in (peer, owner):
        world.host_of(asker).perform(
            world.host_of(asker).directory.introduce(asker, old, world.now)
        )
    world.settle()

    world.hosts["b"] = Host(world, "b")  # its agent exits; the worker starts another agent for home
    world.hosts[HOME].perform(world.hosts[HOME].directory.host_lost("b", LOST))
    world.settle()
    for asker in (peer, owner):  # (their links are lost)
        world.host_of(asker).perform(world.host_of(asker).directory.autopsy(asker, old, world.now))
    assert world.heard_of[peer, old] == 1
    assert world.heard_of[owner, old] >= 1
    (new,) = world.spawn(owner, ["b"], replaces=old)
    world.settle()

    assert (HOME, "b") in world.attached
    assert world.hosts["b"].running == {new}
    assert world.newest[peer, old] == new  # the peer knew of the exit, and learns the successor
    there = world.host_of(stranger)
    there.perform(
        there.directory.introduce(stranger, old, world.now)
    )  # the stranger's handle refers to the mesh before the restart
    world.settle()
    assert world.ends[stranger, new] == 1
    assert world.newest[stranger, old] == new
    for asker in (stranger, peer):  # the exit of the old proc keeps its reason
        before = world.heard_of[asker, old]
        world.host_of(asker).perform(world.host_of(asker).directory.autopsy(asker, old, world.now))
        world.settle()
        assert world.heard_of[asker, old] == before + 1


def test_a_stranger_finds_its_way_through_home() -> None:
    """A proc of b spawned on c; d, which knows of neither, receives the handle."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    host = world.hosts["d"]
    host.perform(host.directory.introduce(on_d, on_c, world.now))
    world.settle()
    assert world.ends[on_d, on_c] == 1
    # The notice of the exit goes directly to the asker.
    world.hosts["c"].end(on_c)
    world.settle()
    assert world.heard_of[on_b, on_c] == 1
    host.perform(host.directory.autopsy(on_d, on_c, world.now))
    world.settle()
    assert world.heard_of[on_d, on_c] == 1


def test_who_found_its_way_through_home_says_farewell() -> None:
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    host = world.hosts["d"]
    host.perform(host.directory.introduce(on_d, on_c, world.now))
    world.settle()
    there = world.hosts["c"].directory.membership
    assert there.alive(on_d)
    host.end(on_d)
    world.settle()
    assert not there.alive(on_d)


def test_home_knows_what_was_lost_before_a_host_came_back() -> None:
    world = World([HOME, "b", "c"], 0)
    old, asker = world.spawn(CLIENT, ["b", "c"])
    world.settle()
    world.hosts["b"] = Host(world, "b")
    world.hosts[HOME].perform(world.hosts[HOME].directory.host_lost("b", LOST))
    world.settle()
    world.spawn(CLIENT, ["b"])
    world.settle()
    assert world.attached == [(HOME, "b")]
    host = world.hosts["c"]
    told = []
    perform = host.perform
    host.perform = lambda effects: (told.extend(effects), perform(effects))[1]
    host.perform(host.directory.autopsy(asker, old, world.now))
    host.perform(host.directory.introduce(asker, old, world.now))
    world.settle()
    assert world.refused[asker, old] == 1
    assert Tell(asker, memberships.gone([[old, *LOST]])) in told


@pytest.mark.parametrize("name", [HOME, "b", "d"])
def test_a_proc_beside_its_spawner_is_found_from_everywhere(name: str) -> None:
    """A proc on c spawns on c; procs at home, on b and on d receive the handle."""
    world = World([HOME, "b", "c", "d"], 0)
    at_home, on_b, on_c, on_d = world.spawn(CLIENT, [HOME, "b", "c", "d"])
    world.settle()
    (beside,) = world.spawn(on_c, ["c"])
    (nested,) = world.spawn(beside, ["c"])
    world.settle()
    host = world.hosts[name]
    asker = {HOME: at_home, "b": on_b, "d": on_d}[name]
    host.perform(host.directory.introduce(asker, nested, world.now))
    world.settle()
    assert world.ends[asker, nested] == 1
    world.hosts["c"].end(on_c)
    world.settle()
    assert nested not in world.running()
    host.perform(host.directory.autopsy(asker, nested, world.now))
    world.settle()
    assert world.heard_of[asker, nested] == 1


@pytest.mark.parametrize("name", [HOME, "b"])
def test_an_unknown_proc_is_refused_in_the_end(name: str) -> None:
    world = World([HOME, "b"], 0)
    (asker,) = world.spawn(CLIENT, [name])
    world.settle()
    host = world.hosts[name]
    host.perform(host.directory.introduce(asker, 99 << 20, world.now))
    host.perform(host.directory.autopsy(asker, 99 << 20, world.now))
    world.settle()
    assert world.refused[asker, 99 << 20] == 1
    assert world.heard_of[asker, 99 << 20] == 1


def test_home_waits_for_news_as_others_do() -> None:
    """The client has the handle before the spawner's agent has reported where the proc is."""
    world = World([HOME, "b", "c"], 0)
    (on_b,) = world.spawn(CLIENT, ["b"])
    world.settle()
    (beside,) = world.spawn(on_b, ["b"])
    (on_c,) = world.spawn(on_b, ["c"])
    news = world.wires.pop(("b", HOME))
    home = world.hosts[HOME]
    for uid in (beside, on_c):
        home.perform(home.directory.introduce(CLIENT, uid, world.now))
    world.settle(5)
    assert home.directory.deadline < world.now + 1
    world.wires["b", HOME] = news
    world.settle()
    for uid in (beside, on_c):
        assert world.ends[CLIENT, uid] == 1
        assert not world.refused[CLIENT, uid]


def test_home_waits_for_its_own_procs_to_spawn() -> None:
    """A proc at home has the handle before home has read the other proc's spawn request."""
    world = World([HOME, "b"], 0)
    spawner, asker = world.spawn(CLIENT, [HOME, HOME])
    world.settle()
    home = world.hosts[HOME]
    base = world.next_base << 20
    here, there = base, (world.next_base + 1) << 20
    for uid in (here, there):
        home.perform(home.directory.introduce(asker, uid, world.now))
    home.perform(home.directory.autopsy(asker, here, world.now))
    assert world.spawn(spawner, [HOME]) == [here]
    assert world.spawn(spawner, ["b"]) == [there]
    world.settle(5)
    assert world.ends[asker, here] == 1
    assert world.ends[asker, there] == 1
    home.end(here)
    assert world.heard_of[asker, here] == 1


def test_news_that_come_late_are_waited_for() -> None:
    """d asks before the report of the spawn has reached home."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    news = world.wires.pop(("b", HOME))
    host = world.hosts["d"]
    host.perform(host.directory.introduce(on_d, on_c, world.now))
    while world.step():
        pass
    assert not world.ends[on_d, on_c]
    assert not world.refused[on_d, on_c]
    world.wires["b", HOME] = news
    world.settle()
    assert world.ends[on_d, on_c] == 1


def test_who_comes_before_a_proc_waits_for_it() -> None:
    """b spawns on c; the order to c is in transit while d, which has the handle, asks c."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    order = world.wires.pop(("b", "c"))
    asker, fellow = world.hosts["d"], world.hosts["c"]
    asker.perform(asker.directory.introduce(on_d, on_c, world.now))
    world.settle(5)
    assert world.kept[on_d, on_c] == 1
    assert fellow.directory.deadline > world.now
    world.wires["b", "c"] = order
    world.settle()
    assert world.ends[on_d, on_c] == 1
    assert not world.refused[on_d, on_c]


def test_a_fellow_who_comes_before_a_proc_waits_for_it() -> None:
    """The asker is on c itself; c asks home, and home answers that the proc is on c."""
    world = World([HOME, "b", "c"], 0)
    on_b, asker = world.spawn(CLIENT, ["b", "c"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    order = world.wires.pop(("b", "c"))
    host = world.hosts["c"]
    host.perform(host.directory.introduce(asker, on_c, world.now))
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
    host.perform(host.directory.introduce(on_d, on_c, world.now))
    world.settle()
    assert world.refused[on_d, on_c] == 1
    host.perform(host.directory.autopsy(on_d, on_c, world.now))
    world.settle()
    assert world.heard_of[on_d, on_c] == 1


def test_while_home_is_silent_nobody_is_refused() -> None:
    """The network is out for longer than home's report could take; that proves no loss."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    host = world.hosts["d"]
    host.perform(host.directory.introduce(on_d, on_c, world.now))
    question = world.wires.pop(("d", HOME))
    world.now += 30.0
    host.perform(host.directory.tick(world.now))
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
    home.perform(home.directory.autopsy(CLIENT, on_b, world.now))
    assert world.heard_of[CLIENT, on_b] == 2
    (again,) = world.spawn(CLIENT, ["b"])
    assert world.attached == [(HOME, "b")]
    assert world.heard_of[CLIENT, again] == 0
    # There is no connection to b's worker either.
    home.perform(home.directory.host_lost("b", LOST))
    assert world.heard_of[CLIENT, again] == 1


def test_where_procs_lived_is_remembered_of_the_last_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memberships, "REMEMBERED", 10)
    world = World([HOME, "b", "c"], 0)
    (on_b,) = world.spawn(CLIENT, ["b"])
    world.settle(1)
    (first,) = world.spawn(on_b, ["b"])
    for _ in range(20):
        uids = world.spawn(on_b, ["b", "c"])
        world.settle(1)
        for uid in uids:
            world.host_of(uid).end(uid)
        world.settle(1)
    home, b = world.hosts[HOME].directory, world.hosts["b"].directory
    for directory in (home, b):
        assert sum(map(len, directory._lives.values())) <= 12
    assert home.host_of(on_b) == home.host_of(first) == "b"
    assert home.host_of(uids[0]) == "b"
    assert home.host_of(uids[1]) == b.host_of(uids[1]) == "c"
    world.lose("b")
    assert home.host_of(first) == "b"
    world.spawn(CLIENT, ["c"] * 20)
    world.settle()
    world.lose("c")
    assert sum(map(len, home._lives.values())) == 10


def test_procs_are_killed_wherever_they_are() -> None:
    world = World([HOME, "b", "c", "d"], 0)
    uids = world.spawn(CLIENT, [HOME, "b", "b", "c", "d"])
    world.settle()
    home = world.hosts[HOME]
    world.lose("d")
    effects = home.directory.kill([*uids, 99 << 20])
    assert effects[0] == Kill([uids[0]])
    asks = {effect.host: effect.message for effect in effects[1:] if isinstance(effect, Send)}
    kill = {"op": "kill", "uids": uids[1:3]}
    assert asks == {
        "b": {"op": "ask", "request": kill},
        "c": {"op": "ask", "request": {**kill, "uids": [uids[3]]}},
    }, "nothing is asked of a host that is lost"
    home.perform(effects)
    world.settle()
    assert not set(uids[:4]) & set(world.running())


def test_a_host_is_lost_once() -> None:
    """Each host may detect the loss itself, and is also notified by home."""
    world = World([HOME, "b", "c"], 0)
    (on_b,) = world.spawn(CLIENT, ["b"])
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    world.lose("c")
    world.settle()
    b = world.hosts["b"].directory
    assert world.heard_of[on_b, on_c] == 1
    assert b.host_lost("c", LOST) == []
    assert b.deadline == float("inf")


def test_who_came_too_early_is_refused_when_that_is_due() -> None:
    directory = Directory(Membership(CLIENT), "b")
    assert directory.opened("c", 10, 20, 1.0) == [Keep(10, 20)]
    assert directory.opened("c", 11, 20, 2.0) == [Keep(11, 20)]
    for near, due in ((10, 6.0), (11, 7.0)):
        assert directory.deadline == due
        assert directory.tick(due - 0.1) == []
        assert directory.tick(due) == [Refuse(near, 20)]
    assert directory.deadline == float("inf")
    assert directory.started([20], 8.0) == []


def test_an_unknown_message_is_an_error() -> None:
    directory = Directory(Membership(CLIENT), HOME)
    with pytest.raises(ValueError, match="unknown message"):
        directory.heard("b", {"op": "nonsense"}, 0.0)


# -- failover to another home ----------------------------------------------------------------------

FAR = 99 << 20


@pytest.fixture
def orphaned() -> Directory:
    """Make a host without home, with a proc of the client (10) and one (20) of home's proc 55."""
    directory = Directory(Membership(CLIENT), "b")
    directory.admit(55, HOME)
    directory.membership.spawn(CLIENT, [{"uid": 10}], "launcher", 0.0)
    directory.membership.spawn(55, [{"uid": 20}], "launcher", 0.0)
    assert directory.autopsy(10, CLIENT, 0.0) == [
        Send(HOME, {"op": "ask", "from": 10, "request": {"op": "autopsy", "uid": CLIENT}})
    ]
    kill, away = directory.home_lost(LOST)
    assert {type(kill), type(away)} == {Kill, Tell}
    return directory


def test_without_a_home_the_client_is_away_and_its_procs_stay(orphaned: Directory) -> None:
    membership = orphaned.membership
    assert membership.alive(10)
    assert not membership.alive(55), "procs of the lost host are gone"
    (told,) = orphaned.autopsy(10, CLIENT, 0.0)
    assert isinstance(told, Tell)
    assert told.notice["op"] == "away"
    assert orphaned.ended([(10, Verdict(FAILED, "it ended"))]) == [], "nobody hears it"


def test_without_a_home_questions_wait_for_another(orphaned: Directory) -> None:
    assert orphaned.introduce(10, FAR, 0.0) == []
    assert orphaned.spawn_here(10, [{"uid": FAR + (1 << 20)}], "launcher", 0.0) == []
    assert orphaned.tick(100.0) == []
    found = orphaned.home_found()
    assert Send(HOME, {"op": "where", "uid": FAR}) in found
    assert Tell(10, {"op": "back", "uid": CLIENT}) in found
    answer = {"op": "lives", "uids": [FAR], "hosts": ["c"]}
    assert orphaned.heard(HOME, answer, 0.0) == [Tunnel("c", 10, FAR, first=False)]


def test_who_knows_that_the_client_is_away_is_not_informed_of_its_end() -> None:
    directory = Directory(Membership(CLIENT), "b")
    directory.membership.spawn(CLIENT, [{"uid": 10}, {"uid": 11}], "launcher", 0.0)
    for asker in (10, 11):
        directory.autopsy(asker, CLIENT, 0.0)
    away = {"op": "away", "uid": CLIENT, "end": [*LOST]}
    message = {"op": "notice", "to": 10, "notice": away}
    assert directory.heard(HOME, message, 0.0) == [Tell(10, away)]
    told = [e for e in directory.host_lost(HOME, LOST) if isinstance(e, Tell)]
    assert told == [Tell(11, memberships.gone([[CLIENT, *LOST]]))]


def test_another_home_learns_what_the_hosts_hold(orphaned: Directory) -> None:
    home = Directory(Membership(CLIENT), HOME)
    home.resumed("b", orphaned.membership.families())
    assert home.host_of(10) == "b"
    assert home.autopsy(CLIENT, 10, 0.0) == [
        Send("b", {"op": "ask", "from": CLIENT, "request": {"op": "autopsy", "uid": 10}})
    ]
    orphaned.home_found()
    assert orphaned.autopsy(CLIENT, 20, 0.0) == [], "it is about to end"
    told, ended = orphaned.ended([(20, Verdict(FAILED, "it ended"))])
    assert isinstance(told, Send)
    assert ended == Send(HOME, {"op": "ended", "uids": [20]})
    assert told.message["to"] == CLIENT
    *ends, spread = home.host_lost("b", LOST)
    assert [end.notice["procs"][0][0] for end in ends] == [10]  # type: ignore[union-attr]
    assert isinstance(spread, Spread)


def test_a_request_about_procs_goes_to_the_hosts_where_they_live() -> None:
    world = World([HOME, "b", "c"], 0)
    home, b = world.hosts[HOME].directory, world.hosts["b"].directory
    hosts = ["b", HOME, "b", "c"]
    mine, sent = home.split(CLIENT, {"uids": [1, 2, 3, 4], "ranks": [*range(4)], "hosts": hosts})
    assert mine == {"uids": [2], "ranks": [1], "hosts": [HOME]}
    asks = {effect.host: effect.message for effect in sent if isinstance(effect, Send)}
    assert {host: message["from"] for host, message in asks.items()} == {"b": CLIENT, "c": CLIENT}
    theirs = {"uids": [1, 3], "ranks": [0, 2], "hosts": ["b", "b"]}
    assert asks["b"]["request"] == theirs
    assert b.split(CLIENT, theirs) == (theirs, [])
    assert home.ask_there(CLIENT, "b", {}) == [
        Send("b", {"op": "ask", "from": CLIENT, "request": {}})
    ]
    world.lose("b")
    assert home.ask_there(CLIENT, "b", {}) == []


def test_what_a_stream_is_for_is_known_where_it_goes() -> None:
    """The purpose is known even if home is asked for the place of a link and a stream at once."""
    world = World([HOME, "b", "c", "d"], 0)
    on_b, on_d = world.spawn(CLIENT, ["b", "d"])
    world.settle()
    (on_c,) = world.spawn(on_b, ["c"])
    world.settle()
    directory = world.hosts["d"].directory
    asking = [
        *directory.introduce(on_d, on_c, 0.0),
        *directory.introduce(on_d, on_c, 0.0, "data"),
    ]
    assert [type(effect) for effect in asking] == [Send]
    answer = {"op": "lives", "uids": [on_c], "hosts": ["c"]}
    assert directory.heard(HOME, answer, world.now) == [
        Tunnel("c", on_d, on_c, first=False),
        Tunnel("c", on_d, on_c, first=False, stream="data"),
    ]
    host = world.hosts["c"]
    assert host.directory.opened("d", on_d, on_c, 0.0, stream=True) == [Hand(on_c, on_d)]
    host.end(on_c)
    assert host.directory.opened("d", on_d, on_c, 0.0, stream=True) == []
    assert host.directory.introduce(on_b, on_c, 0.0, "data") == [Refuse(on_b, on_c, "data")]
