"""The addresses that workers listen at, and those that they print for clients to dial."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch._engine.runtime.admission import public_name as names
from monarch.actor import Actor, attach_to_workers, endpoint
from monarch.tools.mesh_spec import MeshSpec
from tests.network import unavailable

WAIT = 60.0
REASON = unavailable()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no networks here: {REASON}")


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


@pytest.fixture(autouse=True)
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("a secret of the tests, and of nobody else\n")
    path.chmod(0o600)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))


@contextlib.contextmanager
def served(address: str, *before: str, pass_fds: tuple[int, ...] = ()) -> Iterator[tuple[str, str]]:
    """Run a worker; yield the address that it prints and its log up to then."""
    worker = [sys.executable, "-m", "monarch.cli", "worker", "--until-eof", address]
    with subprocess.Popen(
        [*before, *worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        words = process.stdout.readline().split()
        try:
            assert words[:1] == ["serving"], process.stderr.read()
            os.set_blocking(process.stderr.fileno(), False)
            yield words[1], process.stderr.read() or ""
        finally:
            process.stdin.close()
        assert process.wait(WAIT) == 0


def call(address: str) -> int:
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    found: int = hosts.spawn_procs().spawn("echo", Echo).echo.call_one(5).get(timeout=WAIT)
    hosts.stop().get(timeout=WAIT)
    return found


@pytest.mark.parametrize("address", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://[::]:0"])
def test_a_worker_at_all_addresses_says_one_that_can_be_dialed(address: str) -> None:
    with served(address) as (url, _):
        port = url.rpartition(":")[2]
        assert url == f"tcp://{names.own_name()}:{port}"
        assert int(port) > 0
        assert call(url) == 5
        assert call(f"tcp://127.0.0.1:{port}") == 5


def test_the_address_of_a_mesh_of_torchx_is_dialed() -> None:
    with served("tcp://127.0.0.1:0") as (url, _):
        mesh = MeshSpec("workers", 1, hostnames=["localhost"])
        (address,) = mesh.server_addrs(port=int(url.rpartition(":")[2]))
        assert call(address) == 5


def test_others_may_dial_something_else() -> None:
    with served("tcp://localhost:0@tcp://*:0") as (url, _):
        assert url.startswith("tcp://127.0.0.1:")
        assert call(url) == 5


def test_a_socket_that_was_bound_before() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with served(f"tcp://127.0.0.1:fd{sock.fileno()}", pass_fds=(sock.fileno(),)) as (url, _):
            assert url == f"tcp://127.0.0.1:{port}"
            assert call(url) == 5


def test_everywhere_is_no_place_to_dial() -> None:
    with pytest.raises(RuntimeError, match=r"invalid worker address.*dial what the worker says"):
        attach_to_workers(ca="trust_all_connections", workers=["tcp://*:4444"])


def in_namespace(script: str) -> tuple[str, ...]:
    return ("unshare", "-n", "sh", "-c", f'ip link set lo up && {script} exec "$@"', "sh")


@needs_namespaces
def test_the_default_route_leads_to_the_address_of_a_host_without_a_name() -> None:
    interface = """
    ip link add one type veth peer name two && ip address add 10.213.77.5/24 dev one &&
    ip link set one up && ip link set two up && ip route add default via 10.213.77.1 &&
    """
    with served("tcp://*:0", *in_namespace(interface)) as (url, said):
        assert url.startswith("tcp://10.213.77.5:")
        assert "no name" not in said


@needs_namespaces
def test_a_host_that_nobody_reaches_says_so() -> None:
    with served("tcp://*:0", *in_namespace("")) as (url, said):
        assert url.startswith("tcp://127.0.0.1:")
        assert "so only this machine can" in said


@needs_namespaces
def test_tcp_can_be_chosen_where_there_is_nothing_but_loopback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
from monarch.actor import Actor, enable_transport, endpoint, this_host
class Echo(Actor):
    @endpoint
    def echo(self, value): return value
enable_transport("tcp")
print(this_host().spawn_procs().spawn("echo", Echo).echo.call_one(5).get(timeout=60))
"""
    )
    done = subprocess.run(
        [*in_namespace(""), sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "5\n")


def test_a_name_that_is_of_this_machine_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = names._way_to("192.0.2.1")
    if not ours:
        pytest.skip("this machine has no route to anywhere")
    monkeypatch.setattr(socket, "gethostname", lambda: ours)
    assert names.own_name() == ours
    for other in ("localhost", "192.0.2.1", "no-such-name.invalid"):
        monkeypatch.setattr(socket, "gethostname", lambda name=other: name)
        assert names.own_name() == ours
