"""Lost hosts in the simulator: their ranks go to spares, or wait for a host, and old procs are out.

Every program checks the same promises: handles refer to the ranks on the new host, from whatever
host they are used; each call has one outcome; and no message of a rank that was reported lost is
executed afterwards.
"""

from __future__ import annotations

import socket
import time

import pytest

import monarch.actor
from monarch._engine.mesh.script import attach as attaching
from monarch.actor import (
    Actor,
    SupervisionError,
    Supervisor,
    attach_to_workers,
    current_rank,
    endpoint,
    this_host,
)
from monarch.testing import (
    CrashAgent,
    CrashHost,
    Delay,
    Partition,
    Request,
    simulate,
)
from monarch.testing.host import SimHosts
from monarch.testing.network import PORT, address_of
from tests.sim.recovery import losses, program


class Worker(Actor):
    """Adds up numbers in a ledger; says where it runs."""

    def __init__(self, ledger=None):
        self.ledger = ledger
        self.incarnation = 0

    def __restart__(self, restart):
        self.incarnation = restart.incarnation

    @endpoint
    def where(self):
        return socket.gethostname()

    @endpoint
    def nap(self, seconds):
        time.sleep(seconds)

    @endpoint
    def ask(self, others):
        return list(others.where.call().get().values())

    @endpoint
    def write(self, number):
        who = current_rank().rank, self.incarnation, number
        self.ledger.add.call_one(*who).get()
        return who

    @endpoint
    def babble(self, times, pause):
        """Send numbers to the ledger, without waiting for answers."""
        for number in range(times):
            self.ledger.add.broadcast(current_rank().rank, self.incarnation, number)
            time.sleep(pause)


class Ledger(Actor):
    def __init__(self):
        self.entries = []

    @endpoint
    def add(self, rank, incarnation, number):
        self.entries.append((time.monotonic(), rank, incarnation, number))

    @endpoint
    def read(self):
        return self.entries


def places_of(lost, spare):
    """Return where the six ranks of a mesh on host0, host1 and host2 are after a loss."""
    names = ["host0", "host1", "host2"]
    names[lost] = spare
    return [name for name in names for _ in range(2)]


def use(hosts, seconds):
    """Call a supervised mesh for a while, from here and from another host; check all promises."""
    supervisor = Supervisor(max_restarts=3, within=60, spares=hosts.slice(hosts=3))
    ledger = this_host().spawn_procs().spawn("ledger", Ledger)
    procs = hosts.slice(hosts=slice(0, 3)).spawn_procs({"gpus": 2})
    workers = supervisor.spawn(procs, "w", Worker, ledger)
    peer = hosts.slice(hosts=2).spawn_procs().spawn("peer", Worker)
    answered, number = [], 0
    while time.monotonic() < seconds:
        number += 1
        try:
            answered += workers.write.call(number).get().values()
        except SupervisionError:
            supervisor.healthy.get()
        time.sleep(0.1)
    supervisor.healthy.get()
    now = list(workers.where.call().get().values())
    assert peer.ask.call_one(workers).get() == now
    stranger = hosts.slice(hosts=2).spawn_procs().spawn("stranger", Worker)
    assert stranger.ask.call_one(workers).get() == now
    assert supervisor.running(workers) == list(range(6))
    written = [entry[1:] for entry in ledger.read.call_one().get()]
    assert len(written) == len(set(written)), "a message was executed twice"
    assert set(answered) <= set(written)
    again = sorted((event.rank, event.incarnation, event.host) for event in supervisor.restarts)
    return now, again


@pytest.mark.parametrize("seed", range(3))
def test_the_ranks_of_a_lost_host_go_to_the_spare(seed):
    done = simulate(lambda hosts: use(hosts, 8.0), hosts=4, faults=[CrashHost(2.0, 1)], seed=seed)
    assert done.value == (places_of(1, "host3"), [(2, 1, "host3"), (3, 1, "host3")])


@pytest.mark.parametrize("place", ["before_arrival", "while_running", "before_reply"])
@pytest.mark.parametrize("nth", [1, 4, 9])
def test_a_host_that_is_lost_at_any_place_of_a_message(nth, place):
    fault = CrashHost(Request(nth, "w", place), 1)
    done = simulate(lambda hosts: use(hosts, 8.0), hosts=4, faults=[fault], seed=nth)
    assert done.value == (places_of(1, "host3"), [(2, 1, "host3"), (3, 1, "host3")])


