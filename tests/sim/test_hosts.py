"""Several simulated hosts: the agents' cores, the channel and the failure detector at work."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

import monarch.actor
from monarch._engine.mesh.meshes.attachment import Attachment
from monarch.actor import (
    Actor,
    ActorError,
    HostMesh,
    SupervisionError,
    Supervisor,
    current_rank,
    endpoint,
    this_host,
)
from monarch.testing import (
    CrashAgent,
    CrashHost,
    Delay,
    Drop,
    Duplicate,
    FaultPlan,
    Partition,
    Reorder,
    UnhandledFaultError,
    simulate,
)


class Worker(Actor):
    def __init__(self):
        self.calls = []

    @endpoint
    def where(self):
        return socket.gethostname(), dict(current_rank())

    @endpoint
    def ask(self, other):
        return other.where.call_one().get()[0]

    @endpoint
    def spawn_here(self):
        beside = this_host().spawn_procs({"k": 1}).spawn("beside", Worker)
        return next(iter(beside.where.call().get().values()))[0]

    @endpoint
    def settle(self, procs):
        asyncio.run(procs.logging_option(level=10))
        return True

    @endpoint
    def nap(self, seconds):
        time.sleep(seconds)

    @endpoint
    def big(self, size):
        return bytes(size)

    @endpoint
    def count(self, number):
        self.calls.append(number)
        return list(self.calls)


class Owner(Actor):
    """An actor that spawns on all hosts, and keeps the failures that are reported to it."""

    def __init__(self, hosts):
        self.failures = []
        self.workers = hosts.spawn_procs({"gpus": 2}).spawn("w", Worker)

    @endpoint
    def stream(self, method, *args):
        outcomes = []
        for future in getattr(self.workers, method).stream(*args):
            try:
                future.get()
                outcomes.append(time.monotonic())
            except SupervisionError as error:
                outcomes.append(str(error))
        return outcomes

    @endpoint
    def count(self, times, pause):
        for number in range(times):
            answer = self.workers.count.call(number).get()
            time.sleep(pause)
        return list(answer.values())

    @endpoint
    def told(self):
        return self.failures

    def __supervise__(self, failure):
        self.failures += failure.crashed_ranks
        return True


def owned(method, *args, rest=0.0):
    def main(hosts):
        owner = this_host().spawn_procs().spawn("owner", Owner, hosts)
        outcome = getattr(owner, method).call_one(*args).get()
        time.sleep(rest)
        return outcome, owner.told.call_one().get()

    return main


def test_a_mesh_over_hosts():
    def main(hosts):
        procs = hosts.spawn_procs({"gpus": 2})
        workers = procs.spawn("w", Worker)
        places = list(workers.where.call().get().values())
        asked = workers.slice(hosts=1, gpus=0).ask.call_one(workers.slice(hosts=2, gpus=1)).get()
        beside = list(workers.spawn_here.call().get().values())
        some = hosts.slice(hosts=slice(1, 3)).spawn_procs().spawn("some", Worker)
        sliced = [host for host, _ in some.where.call().get().values()]
        size = len(workers.slice(hosts=2, gpus=0).big.call_one(3_000_000).get())
        procs.stop().get()
        return places, asked, beside, sliced, size

    places, asked, beside, sliced, size = simulate(main, hosts=3).value
    names = [f"host{host}" for host in range(3) for _ in range(2)]
    assert [host for host, _ in places] == names
    assert [(rank["hosts"], rank["gpus"]) for _, rank in places][:3] == [(0, 0), (0, 1), (1, 0)]
    assert asked == "host2"
    assert beside == names
    assert sliced == ["host1", "host2"]
    assert size == 3_000_000


def test_the_log_settings_of_a_mesh_over_hosts():
    async def main(hosts):
        procs = hosts.spawn_procs({"gpus": 2})
        await procs.logging_option(level=10)
        await procs.slice(hosts=2, gpus=1).logging_option(level=10)
        local = hosts.slice(hosts=1).spawn_procs()
        workers = local.spawn("w", Worker)
        assert await workers.settle.call_one(procs)
        return "done"

    assert simulate(main, hosts=3).value == "done"


class Spawner(Actor):
    def __init__(self, procs):
        self.procs = procs

    @endpoint
    def spawn(self):
        return self.procs.spawn("theirs", Worker)


@pytest.mark.parametrize("first", ["where", "initialized"])
def test_a_mesh_is_called_by_one_who_is_nearer_to_it_than_its_owner(first):
    def main(hosts):
        procs = hosts.slice(hosts=2).spawn_procs()
        procs.spawn("known", Worker).where.call().get()
        spawner = hosts.slice(hosts=1).spawn_procs().spawn("spawner", Spawner, procs)
        theirs = spawner.spawn.call_one().get()
        if first == "initialized":
            theirs.initialized.get()
        return theirs.where.call_one().get()[0]

    delay = Delay(0.0, 1, 2, seconds=60, by=0.4)  # a dial takes twice that, and may take 1 s
    assert simulate(main, hosts=3, faults=[delay]).value == "host2"


def test_a_mesh_whose_owner_was_cut_off_before_it_was_spawned(monkeypatch):
    def main(hosts):
        procs = hosts.slice(hosts=2).spawn_procs()
        procs.spawn("known", Worker).where.call().get()
        spawner = hosts.slice(hosts=1).spawn_procs().spawn("spawner", Spawner, procs)
        theirs = spawner.spawn.call_one().get()
        with pytest.raises(SupervisionError):
            theirs.where.call_one().get()

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    simulate(main, hosts=3, faults=[Partition(0.0, 1, 2, seconds=1e6)])


def test_the_procs_of_a_lost_host_are_reported_within_the_detectors_bound():
    done = simulate(owned("stream", "nap", 20, rest=1), hosts=3, faults=[CrashHost(5.0, 2)])

    outcomes, told = done.value
    lost = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(lost) == 2
    assert all("host2 is unreachable" in outcome for outcome in lost)
    assert sorted(told) == [4, 5]
    assert [outcome for outcome in outcomes if not isinstance(outcome, str)] == pytest.approx(
        [20] * 4, abs=0.1
    )


def test_detection_takes_less_than_three_seconds():
    def main(hosts):
        workers = hosts.spawn_procs().spawn("w", Worker)
        workers.where.call().get()
        time.sleep(4)
        with pytest.raises(SupervisionError, match="host1 is unreachable"):
            workers.slice(hosts=1).nap.call_one(100).get()
        return time.monotonic() - 5

    monkey = pytest.MonkeyPatch()
    monkey.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    with monkey.context():
        assert 0.5 < simulate(main, hosts=2, faults=[CrashHost(5.0, 1)]).value < 3
    monkey.undo()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "faults",
    [
        [Partition(1.0, 0, 1, seconds=0.9), Partition(3.0, 2, 0, seconds=0.9, one_way=True)],
        [Drop(0.0, seconds=9, probability=0.05), Duplicate(0.0, seconds=9, probability=0.3)],
        [Reorder(0.0, seconds=9, by=0.1), Delay(2.0, 0, 1, seconds=2, by=0.5)],
    ],
)
def test_a_bad_network_loses_and_doubles_nothing(faults, seed):
    done = simulate(owned("count", 40, 0.1), hosts=3, faults=faults, seed=seed)
    counts, told = done.value
    assert counts == [list(range(40))] * 6
    assert told == []


@pytest.mark.parametrize("one_way", [False, True])
def test_a_partition_that_lasts_is_the_end_of_the_other_side(one_way):
    """The procs on the other side end, too: they have lost their owner."""
    faults = [Partition(2.0, 0, 1, seconds=100, one_way=one_way)]
    done = simulate(owned("stream", "nap", 10, rest=20), hosts=3, faults=faults, trace=True, seed=2)
    outcomes, told = done.value
    assert sorted(told) == [2, 3]
    assert len([text for text in outcomes if isinstance(text, str)]) == 2
    ends = {record[2]: record[0] for record in done.trace if record[1] == "ended"}
    assert ends["anon-2"] < 6
    assert ends["anon-3"] < 6
    assert ends["anon-4"] > 20


def test_an_unhandled_loss_of_a_host_ends_the_program(capsys):
    def main(hosts):
        hosts.spawn_procs().spawn("w", Worker).where.call().get()
        time.sleep(60)

    with pytest.raises(UnhandledFaultError):
        simulate(main, hosts=2, faults=[CrashHost(1.0, 1)])
    assert "host1 is unreachable" in capsys.readouterr().err


class Matchmaker(Actor):
    @endpoint
    def tell(self, hosts, caller):
        """Spawn a mesh on these hosts, and let `caller` call it."""
        fresh = hosts.spawn_procs({"gpus": 1}).spawn("fresh", Worker)
        return caller.ask.call_one(fresh).get()


def test_who_hears_of_a_proc_before_its_host_does_reaches_it():
    """The link from the spawner to the host of the mesh is slow; that of the caller is fast."""

    def main(hosts):
        procs = hosts.spawn_procs({"gpus": 1})
        matchmaker = procs.slice(hosts=1).spawn("matchmaker", Matchmaker)
        caller = procs.slice(hosts=3).spawn("caller", Worker)
        return matchmaker.tell.call_one(hosts.slice(hosts=2), caller).get()

    slow = Delay(at=0.0, a=1, b=2, seconds=60, by=0.2)
    assert simulate(main, hosts=4, faults=[slow]).value == "host2"


class Survivor(Actor):
    @endpoint
    def where(self):
        return socket.gethostname()

    @endpoint
    def ask(self, others):
        return list(others.where.call().get().values())


@pytest.mark.parametrize("seed", range(5))
def test_a_host_whose_agent_ended_is_attached_anew_and_its_ranks_come_back(seed):
    def main(hosts):
        supervisor = Supervisor("one_for_one", max_restarts=3, within=60)
        workers = supervisor.spawn(hosts.spawn_procs({"gpus": 4}), "w", Survivor)
        peer = hosts.slice(hosts=2).spawn_procs().spawn("peer", Survivor)
        assert peer.ask.call_one(workers).get() == names
        time.sleep(5)
        supervisor.healthy.get()
        assert list(workers.where.call().get().values()) == names
        assert peer.ask.call_one(workers).get() == names  # `peer` had called the old ones before
        stranger = hosts.slice(hosts=2).spawn_procs().spawn("stranger", Survivor)
        assert stranger.ask.call_one(workers).get() == names
        plain = hosts.slice(hosts=1).spawn_procs().spawn("plain", Survivor)
        assert plain.ask.call_one(workers).get() == names
        assert peer.ask.call_one(plain).get() == ["host1"]
        return [(event.rank, event.incarnation) for event in supervisor.restarts]

    names = [f"host{host}" for host in range(3) for _ in range(4)]
    done = simulate(main, hosts=3, faults=[CrashAgent(2.0, 1)], seed=seed)
    assert done.faults == FaultPlan.of(CrashAgent(2.0, 1))
    assert sorted(done.value) == [(4, 1), (5, 1), (6, 1), (7, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_a_third_host_never_reaches_the_agent_before_the_one_that_home_attached(monkeypatch, seed):
    """The worker starts an agent for home's old session. It ends when the new session begins.

    Home is slow, so the third host is there before home's new session.
    """

    def main(hosts):
        supervisor = Supervisor("one_for_one", max_restarts=3, within=60)
        workers = supervisor.spawn(hosts.spawn_procs({"gpus": 4}), "w", Survivor)
        peer = hosts.slice(hosts=2).spawn_procs().spawn("peer", Survivor)
        assert peer.ask.call_one(workers).get() == names
        errors = []
        time.sleep(5 - time.monotonic())
        while len(supervisor.restarts) < 4:
            time.sleep(0.02)
            try:
                peer.ask.call_one(workers).get()
            except ActorError as error:
                errors.append(str(error))
        supervisor.healthy.get()
        assert peer.ask.call_one(workers).get() == names
        return errors

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    names = [f"host{host}" for host in range(3) for _ in range(4)]
    faults = [CrashAgent(5.0, 1), Delay(4.5, 0, 1, seconds=60, by=0.2)]
    errors = simulate(main, hosts=3, faults=faults, seed=seed).value
    assert not [text for text in errors if "began a new session" not in text]


def test_a_host_whose_address_is_not_known_is_a_lost_one():
    views = []

    def main(hosts):
        hosts.slice(hosts=1).spawn_procs().spawn("w", Worker).where.call().get()
        del views[0]._world.hosts[1].hosts.addresses["host2"]
        procs = hosts.slice(hosts=1).spawn_procs()
        owner = procs.spawn("owner", Owner, hosts.slice(hosts=2))
        return owner.stream.call_one("where").get()

    outcomes = simulate(main, hosts=3, invariants=[views.append]).value
    assert len(outcomes) == 2
    for text in outcomes:
        assert "host2 is unreachable: its address is not known here" in text


def test_what_ends_with_hosts_that_were_let_go_is_no_failure():
    def main(hosts):
        one = hosts.slice(hosts=1)
        one._attachment = Attachment({"host1": "host1"})
        received = HostMesh(one._shape, hosts=one._hosts)  # like one that an actor there returns
        mine = received.spawn_procs().spawn("mine", Survivor)
        theirs = hosts.slice(hosts=2).spawn_procs().spawn("owner", Owner, received)
        assert mine.where.call_one().get() == "host1"
        theirs.stream.call_one("where").get()
        one._attachment.leave(shutdown=False).get()
        time.sleep(60)
        with pytest.raises(SupervisionError, match="selective drain"):
            mine.where.call_one().get()
        outcomes = theirs.stream.call_one("where").get()
        assert len([text for text in outcomes if "host1 was released" in text]) == 2
        with pytest.raises(RuntimeError, match="`HostMesh` has already been stopped"):
            received.spawn_procs()
        one._attachment = Attachment({"host1": "host1"})
        again = received.spawn_procs().spawn("again", Survivor)
        assert again.where.call_one().get() == "host1"
        return theirs.told.call_one().get()

    assert simulate(main, hosts=3).value == []


def test_machines_that_are_suspended_at_the_same_time_are_all_there_afterwards():
    """By its own clock, each receives nothing for a day, which must not make it give up others."""
    views = []

    def main(hosts):
        workers = hosts.spawn_procs().spawn("w", Worker)
        workers.where.call().get()
        world = views[0]._world
        for machine in (*world.hosts, *world.procs):
            world.scheduler.pause(machine.place)
            later = world.scheduler.now + 86_400.0
            world.scheduler.at(later, None, world.scheduler.unpause, machine.place)
        time.sleep(10)
        return len(workers.where.call().get().values())

    done = simulate(main, hosts=3, invariants=[views.append], time_limit=1e6)
    assert done.value == 3
    assert done.elapsed > 86_400


def test_the_same_seed_gives_the_same_steps_on_a_bad_network():
    faults = [Drop(0.0, seconds=2, probability=0.2), Partition(0.5, 0, 1, seconds=1.5)]
    first, again = (
        simulate(owned("count", 20, 0.1), hosts=3, faults=faults, seed=7, trace=True)
        for _ in range(2)
    )
    assert first.value[0] == [list(range(20))] * 6
    assert (first.steps, first.elapsed, first.trace) == (again.steps, again.elapsed, again.trace)


def test_a_host_with_another_secret_is_refused(monkeypatch):
    """The handshake between simulated hosts is the real one."""

    def main(hosts):
        workers = hosts.slice(hosts=1).spawn_procs().spawn("w", Worker)
        with pytest.raises(SupervisionError, match=r"host1 is unreachable: .*secret"):
            workers.where.call_one().get()
        return True

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    monkeypatch.setattr("monarch.testing.host.KEY", bytes(32))
    assert simulate(main, hosts=2).value
