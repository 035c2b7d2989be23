"""Controllers: named singletons that live with the client."""

import asyncio
import os
import uuid

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    context,
    current_actor_name,
    endpoint,
    get_or_spawn_controller,
    this_host,
)


@pytest.fixture
def name():
    """Return a unique name, since controllers live as long as the client."""
    return f"controller_{uuid.uuid4().hex}"


class Counter(Actor):
    def __init__(self, start=0, *, step=1):
        self.value = start
        self.step = step

    @endpoint
    def increment(self):
        self.value += self.step
        return self.value

    @endpoint
    def get(self):
        return self.value

    @endpoint
    def put(self, value):
        self.value = value

    @endpoint
    def facts(self):
        return os.getpid(), current_actor_name(), str(context().actor_instance)


class Other(Actor):
    @endpoint
    def only_here(self):
        return "other"


class Asks(Actor):
    @endpoint
    def increment(self, name):
        counter = get_or_spawn_controller(name, Counter, 100).get()
        return counter.increment.call_one().get(), counter.facts.call_one().get()

    @endpoint
    def pid(self):
        return os.getpid()


class AsyncAsks(Actor):
    @endpoint
    async def increment(self, name):
        counter = await get_or_spawn_controller(name, Counter, 100)
        return await counter.increment.call_one()


class AsksAtInit(Actor):
    def __init__(self, name):
        self.counter = get_or_spawn_controller(name, Counter).get()

    @endpoint
    def increment(self):
        return self.counter.increment.call_one().get()


def test_the_first_call_makes_it_and_later_calls_find_it(name):
    first = get_or_spawn_controller(name, Counter, 5, step=2).get()
    assert first.increment.call_one().get() == 7
    second = get_or_spawn_controller(name, Counter, 1000).get()
    assert second.increment.call_one().get() == 9
    assert first.get.call_one().get() == 9
    second.put.call_one(1).get()
    assert first.get.call_one().get() == 1


def test_names_are_independent(name):
    first = get_or_spawn_controller(name + "a", Counter).get()
    second = get_or_spawn_controller(name + "b", Counter).get()
    first.increment.call_one().get()
    assert second.get.call_one().get() == 0
    assert first.facts.call_one().get()[1] != second.facts.call_one().get()[1]


def test_a_controller_is_a_mesh_of_one(name):
    counter = get_or_spawn_controller(name, Counter).get()
    assert counter.size() == 1
    assert counter.increment.call_one().get() == 1


def test_a_controller_can_be_awaited(name):
    async def main():
        counter = await get_or_spawn_controller(name, Counter)
        return await counter.increment.call_one()

    assert asyncio.run(main()) == 1


def test_a_controller_lives_in_the_process_of_the_client(name):
    pid, _, chain = get_or_spawn_controller(name, Counter).get().facts.call_one().get()
    assert pid == os.getpid()
    assert chain.startswith("<root>.")
    assert chain.endswith(f"<{__name__}.Counter {name}>")


def test_actors_find_the_controller_of_the_client(pair, name):
    mine = get_or_spawn_controller(name, Counter).get()
    asks = pair.spawn("asks", Asks)
    answers = asks.increment.call(name).get().values()
    assert sorted(value for value, _ in answers) == [1, 2]
    assert {facts for _, facts in answers} == {mine.facts.call_one().get()}
    assert mine.get.call_one().get() == 2


def test_actors_make_controllers_that_outlive_them(fresh, name):
    procs = fresh()
    asks = procs.spawn("asks", Asks)
    value, (pid, _, _) = asks.increment.call_one(name).get()
    assert value == 101
    assert pid == os.getpid()
    procs.stop().get()
    counter = get_or_spawn_controller(name, Counter).get()
    assert counter.increment.call_one().get() == 102


def test_many_actors_ask_at_once(pair, name):
    asks = [pair.spawn("asks", AsyncAsks) for _ in range(4)]
    futures = [a.increment.call(name) for a in asks]
    values = [v for f in futures for v in f.get().values()]
    assert sorted(values) == list(range(101, 109))


def test_a_constructor_may_ask(pair, name):
    asks = pair.spawn("asks", AsksAtInit, name)
    assert sorted(asks.increment.call().get().values()) == [1, 2]


def test_a_controller_may_ask_for_another(name):
    outer = get_or_spawn_controller(name, Chained, name + "inner").get()
    assert outer.increment.call_one().get() == 1
    inner = get_or_spawn_controller(name + "inner", Counter).get()
    assert inner.get.call_one().get() == 1


