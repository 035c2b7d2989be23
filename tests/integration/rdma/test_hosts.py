"""Buffers on other hosts: worker loops of this machine, and hosts in their own namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch.actor import HostMesh, SupervisionError, attach_to_workers, endpoint
from monarch.config import configured
from monarch.rdma import RDMAAction, RDMABuffer, RdmaOwnerLost, explain, routes
from monarch.security import make_certificates
from tests.network import Network, network, unavailable
from tests.ports import free_port

from .conftest import WAIT, Owner

SIZE = 24 << 20
TIMEOUT = 2.0
"""Seconds of silence after which a host is lost."""

WORKER = """
import logging, sys
from monarch.actor import run_worker_loop_forever
log = logging.getLogger("monarch.audit")
log.setLevel(logging.INFO)
log.addHandler(logging.FileHandler(sys.argv[2]))
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""

Starter = Callable[..., subprocess.Popen[bytes]]


class Partner(Owner):
    @endpoint
    def pull(self, buffer: RDMABuffer) -> tuple[bytes, str]:
        """Read the buffer; return its content and the route that it finally took."""
        into = bytearray(len(buffer))
        buffer.read_into(into).get(timeout=WAIT)
        return bytes(into), way_to(buffer, "TCP|reason")


def way_to(buffer: RDMABuffer, wanted: str = "TCP") -> str:
    """Return how the bytes travel, once that matches `wanted`."""
    deadline = time.monotonic() + WAIT
    while not re.search(wanted, found := explain(buffer).ways[-1].reason):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a secret for each test, and a short time limit for lost hosts."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests, and of nobody else\n")
    secret.chmod(0o600)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(secret))
    monkeypatch.setenv("MONARCH_HOST_TIMEOUT", f"{TIMEOUT}s")
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = lambda failure: None
    with configured(rdma_routes="stream", host_timeout=f"{TIMEOUT}s"):
        yield
    monarch.actor.unhandled_fault_hook = before


