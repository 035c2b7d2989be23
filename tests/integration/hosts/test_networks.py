"""Network faults: hosts in their own network namespaces, whose packets are dropped and delayed.

Each receiver keeps a ledger of its messages, so that a test can check afterwards that all of them
arrived, once and in order.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.direct.link import DirectLink
from monarch.actor import Actor, ActorError, HostMesh, SupervisionError, attach_to_workers, endpoint
from monarch.config import configured
from tests.emulator import Conditions
from tests.network import Network, network, unavailable

REASON = unavailable()
NO_EMULATOR = REASON or unavailable(emulator=True)
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no networks here: {REASON}"),
    pytest.mark.slow,
]

WAIT = 60.0
TIMEOUT = 2.0
"""Seconds of silence after which a host is lost, in these tests."""

WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Ledger(Actor):
    def __init__(self) -> None:
        self.noted: list[tuple[str, int]] = []

    @endpoint
    def note(self, who: str, number: int) -> int:
        self.noted.append((who, number))
        return number

    @endpoint
    def notes(self, who: str) -> list[int]:
        return [number for name, number in self.noted if name == who]

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def tell(self, other: Any, count: int) -> list[int]:
        """Send numbered calls to another host's ledger, all at once; return its answers."""
        futures = [other.note.call_one("ledger", number) for number in range(count)]
        return [future.get(timeout=WAIT) for future in futures]


@pytest.fixture(scope="module")
def hosts_of_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, Any]]:
    """Make two hosts with a worker loop each."""
    folder: Path = tmp_path_factory.mktemp("networks")
    secret = folder / "secret"
    secret.write_text("a secret of the tests, and of nobody else\n")
    secret.chmod(0o600)
    script = folder / "worker.py"
    script.write_text(WORKER)
    seed = None if NO_EMULATOR else 1
    with (
        pytest.MonkeyPatch.context() as patch,
        configured(host_timeout=f"{TIMEOUT}s"),
        network(2, emulator_seed=seed) as made,
    ):
        patch.setenv("MONARCH_SECRET_FILE", str(secret))
        patch.setenv("MONARCH_HOST_TIMEOUT", f"{TIMEOUT}s")
        addresses = [f"tcp://{host.address}:26600" for host in made.hosts]
        workers = [
            host.start(sys.executable, str(script), address, env=dict(os.environ))
            for host, address in zip(made.hosts, addresses, strict=True)
        ]
        try:
            yield made, addresses
        finally:
            for host in made.hosts:
                host.heal()
            for worker in workers:
                worker.kill()
                worker.wait()


@pytest.fixture(autouse=True)
def faults() -> Iterator[queue.Queue[Any]]:
    found: queue.Queue[Any] = queue.Queue()
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = found.put
    yield found
    monarch.actor.unhandled_fault_hook = before


@pytest.fixture
def cluster(hosts_of_network: tuple[Network, Any]) -> Iterator[tuple[Network, HostMesh]]:
    made, addresses = hosts_of_network
    hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
    try:
        hosts.initialized.get(timeout=WAIT)
        yield made, hosts
    finally:
        for host in made.hosts:
            host.heal()
        with contextlib.suppress(SupervisionError, RuntimeError):  # a host was lost
            hosts.stop().get(timeout=WAIT)


@pytest.fixture
def patient() -> Iterator[None]:
    """Wait for a silent host for longer than a busy machine's emulator ever delays a packet."""
    with configured(host_timeout="20s"):
        yield


class Caller:
    """Calls a ledger until it is stopped, with several calls at a time."""

    def __init__(self, ledger: Any, name: str = "caller") -> None:
        self.answers: list[int] = []
        self.error: BaseException | None = None
        self._ledger = ledger
        self._name = name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while not self._over.is_set():
                futures = []
                for _ in range(20):
                    futures.append(self._ledger.note.call_one(self._name, number))
                    number += 1
                self.answers += [future.get(timeout=WAIT) for future in futures]
        except BaseException as error:
            self.error = error

    def stop(self) -> int:
        """Stop; check that each call was executed and answered once, in order; count the calls."""
        self._over.set()
        self._thread.join(2 * WAIT)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        sent = list(range(len(self.answers)))
        assert self.answers == sent
        assert self._ledger.notes.call_one(self._name).get(timeout=WAIT) == sent
        return len(sent)


def answered(caller: Caller, more: int = 100) -> None:
    """Wait until that many more calls have been answered."""
    goal = len(caller.answers) + more
    deadline = time.monotonic() + WAIT
    while len(caller.answers) < goal and caller.error is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_hosts_reach_each_other(cluster: tuple[Network, HostMesh]) -> None:
    _, hosts = cluster
    ledgers = hosts.spawn_procs().spawn("ledger", Ledger)
    first, second = ledgers.slice(hosts=0), ledgers.slice(hosts=1)
    assert first.tell.call_one(second, 100).get(timeout=WAIT) == list(range(100))
    assert second.notes.call_one("ledger").get(timeout=WAIT) == list(range(100))


