"""Clients attach simulated hosts by their addresses, directly and through a gateway.

Within the time that the client allows, a host may be late or cut off. Each mesh that is attached,
stopped or shut down keeps what `HostMesh` promises, and each wait ends.
"""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

import monarch.actor
from monarch._engine.mesh.meshes.attachment import let_go
from monarch._engine.mesh.script import attach as attaching
from monarch.actor import Actor, SupervisionError, attach_to_workers, endpoint
from monarch.testing import Crash, CrashAgent, CrashHost, Drop, Partition, Reorder, simulate
from monarch.testing.network import PORT, address_of


def workers(*hosts):
    return [f"tcp://{address_of(host)}:{PORT}" for host in hosts]


def attach(*hosts, **options):
    return attach_to_workers(ca="trust_all_connections", workers=workers(*hosts), **options)


class Worker(Actor):
    @endpoint
    def where(self):
        return socket.gethostname()

    @endpoint
    def ask(self, others):
        return list(others.where.call().get().values())

    @endpoint
    def echo(self, data):
        return data


@pytest.fixture(params=["direct", "gateway"])
def way(request, monkeypatch):
    """Reach all hosts directly, or through the worker of host 1, as `monarch.actor.attach` does."""
    if request.param == "gateway":
        monkeypatch.setattr(attaching, "_gateway", workers(1)[0])
    return request.param