def test_a_host_whose_worker_answers_keeps_its_ranks():
    done = simulate(lambda hosts: use(hosts, 4.0), hosts=4, faults=[CrashAgent(2.0, 1)])
    assert done.value == (places_of(1, "host1"), [(2, 1, "host1"), (3, 1, "host1")])


def test_the_time_to_recover_is_at_most_a_second_more_than_the_detectors():
    def main(hosts):
        supervisor = Supervisor(max_restarts=3, within=60, spares=hosts.slice(hosts=2))
        workers = supervisor.spawn(hosts.slice(hosts=1).spawn_procs({"gpus": 8}), "w", Worker)
        workers.where.call().get()
        time.sleep(5 - time.monotonic())
        try:
            while True:
                workers.where.call().get()
                time.sleep(0.01)
        except SupervisionError:
            reported = time.monotonic()
        supervisor.healthy.get()
        return reported, time.monotonic()

    reported, healthy = simulate(main, hosts=3, faults=[CrashHost(5.0, 1)]).value
    assert 5 < reported < 5 + 3.1
    assert healthy - reported < 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("one_way", [False, True])
def test_a_host_that_was_cut_off_and_comes_back_has_no_effect(seed, one_way, monkeypatch):
    """Old ranks send to an actor on another host, from which they are not cut off."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)

    def main(hosts):
        ledger = hosts.slice(hosts=2).spawn_procs().spawn("ledger", Ledger)
        supervisor = Supervisor(max_restarts=3, within=60, spares=hosts.slice(hosts=3))
        procs = hosts.slice(hosts=1).spawn_procs({"gpus": 2})
        workers = supervisor.spawn(procs, "w", Worker, ledger)
        workers.where.call().get()
        workers.babble.broadcast(2_000, 0.01)
        time.sleep(4)
        supervisor.healthy.get()
        while len(supervisor.restarts) < 2:
            time.sleep(0.01)
        back = time.monotonic()
        assert set(workers.where.call().get().values()) == {"host3"}
        workers.babble.broadcast(300, 0.01)
        time.sleep(20)
        assert set(workers.where.call().get().values()) == {"host3"}
        return back, ledger.read.call_one().get()

    faults = [Partition(2.0, 1, 0, seconds=10, one_way=one_way)]
    back, entries = simulate(main, hosts=4, faults=faults, seed=seed).value
    old = [when for when, _, incarnation, _ in entries if not incarnation]
    new = [(rank, number) for _, rank, incarnation, number in entries if incarnation == 1]
    assert min(old) < 2
    assert max(old) < back, "a message of the old incarnation was executed"
    assert sorted(new) == [(rank, number) for rank in (0, 1) for number in range(300)]


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_host_that_notices_late_reaches_no_other_host(seed, monkeypatch):
    """As one that was suspended does: time asleep is no silence.

    Then an old rank spawns on a host that its own has no session with, so none can have ended.
    """
    made = []

    class Made(Actor):
        def __init__(self, by):
            made.append(by)

        @endpoint
        def where(self):
            return socket.gethostname()

    class Spawner(Actor):
        @endpoint
        def spawn_after(self, seconds, hosts):
            time.sleep(seconds)
            here = socket.gethostname()
            there = hosts.spawn_procs().spawn("made", Made, here).where.call_one().get()
            return here, there

    began = SimHosts.__init__

    def begin(self, agent, client, name, count):
        began(self, agent, client, name, count)
        if name == "host1":
            self.monitor.be_patient(20.0)

    monkeypatch.setattr(SimHosts, "__init__", begin)

    def main(hosts):
        third = hosts.slice(hosts=2)
        third.spawn_procs().spawn("w", Worker).where.call_one().get()
        supervisor = Supervisor(max_restarts=3, within=60, spares=hosts.slice(hosts=3))
        workers = supervisor.spawn(hosts.slice(hosts=1).spawn_procs(), "w", Spawner)
        workers.spawn_after.broadcast(6, third)
        time.sleep(10)
        return workers.spawn_after.call_one(0, third).get()

    faults = [Partition(2.0, 1, 0, seconds=60)]
    assert simulate(main, hosts=4, faults=faults, seed=seed).value == ("host3", "host2")
    assert made == ["host3"]


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
def test_a_mesh_goes_on_smaller_and_grows_when_the_host_is_back(strategy):
    def main(hosts):
        supervisor = Supervisor(strategy, max_restarts=3, within=60, min_size=4)
        workers = supervisor.spawn(hosts.spawn_procs({"gpus": 2}), "w", Worker)
        workers.where.call().get()
        time.sleep(6)
        supervisor.healthy.get()
        while supervisor.running(workers) != [0, 1, 4, 5]:
            time.sleep(0.1)
        shrunk = time.monotonic()
        some = workers.where.options(on_failure="partial").call().get()
        assert [host for _, host in some.successes()] == ["host0"] * 2 + ["host2"] * 2
        with pytest.raises(SupervisionError, match="host1 is unreachable"):
            workers.where.call().get()
        while supervisor.running(workers) != list(range(6)):
            time.sleep(0.1)
        supervisor.healthy.get()
        assert list(workers.where.call().get().values()) == places_of(1, "host1")
        return shrunk, time.monotonic(), {event.rank for event in supervisor.restarts}

    cut = Partition(2.0, 1, None, seconds=100)
    shrunk, grown, again = simulate(main, hosts=3, faults=[cut]).value
    assert shrunk < 30
    assert 102 < grown < 135
    assert again == ({2, 3} if strategy == "one_for_one" else set(range(6)))


class Keeper(Actor):
    """Holds a handle of the mesh, on a host that is not lost, and a copy made before the loss."""

    def __init__(self, mesh):
        self.mesh = mesh

    @endpoint
    def look(self):
        return list(self.mesh.where.call().get().values())


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
@pytest.mark.parametrize("how", ["mesh", "function", "late function", "came back"])
@pytest.mark.parametrize("seed", range(3))
def test_a_mesh_that_went_on_smaller_grows_on_any_host(how, strategy, seed):
    """The place of the lost host is filled later: by each kind of spare, or by the host itself."""
    asked = []

    def replace(address):
        asked.append(address)
        if how == "late function" and time.monotonic() < 60:
            raise RuntimeError("no machine is free")
        return "host3"

    def main(hosts):
        given = replace if how == "late function" else None
        supervisor = Supervisor(strategy, max_restarts=3, within=60, min_size=4, spares=given)
        team = hosts.slice(hosts=slice(0, 3))
        workers = supervisor.spawn(team.spawn_procs({"gpus": 2}), "w", Worker)
        part = workers.slice(hosts=1)
        keeper = hosts.slice(hosts=2).spawn_procs().spawn("keeper", Keeper, workers)
        assert keeper.look.call_one().get() == places_of(1, "host1")
        while supervisor.running(workers) != [0, 1, 4, 5]:
            time.sleep(0.1)
        supervisor.healthy.get()
        time.sleep(60 - time.monotonic() + seed / 3)
        assert supervisor.running(workers) == [0, 1, 4, 5]
        if how == "mesh":
            supervisor.add_spares(hosts.slice(hosts=3))
            supervisor.add_spares(hosts.slice(hosts=3))
        elif how == "function":
            supervisor.add_spares([replace])
        while supervisor.running(workers) != list(range(6)):
            time.sleep(0.01)
        grown = time.monotonic()
        supervisor.healthy.get()
        place = "host1" if how == "came back" else "host3"
        now = places_of(1, place)
        assert list(workers.where.call().get().values()) == now
        assert list(part.where.call().get().values()) == [place] * 2
        assert keeper.look.call_one().get() == now
        stranger = hosts.slice(hosts=0).spawn_procs().spawn("stranger", Worker)
        assert stranger.ask.call_one(workers).get() == now
        again = [event.rank for event in supervisor.restarts if event.rank in (2, 3)]
        assert sorted(again) == [2, 3]
        assert {event.incarnation for event in supervisor.restarts} == (
            {1} if strategy == "one_for_one" else {1, 2}
        )
        return grown

    lost = CrashHost(2.0, 1)
    if how == "came back":
        lost = Partition(2.0, 1, None, seconds=70)
    grown = simulate(main, hosts=4, faults=[lost], seed=seed).value
    # The host's own worker is dialed for 9 s, and pauses between two attempts are of 15 s.
    assert grown < 60 + {"mesh": 11, "function": 11, "late function": 30}.get(how, 45)
    assert how in ("mesh", "came back") or set(asked) == {"host1"}


def test_a_mesh_that_became_smaller_grows_again_and_again():
    """Each of the hosts that came later is lost as well; there is one timer of searches at most."""

    def main(hosts):
        supervisor = Supervisor(max_restarts=9, within=9, min_size=2)
        workers = supervisor.spawn(hosts.slice(hosts=slice(0, 3)).spawn_procs(), "w", Worker)
        workers.where.call().get()
        for number in range(3, 6):
            time.sleep(100 * (number - 2) - time.monotonic())
            assert supervisor.running(workers) == [0, 2]
            for _ in range(10):
                supervisor.add_spares(hosts.slice(hosts=number))
            while supervisor.running(workers) != [0, 1, 2]:
                time.sleep(0.1)
            assert workers.slice(hosts=1).where.call_one().get() == f"host{number}"
        stopped = workers.stop()
        stopped.get()
        time.sleep(100)
        assert supervisor.running(workers) == []
        assert not supervisor._lost
        assert not supervisor._pauses

    lost = [CrashHost(2.0, 1), CrashHost(150.0, 3), CrashHost(250.0, 4)]
    simulate(main, hosts=6, faults=lost)


def test_a_mesh_that_becomes_too_small_is_given_up(monkeypatch):
    faults = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", faults.append)

    def main(hosts):
        supervisor = Supervisor(max_restarts=3, within=60, min_size=5)
        workers = supervisor.spawn(hosts.spawn_procs({"gpus": 2}), "w", Worker)
        workers.where.call().get()
        time.sleep(6)
        with pytest.raises(SupervisionError, match="may not go on with fewer than 5"):
            supervisor.healthy.get()
        assert supervisor.running(workers) == []

    simulate(main, hosts=3, faults=[CrashHost(2.0, 1)])
    assert [fault.mesh_name.partition("-")[0] for fault in faults] == ["w"]


def test_without_any_host_the_supervisor_gives_up(monkeypatch):
    faults = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", faults.append)

    def main(hosts):
        def replace(address):
            raise RuntimeError(f"the quota is used up: nothing for {address}")

        supervisor = Supervisor(max_restarts=2, within=600, spares=replace)
        workers = supervisor.spawn(hosts.spawn_procs(), "w", Worker)
        workers.where.call().get()
        time.sleep(5)
        with pytest.raises(SupervisionError, match="the quota is used up: nothing for host1"):
            supervisor.healthy.get()

    simulate(main, hosts=2, faults=[CrashHost(2.0, 1)])
    assert len(faults) == 1


class Manager(Actor):
    """Supervises from a host that is not the script's."""

    def __init__(self, hosts, spares):
        self.supervisor = Supervisor(max_restarts=3, within=60, spares=spares)
        self.workers = self.supervisor.spawn(hosts.spawn_procs({"gpus": 2}), "w", Worker)

    @endpoint
    def where(self):
        try:
            return list(self.workers.where.call().get().values())
        except SupervisionError:
            self.supervisor.healthy.get()
            return None