def test_hosts_that_dial_each_other_at_the_same_time(cluster: tuple[Network, HostMesh]) -> None:
    _, hosts = cluster
    procs = hosts.spawn_procs()
    ledgers, tellers = procs.spawn("ledger", Ledger), procs.spawn("teller", Ledger)
    there, back = (
        tellers.slice(hosts=one).tell.call_one(ledgers.slice(hosts=1 - one), 50) for one in (0, 1)
    )
    assert there.get(timeout=WAIT) == back.get(timeout=WAIT) == list(range(50))


@pytest.mark.parametrize("way", ["both ways", "inbound", "outbound"])
def test_a_short_partition_loses_and_doubles_nothing(
    cluster: tuple[Network, HostMesh], faults: queue.Queue[Any], way: str
) -> None:
    made, hosts = cluster
    ledgers = hosts.spawn_procs().spawn("ledger", Ledger)
    caller = Caller(ledgers.slice(hosts=1))
    answered(caller)
    made.hosts[1].lose(100, inbound=way != "outbound", outbound=way != "inbound")
    time.sleep(TIMEOUT / 4)  # the length of the outage is under test
    made.hosts[1].heal()
    answered(caller)
    assert caller.stop() > 200
    assert faults.empty()


@pytest.mark.parametrize("way", ["both ways", "inbound", "outbound"])
def test_a_host_that_is_cut_off_is_reported(
    cluster: tuple[Network, HostMesh], faults: queue.Queue[Any], way: str
) -> None:
    made, hosts = cluster
    ledgers = hosts.spawn_procs().spawn("ledger", Ledger)
    lost, there = ledgers.slice(hosts=1), ledgers.slice(hosts=0)
    caller = Caller(lost)
    other = Caller(there, "other")
    answered(caller)
    made.hosts[1].lose(100, inbound=way != "outbound", outbound=way != "inbound")
    with pytest.raises(SupervisionError, match="unreachable"):
        lost.echo.call_one(1).get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="unreachable"):
        caller.stop()
    assert faults.get(timeout=WAIT).mesh_name.startswith("ledger")
    answered(other)
    other.stop()
    assert there.echo.call_one(2).get(timeout=WAIT) == 2


def test_a_host_that_was_never_reached_is_not_waited_for_long(
    cluster: tuple[Network, HostMesh], faults: queue.Queue[Any]
) -> None:
    """One of two hosts is cut off while it has no session with the other."""
    made, hosts = cluster
    ledgers = hosts.spawn_procs().spawn("ledger", Ledger)
    first, second = ledgers.slice(hosts=0), ledgers.slice(hosts=1)
    assert ledgers.echo.call(1).get(timeout=WAIT).values() == [1, 1]
    made.hosts[1].lose(100)
    with pytest.raises(ActorError, match="unreachable"):
        first.tell.call_one(second, 1).get(timeout=WAIT / 2)
    assert faults.get(timeout=WAIT).mesh_name.startswith("ledger")


def test_loss_of_packets(cluster: tuple[Network, HostMesh], faults: queue.Queue[Any]) -> None:
    made, hosts = cluster
    ledgers = hosts.spawn_procs().spawn("ledger", Ledger)
    first, second = ledgers.slice(hosts=0), ledgers.slice(hosts=1)
    for host in made.hosts:
        host.lose(1)
    callers = [Caller(first), Caller(second), Caller(second, "another")]
    told = first.tell.call_one(second, 500)
    payload = os.urandom(8 << 20)
    assert second.echo.call_one(payload).get(timeout=WAIT) == payload
    assert told.get(timeout=WAIT) == list(range(500))
    for caller in callers:
        answered(caller)
        caller.stop()
    assert faults.empty()


def test_a_link_that_flaps(cluster: tuple[Network, HostMesh], faults: queue.Queue[Any]) -> None:
    made, hosts = cluster
    ledgers = hosts.spawn_procs().spawn("ledger", Ledger)
    callers = [Caller(ledgers.slice(hosts=1)), Caller(ledgers.slice(hosts=0))]
    for number in range(6):
        made.hosts[1].lose(100, inbound=number % 3 != 0, outbound=number % 3 != 1)
        time.sleep(TIMEOUT / 8)  # the length of the outage is under test
        made.hosts[1].heal()
        for caller in callers:
            answered(caller, 20)
    for caller in callers:
        caller.stop()
    assert faults.empty()


