"""Several programs on the same workers, side by side and one after the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from monarch.security import make_certificates

from .conftest import Place, free_address, until


@pytest.mark.failures
def test_programs_do_not_notice_each_other(place: Place) -> None:
    addresses = [free_address(), free_address()]
    workers = [place.worker(address) for address in addresses]
    one, other = place.client(), place.client()
    pids = one(f"to(*{addresses})")
    theirs = other(f"to(*{addresses})")
    assert not set(pids) & set(theirs)
    assert one("echoes(100_000)")
    assert other("hosts.stop().get(timeout=60)") is None
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in theirs))
    assert one("echos.pid.call().get(timeout=60).values()") == pids
    # The client attaches again, exits without a goodbye, and attaches as another program.
    again = other(f"to(*{addresses})")
    assert other("echoes(1)")
    place.started[3].kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in again))
    assert one("echos.pid.call().get(timeout=60).values()") == pids
    third = place.client()
    assert len(third(f"to(*{addresses})")) == 2
    assert one("echoes(1)")
    assert [worker.poll() for worker in workers] == [None, None]
    # A shutdown by one client ends the workers for all clients.
    assert third("hosts.shutdown().get(timeout=60)") is None
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert one("echoes(1)").startswith("SupervisionError")
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_mesh_of_another_program_cannot_be_called(place: Place, tmp_path: Path) -> None:
    """The error for a reference from another program names the missing process."""
    address, handle = free_address(), tmp_path / "handle"
    place.worker(address)
    one, other = place.client(), place.client()
    one(f"to({address!r})")
    other(f"to({address!r})")
    one(f"open({str(handle)!r}, 'wb').write(__import__('cloudpickle').dumps(echos))")
    load = f"__import__('pickle').load(open({str(handle)!r}, 'rb'))"
    # Both at once: each is kept for some seconds, since the process might be starting.
    other(f"globals().update(asked=echos.ask.call_one({load}, 1))")
    refused = other(f"{load}.echo.call_one(1).get(timeout=60)")
    assert refused.startswith("SupervisionError")
    assert "the process does not exist" in refused
    assert "the process does not exist" in other("asked.get(timeout=60)")
    assert one("echoes(1)")


def test_a_successor_gets_a_direct_connection_of_its_own(place: Place, tmp_path: Path) -> None:
    """The predecessor was killed while it was sending on its own direct connection."""
    address = free_address()
    place.worker(address)
    environ = {
        "MONARCH_DRIVER_GRACE": "60s",
        "MONARCH_JOB_ID": "kept",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    first = place.client(**environ)
    (pid,) = first(f"to({address!r})")
    until(lambda: first("chat() and speaks_directly()"))
    first("threading.Thread(target=lambda: any(map(echos.echo.broadcast, count()))).start()")
    place.started[-1].kill()
    second = place.client(**environ)
    assert second("list(take('kept').actors)") == ["echos"]
    until(lambda: second("chat() and speaks_directly()"))
    assert second("echos.pid.call().get(timeout=60).values()") == [pid]
    assert second("shutdown_context().get(timeout=60)") is None
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_hosts_behind_a_gateway_keep_what_a_lost_machine_left(place: Place, tmp_path: Path) -> None:
    """All connections use TLS. (tests/integration/engine/test_reattach.py has the other cases.)"""
    client_files, worker_files = make_certificates(tmp_path / "ca", ["client", "127.0.0.1"])
    place.environ |= worker_files.environment
    gateway, target = free_address("tls"), free_address("tls")
    place.worker(gateway)
    place.worker(target)
    environ = {
        **client_files.environment,
        "MONARCH_DRIVER_GRACE": "60s",
        "MONARCH_JOB_ID": "kept",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    first = place.client(**environ)
    first(f"attach({gateway!r})")
    (pid,) = first(f"to({target!r})")
    process = place.started[-1]
    agent = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    os.kill(agent, signal.SIGKILL)
    process.kill()
    process.wait()
    second = place.client(**environ)
    second(f"attach({gateway!r})")
    found = second(f"list(take('kept', workers=[{target!r}], timeout=60).actors)")
    assert found == ["echos"]
    assert second("echos.pid.call().get(timeout=60).values()") == [pid]
    assert second("echoes(100_000)")
    assert second("shutdown_context().get(timeout=60)") is None
    until(lambda: not Path(f"/proc/{pid}").exists())
