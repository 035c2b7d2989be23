"""The same programs on the real driver and on the simulated one, with the same assertions."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

import monarch.actor
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    SupervisionError,
    context,
    current_rank,
    current_size,
    endpoint,
    this_host,
)
from monarch.testing import simulate


@pytest.fixture(params=["real", "simulated"])
def run(request, monkeypatch):
    """Return a function that runs a program and returns its result."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    if request.param == "real":
        return lambda main: main()
    return lambda main: simulate(main).value


class Counter(Actor):
    def __init__(self, start=0, port=None):
        self.value = start
        self.port = port

    @endpoint
    def add(self, amount):
        self.value += amount
        return self.value

    @endpoint
    def rank(self):
        return dict(current_rank()), current_size()

    @endpoint
    def fail(self, text):
        raise ValueError(text)

    @endpoint
    def abort(self):
        context().actor_instance.abort("as told")

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def wait(self, seconds, rank=None):
        if rank in (None, current_rank().rank):
            time.sleep(seconds)

    @endpoint
    def hold(self, ready):
        go, gone = Channel.open()
        ready.send(go)
        gone.recv().get()

    @endpoint(explicit_response_port=True)
    def twice(self, port, value):
        port.send(2 * value)

    def __cleanup__(self, error):
        if self.port is not None:
            self.port.send(("cleaned", self.value))


class AsyncCounter(Actor):
    def __init__(self):
        self.value = 0

    @endpoint
    async def add(self, amount):
        await asyncio.sleep(0)
        self.value += amount
        return self.value

    @endpoint
    async def ask(self, other, amount):
        return await other.add.call_one(amount)


class Owner(Actor):
    def __init__(self, handles=True):
        self.handles = handles
        self.failures = []
        self.procs = this_host().spawn_procs({"gpus": 2})
        self.counters = self.procs.spawn("counters", Counter)

    @endpoint
    def pids(self):
        return list(self.counters.pid.call().get().values())

    @endpoint
    def wait(self):
        try:
            self.counters.wait.call(60, 1).get()
        except SupervisionError as error:
            return str(error)
        return "value"

    @endpoint
    def abort(self, rank):
        self.counters.slice(gpus=rank).abort.broadcast()

    @endpoint
    def told(self):
        return self.failures

    def __supervise__(self, failure):
        self.failures.append((failure.crashed_ranks, failure.report()))
        return self.handles


class Holder(Actor):
    """The owner of two meshes, which does not handle the failure of the first."""

    def __init__(self, port):
        procs = this_host().spawn_procs()
        self.first = procs.spawn("first", Counter)
        self.second = procs.spawn("second", Counter, 7, port)

    @endpoint
    def lose(self):
        self.first.abort.broadcast()


class AsyncHolder(Holder):
    @endpoint
    async def lose(self):
        self.first.abort.broadcast()


def spawn(cls=Counter, *args, n=3):
    procs = this_host().spawn_procs({"gpus": n})
    return procs, procs.spawn("counters", cls, *args)


def until(condition):
    """Poll until the condition holds: the report of a failure takes some time."""
    for _ in range(1200):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it never came")


def test_call_and_order(run):
    def main():
        procs, counters = spawn()
        counters.add.broadcast(1)
        futures = [counters.add.call(1) for _ in range(5)]
        last = [list(future.get().values()) for future in futures]
        procs.stop().get()
        return last

    assert run(main) == [[n] * 3 for n in range(2, 7)]


def test_slices_and_ranks(run):
    def main():
        procs, counters = spawn()
        counters.slice(gpus=1).add.call_one(5).get()
        values = list(counters.add.call(0).get().values())
        ranks = list(counters.slice(gpus=slice(1, 3)).rank.call().get().values())
        procs.stop().get()
        return values, ranks

    values, ranks = run(main)
    assert values == [0, 5, 0]
    assert ranks == [({"gpus": 0}, {"gpus": 2}), ({"gpus": 1}, {"gpus": 2})]


def test_stream_and_explicit_ports(run):
    def main():
        procs, counters = spawn()
        streamed = sorted(future.get() for future in counters.add.stream(4))
        doubled = list(counters.twice.call(21).get().values())
        procs.stop().get()
        return streamed, doubled

    assert run(main) == ([4, 4, 4], [42, 42, 42])


def test_exceptions_leave_the_actor_alive(run):
    def main():
        procs, counters = spawn()
        with pytest.raises(ActorError) as caught:
            counters.fail.call("no").get()
        assert caught.value.exception.args == ("no",)
        values = list(counters.add.call(1).get().values())
        procs.stop().get()
        return values

    assert run(main) == [1, 1, 1]


def test_async_actors_call_others(run):
    def main():
        procs, counters = spawn()
        asyncs = procs.spawn("asyncs", AsyncCounter)
        asked = sorted(asyncs.ask.call(counters.slice(gpus=0), 1).get().values())
        own = list(asyncs.add.call(2).get().values())
        procs.stop().get()
        return asked, own

    assert run(main) == ([1, 2, 3], [2, 2, 2])


def test_the_death_of_a_process_reaches_caller_and_owner(run):
    def main():
        host = this_host().spawn_procs()
        owner = host.spawn("owner", Owner)
        pids = owner.pids.call_one().get()
        waiting = owner.wait.call_one()
        os.kill(pids[1], signal.SIGKILL)
        report = waiting.get(timeout=60)
        told = until(lambda: owner.told.call_one().get())
        host.stop().get()
        return report, told

    report, told = run(main)
    assert "SIGKILL" in report
    assert [ranks for ranks, _ in told] == [[1]]
    assert "SIGKILL" in told[0][1]