class Chained(Actor):
    def __init__(self, name):
        self.name = name

    @endpoint
    def increment(self):
        inner = get_or_spawn_controller(self.name, Counter).get()
        return inner.increment.call_one().get()


@pytest.mark.ours("the reference gives the first one, without a word")
def test_a_later_call_with_another_class_is_refused(name):
    get_or_spawn_controller(name, Counter, 3).get().get.call_one().get()
    with pytest.raises(ActorError, match=r"is a \S*\.Counter, not a \S*\.Other") as caught:
        get_or_spawn_controller(name, Other).get()
    assert type(caught.value.exception) is TypeError
    again = get_or_spawn_controller(name, Counter, 7).get()
    assert again.get.call_one().get() == 3


def test_a_controller_may_own_procs(name):
    owner = get_or_spawn_controller(name, OwnsProcs).get()
    pids = owner.pids.call_one().get()
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    assert owner.pids.call_one().get() == pids
    owner.end.call_one().get()


class OwnsProcs(Actor):
    def __init__(self):
        self.procs = this_host().spawn_procs({"k": 2})
        self.workers = self.procs.spawn("workers", Asks)

    @endpoint
    def pids(self):
        return self.workers.pid.call().get().values()

    @endpoint
    def end(self):
        self.procs.stop().get()


def test_a_controller_travels(pair, name):
    counter = get_or_spawn_controller(name, Counter).get()
    uses = pair.slice(gpus=1).spawn("uses", UsesCounter)
    assert uses.twice.call_one(counter).get() == 2


class UsesCounter(Actor):
    @endpoint
    def twice(self, counter):
        counter.increment.call_one().get()
        return counter.increment.call_one().get()


def test_a_registry(pair, name):
    """Any actor can look up, by name, a port that was registered with a controller."""
    registry = get_or_spawn_controller(name, Registry).get()
    port, receiver = Channel.open()
    registry.register.call_one("client", port).get()
    pair.spawn("speakers", Speaker).say.call(name, "client").get()
    assert sorted(receiver.recv().get() for _ in range(2)) == [0, 1]


class Registry(Actor):
    def __init__(self):
        self.ports = {}

    @endpoint
    def register(self, key, port):
        self.ports[key] = port

    @endpoint
    def lookup(self, key):
        return self.ports[key]


class Speaker(Actor):
    @endpoint
    def say(self, registry_name, key):
        registry = get_or_spawn_controller(registry_name, Registry).get()
        registry.lookup.call_one(key).get().send(context().actor_instance.rank.rank)


def test_a_failing_controller_leaves_the_others_alone(program):
    done = program(
        """
        import queue
        import monarch.actor
        from monarch.actor import Actor, endpoint, get_or_spawn_controller

        faults = queue.Queue()
        monarch.actor.unhandled_fault_hook = faults.put

        class Good(Actor):
            @endpoint
            def ping(self):
                return "pong"

        class Bad(Actor):
            @endpoint
            def ping(self):
                return "pong"
            @endpoint
            def boom(self):
                raise ValueError("controller failed")

        good = get_or_spawn_controller("good", Good).get()
        bad = get_or_spawn_controller("bad", Bad).get()
        print(good.ping.call_one().get(), bad.ping.call_one().get())
        bad.boom.broadcast()
        try:
            while True:
                bad.ping.call_one().get(timeout=60)
        except RuntimeError as error:
            print("SupervisionError" in type(error).__name__, "controller failed" in str(error))
        print(good.ping.call_one().get())
        print(get_or_spawn_controller("good", Good).get().ping.call_one().get())
        """
    )
    assert done.stdout.splitlines() == ["pong pong", "True True", "pong", "pong"]


def test_a_failed_constructor_shows_at_the_calls(program):
    done = program(
        """
        import queue
        import monarch.actor
        from monarch.actor import Actor, endpoint, get_or_spawn_controller

        faults = queue.Queue()
        monarch.actor.unhandled_fault_hook = faults.put

        class Bad(Actor):
            def __init__(self):
                raise ValueError("no controller today")
            @endpoint
            def ping(self):
                return "pong"

        try:
            get_or_spawn_controller("bad", Bad).get().ping.call_one().get(timeout=60)
        except Exception as error:
            print("no controller today" in str(error), type(error).__name__)
        try:
            get_or_spawn_controller("bad", Bad).get().ping.call_one().get(timeout=60)
        except Exception as error:
            print("no controller today" in str(error))
        """
    )
    assert done.stdout.splitlines() == ["True SupervisionError", "True"]