@pytest.mark.skipif(NO_EMULATOR is not None, reason=f"no emulator here: {NO_EMULATOR}")
@pytest.mark.usefixtures("patient")
def test_delay_loss_doubling_and_reordering(
    cluster: tuple[Network, HostMesh], faults: queue.Queue[Any]
) -> None:
    made, hosts = cluster
    ledgers = hosts.spawn_procs().spawn("ledger", Ledger)
    first, second = ledgers.slice(hosts=0), ledgers.slice(hosts=1)
    assert second.echo.call_one(0).get(timeout=WAIT) == 0
    bad = Conditions(delay=0.05, jitter=0.02, loss=0.01, double=0.01)
    made.hosts[1].impair(bad, bad)
    try:
        began = time.monotonic()
        assert second.echo.call_one(1).get(timeout=WAIT) == 1
        assert time.monotonic() - began >= 0.06  # the network really is slow
        callers = [Caller(second), Caller(second, "another")]
        told = first.tell.call_one(second, 300)
        payload = os.urandom(1 << 20)
        assert second.echo.call_one(payload).get(timeout=WAIT) == payload
        assert told.get(timeout=WAIT) == list(range(300))
        for caller in callers:
            answered(caller, 60)
            caller.stop()
    finally:
        made.hosts[1].impair(Conditions(), Conditions())
    assert faults.empty()


def test_a_slow_network(cluster: tuple[Network, HostMesh], faults: queue.Queue[Any]) -> None:
    """A payload that takes longer than `host_timeout` does not make its host count as lost."""
    made, hosts = cluster
    ledger = hosts.spawn_procs().spawn("ledger", Ledger).slice(hosts=1)
    assert ledger.echo.call_one(0).get(timeout=WAIT) == 0
    made.hosts[1].limit(500)
    try:
        payload = os.urandom(3 << 19)
        began = time.monotonic()
        back = ledger.echo.call_one(payload)
        caller = Caller(ledger)
        assert back.get(timeout=WAIT) == payload
        assert time.monotonic() - began > TIMEOUT
        caller.stop()
    finally:
        made.hosts[1].limit(None)
    assert faults.empty()


def test_the_hosts_can_be_attached_again_after_a_partition(
    hosts_of_network: tuple[Network, Any], faults: queue.Queue[Any]
) -> None:
    made, addresses = hosts_of_network
    attach: Callable[[], HostMesh] = lambda: attach_to_workers(
        ca="trust_all_connections", workers=addresses
    )
    hosts = attach()
    ledgers = hosts.spawn_procs().spawn("ledger", Ledger)
    assert ledgers.echo.call(1).get(timeout=WAIT).values() == [1, 1]
    made.hosts[0].lose(100)
    with pytest.raises(SupervisionError, match="unreachable"):
        ledgers.echo.call(1).get(timeout=WAIT)
    made.hosts[0].heal()
    with contextlib.suppress(SupervisionError, RuntimeError):
        hosts.stop().get(timeout=WAIT)
    again = attach()
    again.initialized.get(timeout=WAIT)
    ledgers = again.spawn_procs().spawn("ledger", Ledger)
    assert ledgers.echo.call(2).get(timeout=WAIT).values() == [2, 2]
    again.stop().get(timeout=WAIT)


def direct() -> bool:
    """Whether this process uses a direct connection."""
    links = client_proc().links.values()
    return any(isinstance(link, DirectLink) and link.direct.speaks for link in links)


def test_a_direct_connection_that_gets_stuck(cluster: tuple[Network, HostMesh]) -> None:
    """A firewall now lets only packets to the worker's port through."""
    net, hosts = cluster
    ledger = hosts.slice(hosts=0).spawn_procs().spawn("ledger", Ledger)
    count = 0
    while not direct():
        assert ledger.note.call_one("test", count).get(timeout=WAIT) == count
        count += 1
    net.hosts[0]._filter("add rule inet faults inbound tcp dport != 26600 drop\n")
    for _ in range(500):
        assert ledger.note.call_one("test", count).get(timeout=WAIT) == count
        count += 1
    assert not direct()
    assert ledger.notes.call_one("test").get(timeout=WAIT) == list(range(count))


def test_a_direct_connection_that_cannot_be(cluster: tuple[Network, HostMesh]) -> None:
    net, hosts = cluster
    net.hosts[0]._filter("add rule inet faults inbound tcp dport != 26600 tcp flags syn drop\n")
    ledger = hosts.slice(hosts=0).spawn_procs().spawn("ledger", Ledger)
    tries = client_proc().directs._tries
    count = 0
    while not tries or count < 500:
        assert ledger.note.call_one("test", count).get(timeout=WAIT) == count
        count += 1
    assert not direct()
    assert ledger.notes.call_one("test").get(timeout=WAIT) == list(range(count))
