"""Hosts in network namespaces that are cut off: their ranks go to a spare host, and back again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, SupervisionError, Supervisor, attach_to_workers, endpoint
from monarch.config import configured
from monarch.rdma import RDMABuffer, RdmaError, RdmaOwnerLost
from tests.network import Network, network, unavailable

REASON = unavailable()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no networks here: {REASON}"),
    pytest.mark.slow,
]

WAIT = 120.0
TIMEOUT = 2.0
"""Seconds of silence after which a host is lost, in these tests."""

WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Ledger(Actor):
    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    @endpoint
    def note(self, pid: int, number: int) -> None:
        self.noted.append((pid, number))

    @endpoint
    def read(self) -> list[tuple[int, int]]:
        return self.noted


class Rank(Actor):
    """Sends numbers to a ledger of another host."""

    def __init__(self, ledger: Any) -> None:
        self.ledger = ledger
        self.number = 0

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def write(self, count: int) -> int:
        for _ in range(count):
            self.number += 1
            self.ledger.note.call_one(os.getpid(), self.number).get(timeout=WAIT)
        return os.getpid()

    @endpoint
    def babble(self, seconds: float) -> None:
        """Send numbers without waiting for answers."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.number += 1
            self.ledger.note.broadcast(os.getpid(), self.number)
            time.sleep(0.005)


class Owner(Actor):
    """Lends memory to others."""

    def __init__(self) -> None:
        self.memory = bytearray(os.getpid().to_bytes(8, "little") * 8192)

    @endpoint
    def lend(self) -> tuple[int, RDMABuffer]:
        return os.getpid(), RDMABuffer(self.memory)


class Reader(Actor):
    """Reads the memory of others until that fails."""

    @endpoint
    def first(self, buffer: RDMABuffer) -> int:
        into = bytearray(8)
        buffer[:8].read_into(into).get(timeout=WAIT)
        return int.from_bytes(into, "little")

    @endpoint
    def read(self, buffer: RDMABuffer) -> str:
        into = bytearray(65536)
        while (error := buffer.read_into(into).exception(timeout=WAIT)) is None:
            pass
        assert isinstance(error, RdmaError)
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, list[str]]]:
    """Make three hosts with a worker loop each."""
    folder: Path = tmp_path_factory.mktemp("recovery")
    secret = folder / "secret"
    secret.write_text("a secret of the tests, and of no one else\n")
    secret.chmod(0o600)
    script = folder / "worker.py"
    script.write_text(WORKER)
    with (
        pytest.MonkeyPatch.context() as patch,
        configured(host_timeout=f"{TIMEOUT}s"),
        network(3) as made,
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


def test_ranks_move_to_a_spare_and_back_and_old_ones_have_no_effect(
    three_hosts: tuple[Network, list[str]],
) -> None:
    made, addresses = three_hosts
    ledger_at, first, second = addresses
    ledgers = attach_to_workers(ca="trust_all_connections", workers=[ledger_at])
    hosts = attach_to_workers(ca="trust_all_connections", workers=[first])
    spares = attach_to_workers(ca="trust_all_connections", workers=[second])
    try:
        for mesh in (ledgers, hosts, spares):
            mesh.initialized.get(timeout=WAIT)
        ledger = ledgers.spawn_procs().spawn("ledger", Ledger)
        supervisor = Supervisor(max_restarts=9, within=600, spares=spares)
        ranks = supervisor.spawn(hosts.spawn_procs({"gpus": 2}), "ranks", Rank, ledger)
        pids: set[int] = set()
        for cut, place in ((1, second), (2, first)):
            old = set(ranks.pid.call().get(timeout=WAIT).values())
            assert not old & pids
            pids |= old
            ranks.babble.broadcast(8 * TIMEOUT)  # this goes on after the network is back
            made.hosts[cut].lose(100)
            with pytest.raises(SupervisionError, match="unreachable"):
                ranks.write.call(10_000).get(timeout=WAIT)
            supervisor.healthy.get(timeout=WAIT)
            assert {event.host for event in supervisor.restarts[-2:]} == {place}
            new = set(ranks.write.call(5).get(timeout=WAIT).values())
            assert not new & pids
            before = ledger.read.call_one().get(timeout=WAIT)
            made.hosts[cut].heal()
            ranks.write.call(50).get(timeout=WAIT)
            ranks.babble.call(TIMEOUT).get(timeout=WAIT)
            after = ledger.read.call_one().get(timeout=WAIT)
            assert before == after[: len(before)]
            assert {pid for pid, _ in after[len(before) :]} == new, "an old rank had an effect"
        noted = ledger.read.call_one().get(timeout=WAIT)
        assert len(noted) == len(set(noted)), "a message was executed twice"
    finally:
        for host in made.hosts:
            host.heal()
        for mesh in (hosts, spares, ledgers):
            mesh.stop().get(timeout=WAIT)


def test_memory_on_a_lost_host_is_lost_and_its_owner_lends_anew_on_the_spare(
    three_hosts: tuple[Network, list[str]],
) -> None:
    """An actor of another host and the script read it all the time."""
    made, (reader_at, first, second) = three_hosts
    meshes = [
        attach_to_workers(ca="trust_all_connections", workers=[each])
        for each in (reader_at, first, second)
    ]
    try:
        for mesh in meshes:
            mesh.initialized.get(timeout=WAIT)
        reader = meshes[0].spawn_procs().spawn("reader", Reader)
        supervisor = Supervisor(max_restarts=9, within=600, spares=meshes[2])
        owner = supervisor.spawn(meshes[1].spawn_procs(), "owner", Owner)
        old, buffer = owner.lend.call_one().get(timeout=WAIT)
        assert reader.first.call_one(buffer).get(timeout=WAIT) == old
        reading = reader.read.call_one(buffer)
        made.hosts[1].lose(100)
        into = bytearray(65536)
        while (error := buffer.read_into(into).exception(timeout=WAIT)) is None:
            pass
        assert isinstance(error, RdmaOwnerLost)
        assert "RdmaOwnerLost" in reading.get(timeout=WAIT)
        supervisor.healthy.get(timeout=WAIT)

        new, lent = owner.lend.call_one().get(timeout=WAIT)
        assert reader.first.call_one(lent).get(timeout=WAIT) == new
        made.hosts[1].heal()
        # The old process is fenced: what it lent stays lost, for all that had it.
        assert "RdmaOwnerLost" in reader.read.call_one(buffer).get(timeout=WAIT)
        with pytest.raises(RdmaOwnerLost):
            buffer.read_into(into).get(timeout=WAIT)
        assert reader.first.call_one(lent).get(timeout=WAIT) == new
    finally:
        for host in made.hosts:
            host.heal()
        for mesh in meshes:
            mesh.stop().get(timeout=WAIT)