@pytest.mark.parametrize("seed", range(3))
def test_an_actor_on_another_host_supervises(seed):
    def main(hosts):
        team = hosts.slice(hosts=slice(0, 3))
        first = team.spawn_procs()  # the script's agent dials all hosts
        first.spawn("first", Worker).where.call().get()
        first.stop().get()
        procs = hosts.slice(hosts=2).spawn_procs()
        manager = procs.spawn("manager", Manager, team, hosts.slice(hosts=3))
        assert manager.where.call_one().get() == places_of(1, "host1")
        time.sleep(5)
        while (places := manager.where.call_one().get()) is None:
            time.sleep(0.1)
        return places

    faults = [CrashHost(2.0, 1), Delay(2.0, 0, 2, seconds=60, by=0.05)]
    assert simulate(main, hosts=4, faults=faults, seed=seed).value == places_of(1, "host3")


def test_hosts_that_are_lost_one_after_the_other_and_at_once(monkeypatch):
    def main(hosts):
        supervisor = Supervisor(max_restarts=9, within=60, spares=hosts.slice(hosts=slice(4, 8)))
        workers = supervisor.spawn(hosts.slice(hosts=slice(0, 4)).spawn_procs(), "w", Worker)
        workers.where.call().get()
        time.sleep(60)
        supervisor.healthy.get()
        return list(workers.where.call().get().values())

    # host4 takes the place of a host, and is lost as well.
    lost = [CrashHost(2.0, 1), CrashHost(2.0, 2), CrashHost(20.0, 4), CrashHost(40.0, 3)]
    places = simulate(main, hosts=8, faults=lost).value
    assert places[0] == "host0"
    assert set(places[1:]) == {"host5", "host6", "host7"}