def test_the_death_of_an_actor_reaches_its_owner(run):
    def main():
        host = this_host().spawn_procs()
        owner = host.spawn("owner", Owner)
        owner.abort.call_one(0).get()
        told = until(lambda: owner.told.call_one().get())
        host.stop().get()
        return told

    told = run(main)
    assert [ranks for ranks, _ in told] == [[0]]
    assert "as told" in told[0][1]


class Stillborn(Actor):
    """An actor that aborts in its constructor, which goes on to its end."""

    def __init__(self, port):
        self.port = port
        context().actor_instance.abort("no use")

    @endpoint
    def call(self):
        return "answered"

    def __cleanup__(self, error):
        self.port.send(str(error))


class AsyncStillborn(Actor):
    def __init__(self, port):
        Stillborn.__init__(self, port)

    @endpoint
    async def call(self):
        return "answered"

    async def __cleanup__(self, error):
        self.port.send(str(error))


@pytest.mark.failures
@pytest.mark.parametrize("cls", [Stillborn, AsyncStillborn])
def test_an_actor_that_aborts_in_its_constructor_ends_as_any_other(run, cls, monkeypatch):
    def main():
        notices, told = Channel.open()
        monkeypatch.setattr(
            monarch.actor, "unhandled_fault_hook", lambda failure: notices.send(failure.report())
        )
        port, cleaned = Channel.open()
        procs = this_host().spawn_procs()
        with pytest.raises(SupervisionError, match="no use"):
            procs.spawn("born", cls, port).call.call_one().get()
        said = cleaned.recv().get(timeout=60), told.recv().get(timeout=60)
        procs.stop().get()
        return said

    error, report = run(main)
    assert "no use" in error
    assert "no use" in report


@pytest.mark.failures
def test_an_owner_that_does_not_handle_it_goes_too(run):
    def main():
        host = this_host().spawn_procs()
        owner = host.spawn("owner", Owner, False)
        pids = owner.pids.call_one().get()
        os.kill(pids[0], signal.SIGKILL)

        def gone():
            try:
                owner.told.call_one().get()
            except SupervisionError as error:
                return str(error)

        report = until(gone)
        host.stop().get()
        return report

    assert "SIGKILL" in run(main)


class Thinker(Actor):
    """An owner that handles each failure slowly, and reports the start and the end."""

    def __init__(self, port):
        self.port = port
        self.procs = this_host().spawn_procs({"gpus": 2})
        self.counters = self.procs.spawn("counters", Counter)

    @endpoint
    async def lose_all(self):
        self.counters.abort.broadcast()

    async def __supervise__(self, failure):
        (rank,) = failure.crashed_ranks
        self.port.send(("begins", rank))
        await asyncio.sleep(0.2)
        self.port.send(("ends", rank))
        return True


@pytest.mark.failures
@pytest.mark.parametrize("cls", [Holder, AsyncHolder])
def test_an_owner_that_fails_stops_its_other_meshes(run, cls):
    def main():
        port, cleaned = Channel.open()
        procs = this_host().spawn_procs()
        procs.spawn("holder", cls, port).lose.broadcast()
        said = cleaned.recv().get(timeout=60)
        procs.stop().get()
        return said

    assert run(main) == ("cleaned", 7)


def test_one_failure_is_handled_at_a_time(run):
    def main():
        port, news = Channel.open()
        host = this_host().spawn_procs()
        host.spawn("thinker", Thinker, port).lose_all.call_one().get()
        told = [news.recv().get(timeout=60) for _ in range(4)]
        host.stop().get()
        return told

    told = run(main)
    assert [what for what, _ in told] == ["begins", "ends"] * 2
    assert [rank for _, rank in told] in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_a_failure_that_is_being_handled_when_the_stop_comes(run, monkeypatch):
    faults = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", faults.append)

    def main():
        port, news = Channel.open()
        host = this_host().spawn_procs()
        thinker = host.spawn("thinker", Thinker, port)
        thinker.lose_all.call_one().get()
        told = [news.recv().get(timeout=60)]
        thinker.stop().get()
        told += [news.recv().get(timeout=60) for _ in range(3)]
        host.stop().get()
        return told

    assert [what for what, _ in run(main)] == ["begins", "ends"] * 2
    assert not faults


def test_a_stop_handles_what_came_before_cleans_up_and_refuses_what_comes_after(run):
    def main():
        port, receiver = Channel.open()
        procs = this_host().spawn_procs({"gpus": 1})
        counters = procs.spawn("counters", Counter, 0, port)
        before = [counters.add.call(1) for _ in range(3)]
        counters.stop().get()
        after = counters.add.call(1)
        with pytest.raises(SupervisionError):
            after.get()
        values = [next(iter(future.get().values())) for future in before]
        cleaned = receiver.recv().get(timeout=60)
        procs.stop().get()
        return values, cleaned

    assert run(main) == ([1, 2, 3], ("cleaned", 3))


def test_channels_keep_order(run):
    def main():
        port, receiver = Channel.open()
        for number in range(10):
            port.send(number)
        return [receiver.recv().get(timeout=60) for _ in range(10)]

    assert run(main) == list(range(10))


def test_a_time_out_loses_nothing(run):
    def main():
        procs, counters = spawn(n=1)
        ready, receiver = Channel.open()
        waiting = counters.hold.call(ready)
        go = receiver.recv().get()
        with pytest.raises(TimeoutError):
            waiting.get(timeout=0.05)
        go.send(None)
        waiting.get()
        procs.stop().get()
        return "waited"

    assert run(main) == "waited"
