"""`attach`: a client that reaches one worker reaches the others through it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from monarch.security import make_certificates
from tests.network import network, unavailable

from .conftest import Place, free_address, make_secret, until

REASON = unavailable()


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"no networks here: {REASON}")
def test_hosts_that_only_the_gateway_reaches(place: Place) -> None:
    with network(3) as made:
        _, *inner = made.hosts
        for host in inner:
            host._filter(f"add rule inet faults inbound ip saddr {made.address} drop")
        addresses = [f"tcp://{host.address}:26600" for host in made.hosts]
        for host, address in zip(made.hosts, addresses, strict=True):
            place.worker(address, lambda command, h=host, **more: h.start(*command, **more))
        with pytest.raises(TimeoutError):
            socket.create_connection((inner[0].address, 26600), timeout=0.2)
        client = place.client()
        assert client(f"attach({addresses[0]!r})") is None
        assert len(client(f"to(*{addresses})")) == 3
        for size in (1, 100_000, 5_000_000):
            assert client(f"echoes({size})")
        between = "echos.slice(hosts=1).ask.call_one(echos.slice(hosts=2), 'x').get(timeout=60)"
        assert client(between) == "x"
        assert client("this_host().spawn_procs().spawn('own', Echo).echo.call_one(1).get()") == 1
        relayed = {record["to"] for record in place.records(place.started[0], "relayed")}
        assert relayed == set(addresses[1:])
        assert client("hosts.stop().get(timeout=60)") is None
        place.close()


@pytest.mark.failures
def test_the_connection_is_lost_and_made_again(place: Place) -> None:
    """A relay that is killed loses no message; a killed gateway loses the hosts behind it."""
    place.environ["MONARCH_HOST_TIMEOUT"] = "2s"
    gateway, target = free_address(), free_address()
    worker = place.worker(gateway)
    place.worker(target)
    client = place.client()
    client(f"attach({gateway!r})")
    (pid,) = client(f"to({target!r})")
    os.kill(relay_of(worker), signal.SIGKILL)
    for _ in range(20):
        assert client("echoes(10_000)")
    assert client("echos.pid.call_one().get()") == pid
    assert len(place.records(worker, "relayed")) >= 2
    relay = relay_of(worker)
    worker.kill()
    lost = until(lambda: (said := client("echoes(1)")) is not True and said)
    assert lost.startswith("SupervisionError")
    until(lambda: not Path(f"/proc/{relay}").exists())


def test_a_spare_gateway_takes_the_place_of_a_lost_one(place: Place) -> None:
    """No message is lost, no process, and hosts that are attached later are reached."""
    place.environ["MONARCH_HOST_TIMEOUT"] = "20s"
    gateway, spare, target, later = (free_address() for _ in range(4))
    first, second = place.worker(gateway), place.worker(spare)
    place.worker(target)
    place.worker(later)
    client = place.client()
    wrong = client(f"attach({gateway!r}, spares=['zzz'])")
    assert wrong.startswith("RuntimeError: cannot attach through the spare zzz: ")
    assert client(f"attach({gateway!r}, spares=[{spare!r}])") is None
    (pid,) = client(f"to({target!r})")
    assert client("chat()") is True
    first.kill()
    assert client("chat()") is True
    assert client("echoes(1_000_000)") is True
    assert client("echos.pid.call_one().get()") == pid
    assert {record["to"] for record in place.records(second, "relayed")} == {target}
    assert len(client(f"to({later!r})")) == 1


def relay_of(worker: subprocess.Popen[str]) -> int:
    """Return the pid of the process that relays for this worker, once it runs."""

    def found() -> int:
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(FileNotFoundError):
                if b"relay_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return 0

    return int(until(found))


def test_with_tls_from_end_to_end(place: Place) -> None:
    client_files, worker_files = make_certificates(place.folder / "ca", ["client", "127.0.0.1"])
    place.environ.update(worker_files.environment)
    gateway, target, plain = free_address("tls"), free_address("tls"), free_address()
    worker = place.worker(gateway)
    place.worker(target)
    client = place.client(**client_files.environment)
    assert client(f"attach({gateway!r})") is None
    assert len(client(f"to({target!r}, {gateway!r})")) == 2
    assert client("echoes(3_000_000)")
    (record,) = place.records(worker, "relayed")
    assert (record["to"], record["certificate"]) == (target, "client")
    refused = client(f"to({plain!r})")
    assert "is reached by TLS" in refused
    assert "use a tls:// address" in refused


def test_what_cannot_be(place: Place, tmp_path: Path) -> None:
    gateway, nobody = free_address(), free_address()
    place.worker(gateway)
    client = place.client(HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT="1s")
    assert client("attach('zzz')").startswith("RuntimeError: cannot attach through zzz: invalid")
    assert "refused" in client(f"attach({nobody!r})")
    assert client(f"attach({gateway!r})") is None
    assert client(f"attach({gateway!r})") is None
    other = client(f"attach({nobody!r})")
    assert other.startswith(f"RuntimeError: client is already attached through {gateway}, not")
    behind = client(f"to({nobody!r})")
    assert f"{nobody}: the gateway" in behind
    assert "cannot connect to it: Connection refused" in behind
    name = client("to('tcp://no-such-name.invalid:1')")
    assert "the gateway" in name
    assert "cannot connect to it" in name
    late = place.client()
    late("bool(context())")
    assert late(f"attach({gateway!r})").startswith(
        "RuntimeError: client was initialized without a remote attachment"
    )
    other_secret = make_secret(tmp_path, "other")
    stranger = place.client(MONARCH_SECRET_FILE=str(other_secret))
    assert "another secret" in stranger(f"attach({gateway!r})")