def test_two_supervisors_of_one_host_agree():
    def main(hosts):
        spares = hosts.slice(hosts=slice(2, 4))
        meshes = []
        for name in ("a", "b"):
            supervisor = Supervisor(max_restarts=3, within=60, spares=spares)
            mesh = supervisor.spawn(hosts.slice(hosts=1).spawn_procs(), name, Worker)
            meshes.append((supervisor, mesh))
        plain = Supervisor(max_restarts=3, within=60)
        third = plain.spawn(hosts.slice(hosts=1).spawn_procs(), "c", Worker)
        meshes.append((plain, third))
        time.sleep(12)
        for supervisor, _ in meshes:
            supervisor.healthy.get()
        return [mesh.where.call_one().get() for _, mesh in meshes]

    assert simulate(main, hosts=4, faults=[CrashHost(2.0, 1)]).value == ["host2"] * 3


def attach(*numbers):
    """Attach simulated hosts by their addresses, as a client of real ones does."""
    addresses = [f"tcp://{address_of(number)}:{PORT}" for number in numbers]
    return attach_to_workers(ca="trust_all_connections", workers=addresses)


@pytest.mark.parametrize("gateway", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_spares_that_are_attached_directly_and_through_a_gateway(gateway, seed, monkeypatch):
    """A spare that is attached has an agent already, which is released."""

    def main():
        hosts, spares = attach(1, 2, 3), attach(4)
        spares.initialized.get()
        supervisor = Supervisor(max_restarts=3, within=60, spares=spares)
        workers = supervisor.spawn(hosts.spawn_procs({"gpus": 2}), "w", Worker)
        peer = hosts.slice(hosts=0).spawn_procs().spawn("peer", Worker)
        assert set(peer.ask.call_one(workers).get()) == {"host1", "host2", "host3"}
        time.sleep(8)
        supervisor.healthy.get()
        now = list(workers.where.call().get().values())
        assert peer.ask.call_one(workers).get() == now
        with pytest.raises(RuntimeError, match="worker has taken the place of"):
            spares.spawn_procs()
        spares.stop().get()
        hosts.stop().get()
        return now

    if gateway:
        monkeypatch.setattr(attaching, "_gateway", f"tcp://{address_of(1)}:{PORT}")
    done = simulate(main, hosts=5, faults=[CrashHost(2.0, 2)], seed=seed)
    assert done.value == [name for name in ("host1", "host4", "host3") for _ in range(2)]


def test_hosts_behind_a_gateway_that_was_cut_off_come_back(monkeypatch):
    def main():
        supervisor = Supervisor(max_restarts=20, within=100, max_backoff=2, spares=attach(4))
        workers = supervisor.spawn(attach(1, 2, 3).spawn_procs(), "w", Worker)
        assert len(workers.where.call().get().values()) == 3
        time.sleep(10)
        supervisor.healthy.get()
        assert len(workers.where.call().get().values()) == 3
        return time.monotonic()

    monkeypatch.setattr(attaching, "_gateway", f"tcp://{address_of(1)}:{PORT}")
    assert 22 < simulate(main, hosts=5, faults=[Partition(2.0, 0, 1, seconds=20)]).value < 45


@pytest.fixture
def behind_gateways(monkeypatch):
    """The client reaches workers through host 1 and, if that is lost, through host 2."""
    monkeypatch.setattr(attaching, "_gateway", f"tcp://{address_of(1)}:{PORT}")
    monkeypatch.setattr(attaching, "_spare_gateways", [f"tcp://{address_of(2)}:{PORT}"])


@pytest.mark.parametrize("fault", [CrashHost(2.0, 1), Partition(2.0, 0, 1, seconds=20)])
@pytest.mark.parametrize("seed", range(5))
def test_a_spare_gateway_takes_over_and_no_host_behind_is_lost(fault, seed, behind_gateways):
    def main():
        supervisor = Supervisor(max_restarts=0)
        ledger = this_host().spawn_procs().spawn("ledger", Ledger)
        workers = supervisor.spawn(attach(3, 4).spawn_procs({"gpus": 2}), "w", Worker, ledger)
        number = 0
        while time.monotonic() < 40:
            number += 1
            assert len(workers.write.call(number).get().values()) == 4
            time.sleep(0.1)
        added = attach(5).spawn_procs().spawn("added", Worker)
        assert added.where.call_one().get() == "host5"
        assert not supervisor.restarts
        written = [entry[1:] for entry in ledger.read.call_one().get()]
        assert sorted(written) == [(r, 0, n) for r in range(4) for n in range(1, number + 1)]
        return number

    assert simulate(main, hosts=6, faults=[fault], seed=seed).value > 100


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_gateway_is_the_root_cause_and_its_host_is_replaced_as_well(seed, behind_gateways):
    """The gateway is a host of the mesh, too: its ranks go to a spare, the others stay."""

    def main():
        supervisor = Supervisor(max_restarts=1, within=600, spares=attach(4))
        workers = supervisor.spawn(attach(1, 2, 3).spawn_procs(), "w", Worker)
        workers.where.call().get()
        time.sleep(6)
        supervisor.healthy.get()
        assert [event.rank for event in supervisor.restarts] == [0]
        (reason,) = {event.reason for event in supervisor.restarts}
        assert "is unreachable: " in reason
        return list(workers.where.call().get().values())

    done = simulate(main, hosts=5, faults=[CrashHost(2.0, 1)], seed=seed)
    assert done.value == ["host4", "host2", "host3"]


@pytest.mark.parametrize("spare", [False, True])
def test_without_a_gateway_all_hosts_behind_are_lost_and_the_report_names_it(spare, monkeypatch):
    """With another gateway that is reached later, the ranks come back on the same hosts."""
    first, second = (f"tcp://{address_of(number)}:{PORT}" for number in (1, 2))
    monkeypatch.setattr(attaching, "_gateway", first)
    monkeypatch.setattr(attaching, "_spare_gateways", [second] if spare else [])

    def main():
        supervisor = Supervisor(max_restarts=2, within=600)
        workers = supervisor.spawn(attach(3, 4).spawn_procs(), "w", Worker)
        workers.where.call().get()
        with pytest.raises(SupervisionError) as raised:
            workers.nap.call(30).get()
        report = raised.value.failure.report()
        assert "is unreachable: the gateway tcp:10.0.0.1:26600 is not reached: " in report
        assert ("the gateway tcp:10.0.0.2:26600 is not reached: " in report) == spare
        if spare:
            supervisor.healthy.get()
            assert list(workers.where.call().get().values()) == ["host3", "host4"]
            assert len(supervisor.restarts) == 2
        else:
            with pytest.raises(SupervisionError, match="gave up"):
                supervisor.healthy.get()

    if not spare:
        monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    lost = [CrashHost(2.0, 1), Partition(2.0, 0, 2, seconds=5)]
    simulate(main, hosts=5, faults=lost)


def test_many_losses_of_hosts_and_of_spares():
    """More, and for a day: ``python tests/soak/recovery.py``."""
    plan = losses(12, 6, 20.0)
    times = []
    done = simulate(lambda hosts: program(hosts, plan, 12, 20.0, times), hosts=19, faults=plan)
    assert done.value == (12, 6, True)
    assert len(times) == 6
    assert all(since_report < 1 for _, since_report in times)