@pytest.fixture
def losses(monkeypatch):
    """Let failures reach the script: the plan causes them."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)


def until(seconds):
    while time.monotonic() < seconds:
        yield time.sleep(0.1)


def names(actors):
    return list(actors.where.call().get(timeout=600).values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "faults",
    [
        [],
        [Drop(0.0, seconds=9, probability=0.1), Reorder(0.0, seconds=9, by=0.1)],
        [Partition(0.0, seconds=5)],  # the workers cannot be reached for a while
        [Partition(1.0, 0, 1, seconds=2), Partition(1.0, 1, 2, seconds=2, one_way=True)],
    ],
    ids=["well", "bad", "late", "cut"],
)
def test_attached_hosts_run_procs_that_reach_each_other(way, faults, seed):
    def main():
        mesh = attach(1, 2)
        assert mesh.sizes == {"hosts": 2}
        actors = mesh.spawn_procs({"gpus": 2}).spawn("w", Worker)
        assert mesh.initialized.get(timeout=600)
        for _ in range(20):
            assert names(actors) == ["host1", "host1", "host2", "host2"]
            time.sleep(0.1)
        first, last = actors.slice(hosts=0, gpus=0), actors.slice(hosts=1, gpus=1)
        assert first.ask.call_one(last).get(timeout=600) == ["host2"]
        assert last.ask.call_one(actors.slice(hosts=0)).get(timeout=600) == ["host1", "host1"]
        assert len(last.echo.call_one(bytes(3_000_000)).get(timeout=600)) == 3_000_000
        mesh.stop().get(timeout=600)
        with pytest.raises(RuntimeError, match="already been stopped"):
            mesh.spawn_procs()
        return True

    assert simulate(main, hosts=3, faults=faults, seed=seed, time_limit=1e4).value


def test_a_gateway_carries_what_a_client_cannot_reach(monkeypatch):
    cut = [Partition(0.0, 0, 2, seconds=1e6)]

    def main():
        actors = attach(1, 2).spawn_procs().spawn("w", Worker)
        return names(actors)

    monkeypatch.setattr(attaching, "_gateway", workers(1)[0])
    assert simulate(main, hosts=3, faults=cut, strict=False).value == ["host1", "host2"]


@pytest.mark.usefixtures("losses")
def test_a_gateway_says_what_it_cannot_reach(monkeypatch):
    def main():
        there, not_there = attach(2), attach(3, timeout=12)
        assert there.initialized.get()
        there.shutdown().get()
        with pytest.raises(RuntimeError, match=r"10\.0\.0\.3.* timed out"):
            not_there.initialized.get()
        with pytest.raises(RuntimeError, match=r"gateway .* cannot connect to it: Connection ref"):
            attach(2, timeout=4).initialized.get()
        return True

    monkeypatch.setattr(attaching, "_gateway", workers(1)[0])
    cut = [Partition(0.0, 1, 3, seconds=1e6)]
    assert simulate(main, hosts=4, faults=cut, strict=False).value


@pytest.mark.usefixtures("losses")
def test_a_lost_gateway_is_the_loss_of_what_is_behind_it(monkeypatch):
    def main():
        actors = attach(2).spawn_procs().spawn("w", Worker)
        assert names(actors) == ["host2"]
        time.sleep(5)
        with pytest.raises(SupervisionError, match="is unreachable"):
            names(actors)
        return True

    monkeypatch.setattr(attaching, "_gateway", workers(1)[0])
    assert simulate(main, hosts=3, faults=[CrashHost(2.0, 1)]).value


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("reason", ["cut off", "no power", "shut down", "another secret"])
def test_a_worker_that_is_not_reached_is_named_in_time(way, reason, monkeypatch):
    faults = {
        "cut off": [Partition(0.0, b=2, seconds=1e6)],
        "no power": [CrashHost(0.0, 2)],
    }.get(reason, [])

    def main():
        if reason == "shut down":
            attach(2).shutdown().get()
        if reason == "another secret":
            monkeypatch.setattr("monarch.testing.host.KEY", bytes(32))
        time.sleep(0.1)
        begun = time.monotonic()
        mesh = attach(2, 3, timeout=5)
        actors = mesh.slice(hosts=0).spawn_procs().spawn("w", Worker)
        with pytest.raises(RuntimeError, match=r"attach failed: (?s:.*)10\.0\.0\.2"):
            mesh.initialized.get()
        with pytest.raises(SupervisionError):
            names(actors)
        assert time.monotonic() - begun < 30
        return True

    assert simulate(main, hosts=4, faults=faults, strict=False, time_limit=1e4).value


def test_hosts_are_released_when_no_mesh_uses_them(way):
    def main():
        one, two = attach(1, 2), attach(2)
        first = one.spawn_procs().spawn("first", Worker)
        second = two.spawn_procs().spawn("second", Worker)
        assert (names(first), names(second)) == (["host1", "host2"], ["host2"])
        one.stop().get()
        assert names(second) == ["host2"]
        two.stop().get()
        with pytest.raises(RuntimeError, match=r"already been stopped.*attach .* again"):
            two.spawn_procs()
        again = attach(2).spawn_procs().spawn("again", Worker)
        assert names(again) == ["host2"]
        let_go(workers(2)).get()
        with pytest.raises(SupervisionError):
            names(again)
        assert names(attach(2).spawn_procs().spawn("last", Worker)) == ["host2"]
        let_go(workers(1, 3)).get()  # neither is attached
        return True

    assert simulate(main, hosts=4).value


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", [CrashAgent(1.0, 2), CrashHost(1.0, 2), Crash(1.0, "p-1")])
def test_stop_and_shutdown_end_whatever_was_lost(way, fault, seed):
    def main():
        mesh = attach(1, 2)
        procs = mesh.spawn_procs(name="p")
        actors = procs.spawn("w", Worker)
        names(actors)
        time.sleep(1 + 2 * seed)
        with pytest.raises(SupervisionError):
            [names(actors) for _ in until(60)]
        assert names(actors.slice(hosts=0)) == ["host1"]
        with contextlib.suppress(SupervisionError):
            (mesh.stop() if seed % 2 else mesh.shutdown()).get(timeout=600)
        with pytest.raises(RuntimeError, match="already been"):
            mesh.initialized.get()
        return True

    assert simulate(main, hosts=3, faults=[fault], seed=seed).value


def test_what_cannot_be_attached_is_said_at_once():
    def main():
        with pytest.raises(RuntimeError, match="invalid worker address"):
            attach_to_workers(ca="trust_all_connections", workers=["inproc://1"])
        with pytest.raises(RuntimeError, match="where to listen"):
            attach_to_workers(ca="trust_all_connections", workers=["tcp://*:1"])
        with pytest.raises(NotImplementedError, match="HYPERACTOR_TLS_CERT"):
            attach_to_workers(ca="mine", workers=workers(1))
        with pytest.raises(ValueError, match="timeout"):
            attach(1, timeout=-1)
        with pytest.raises(RuntimeError, match="before the first"):
            monarch.actor.attach("tcp://10.0.0.1:1")
        return True

    assert simulate(main, hosts=2).value