@contextlib.contextmanager
def workers(
    folder: Path, addresses: list[str], starters: list[Starter], *environs: dict[str, str]
) -> Iterator[HostMesh]:
    """Start a worker for each address, and attach to them."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    started: list[subprocess.Popen[bytes]] = []
    for number, (address, start) in enumerate(zip(addresses, starters, strict=True)):
        environ = {**os.environ, **(environs[number] if environs else {})}
        audit = str(folder / f"audit{number}")
        started.append(start([sys.executable, str(script), address, audit], env=environ))
    hosts = attach_to_workers(ca="trust_all_connections", workers=addresses)
    try:
        hosts.initialized.get(timeout=WAIT)
        yield hosts
    finally:
        with contextlib.suppress(SupervisionError, RuntimeError):  # one of the hosts was lost
            hosts.stop().get(timeout=WAIT)
        for process in started:
            process.kill()
            process.wait()


def here(folder: Path, scheme: str, free: Callable[[], int], count: int = 1) -> list[str]:
    """Return addresses of this machine."""
    if scheme == "ipc":
        return [f"ipc://{folder}/worker{number}" for number in range(count)]
    return [f"{scheme}://127.0.0.1:{free()}" for _ in range(count)]


@pytest.fixture
def free() -> Callable[[], int]:
    return free_port


def check(partner: Any, name: str, wanted: str) -> RDMABuffer:
    """Read, write and add, first by the route that there is, then by the wanted one."""
    content = os.urandom(1 << 20) * (SIZE >> 20)
    buffer: RDMABuffer = partner.make.call_one(name, content).get(timeout=WAIT)
    into = bytearray(SIZE)
    for _ in range(2):
        buffer.read_into(into).get(timeout=WAIT)
        assert into == content
        into[:] = bytes(SIZE)
        assert re.fullmatch(wanted, way_to(buffer, wanted))
    buffer[1:].write_from(content[1:][::-1]).get(timeout=WAIT)
    seen = partner.look.call_one(name).get(timeout=WAIT)
    assert seen == content[:1] + content[1:][::-1]
    old = bytearray(8)
    RDMAAction().fetch_add(buffer, old, 1).submit().get(timeout=WAIT)
    assert old == seen[:8]
    return buffer


def test_a_connection_of_its_own(tmp_path: Path, free: Callable[[], int]) -> None:
    addresses = here(tmp_path, "tcp", free, 2)
    with workers(tmp_path, addresses, [subprocess.Popen] * 2) as hosts:
        partners = hosts.spawn_procs().spawn("partners", Partner)
        one, two = partners.slice(hosts=0), partners.slice(hosts=1)
        buffer = check(one, "a", "TCP to 127.0.0.1")
        content, way = two.pull.call_one(buffer[:100]).get(timeout=WAIT)
        assert content == one.look.call_one("a").get(timeout=WAIT)[:100]
        assert way == "TCP to 127.0.0.1"
        with RDMABuffer(bytearray(b"of the script")) as mine:
            assert two.pull.call_one(mine).get(timeout=WAIT) == (
                b"of the script",
                "TCP to 127.0.0.1",
            )
        audit = (tmp_path / "audit0").read_text()
        assert audit.count('"event": "connected"') == 2
        assert '"refused"' not in audit


def test_a_connection_that_breaks_is_replaced(tmp_path: Path, free: Callable[[], int]) -> None:
    """Transfers in flight are repeated on a new connection, after the owner closed its end, too."""
    addresses = here(tmp_path, "tcp", free)
    with workers(tmp_path, addresses, [subprocess.Popen]) as hosts:
        partner = hosts.spawn_procs().spawn("partner", Partner)
        buffer = check(partner, "a", "TCP to 127.0.0.1")
        content = partner.look.call_one("a").get(timeout=WAIT)
        peer: Any = routes.route_to(buffer._handle, "cpu")
        for _ in range(3):
            into = [bytearray(SIZE) for _ in range(3)]
            reads = [buffer.read_into(place) for place in into]
            writes = [buffer[8:].write_from(content[8:]) for _ in range(2)]
            counts = [RDMAAction().fetch_add(buffer, bytearray(8), 0).submit() for _ in range(5)]
            (lane,) = peer._peer._direct
            lane.connection._wire.shutdown(2)
            for future in (*reads, *writes):
                future.get(timeout=WAIT)
            assert into == [content] * 3
            for future in counts:
                error = future.exception(timeout=WAIT)
                assert error is None or "is not known" in str(error)
            way_to(buffer, "TCP to 127.0.0.1")
        assert partner.look.call_one("a").get(timeout=WAIT) == content


def test_hosts_that_share_no_network_are_carried(tmp_path: Path, free: Callable[[], int]) -> None:
    addresses = here(tmp_path, "ipc", free)
    with workers(tmp_path, addresses, [subprocess.Popen]) as hosts:
        partner = hosts.spawn_procs().spawn("partner", Partner)
        check(partner, "a", "carried by the agents of the two hosts .*no IP address.")


def test_by_tls_where_the_hosts_are(
    tmp_path: Path, free: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, worker = make_certificates(tmp_path / "ca", ["client", "127.0.0.1"])
    for name, value in client.environment.items():
        monkeypatch.setenv(name, value)
    addresses = here(tmp_path, "tls", free)
    with workers(tmp_path, addresses, [subprocess.Popen], worker.environment) as hosts:
        partner = hosts.spawn_procs().spawn("partner", Partner)
        check(partner, "a", "TCP to 127.0.0.1, TLS 1.3")
        assert '"certificate": "client"' in (tmp_path / "audit0").read_text()
        with RDMABuffer(bytearray(b"of the script")) as mine:
            content, way = partner.pull.call_one(mine).get(timeout=WAIT)
        assert (content, way) == (b"of the script", "TCP to 127.0.0.1, TLS 1.3")


def test_without_a_certificate_of_its_own_it_is_carried(
    tmp_path: Path, free: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, worker = make_certificates(tmp_path / "ca", ["client", "127.0.0.1"])
    for name, value in client.environment.items():
        monkeypatch.setenv(name, value)
    addresses = here(tmp_path, "tls", free)
    with workers(tmp_path, addresses, [subprocess.Popen], worker.environment) as hosts:
        partner = hosts.spawn_procs().spawn("partner", Partner)
        for name in client.environment:
            monkeypatch.delenv(name)
        buffer = partner.make.call_one("a", b"content").get(timeout=WAIT)
        into = bytearray(7)
        buffer.read_into(into).get(timeout=WAIT)
        assert into == b"content"
        assert "HYPERACTOR_TLS_CERT is not set" in way_to(buffer, "is not set")


# -- hosts in namespaces ---------------------------------------------------------------------------

REASON = unavailable()
in_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no networks here: {REASON}")


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(1) as made:
        yield made


@contextlib.contextmanager
def far_host(net: Network, folder: Path) -> Iterator[Any]:
    (host,) = net.hosts
    address = f"tcp://{host.address}:26600"

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return host.start(*command, **options)

    try:
        with workers(folder, [address], [start]) as hosts:
            yield hosts.spawn_procs().spawn("partner", Partner)
    finally:
        host.heal()


@in_namespaces
@pytest.mark.slow
@pytest.mark.failures
def test_a_host_that_is_lost_is_lost_here_too(net: Network, tmp_path: Path) -> None:
    with far_host(net, tmp_path) as partner:
        buffer = check(partner, "a", f"TCP to {net.hosts[0].address}")
        with RDMABuffer(bytearray(b"of the script")) as mine:
            content, way = partner.pull.call_one(mine).get(timeout=WAIT)
        assert (content, way) == (b"of the script", f"TCP to {net.address}")
        net.hosts[0].lose(100)
        with pytest.raises(RdmaOwnerLost, match="can no longer be reached"):
            buffer.read_into(bytearray(SIZE), timeout=30).get(timeout=WAIT)
        with pytest.raises(RdmaOwnerLost):
            buffer.write_from(b"x").get(timeout=WAIT)


@in_namespaces
@pytest.mark.slow
def test_behind_a_firewall_it_is_carried(net: Network, tmp_path: Path) -> None:
    (host,) = net.hosts
    with far_host(net, tmp_path) as partner:
        host._filter("add rule inet faults inbound tcp dport != 26600 tcp flags syn drop\n")
        check(partner, "a", "carried by the agents .*no direct connection to .*timed out.*")


@in_namespaces
@pytest.mark.slow
def test_an_outage_loses_nothing(net: Network, tmp_path: Path) -> None:
    (host,) = net.hosts
    with far_host(net, tmp_path) as partner:
        buffer = check(partner, "a", f"TCP to {host.address}")
        content = partner.look.call_one("a").get(timeout=WAIT)
        into = [bytearray(SIZE) for _ in range(4)]
        host.lose(100)
        reads = [buffer.read_into(place) for place in into]
        with pytest.raises(TimeoutError):
            reads[-1].get(timeout=TIMEOUT / 4)
        host.heal()
        for future in reads:
            future.get(timeout=WAIT)
        assert into == [content] * 4
