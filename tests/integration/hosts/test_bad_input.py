"""Hosts that cannot be attached: the error names host and reason within the configured time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch.actor import Actor, SupervisionError, Supervisor, attach_to_workers, endpoint
from monarch.config import configured
from tests.network import network, unavailable
from tests.ports import free_port

WAIT = 60.0
REASON = unavailable()

WORKER = """
import sys
{before}
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def clock(self) -> float:
        return time.time()

    @endpoint
    def exit(self, code: int) -> None:
        os._exit(code)


@pytest.fixture(autouse=True)
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("a secret of the tests, and of nobody else\n")
    path.chmod(0o600)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))


@pytest.fixture(autouse=True)
def faults() -> Iterator[list[Any]]:
    found: list[Any] = []
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = found.append
    yield found
    monarch.actor.unhandled_fault_hook = before


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[str, subprocess.Popen[bytes]]]]:
    """Yield a function that starts a worker after some lines of code; end the workers later."""
    started: list[subprocess.Popen[bytes]] = []

    def make(before: str = "", **environ: str) -> tuple[str, subprocess.Popen[bytes]]:
        port = free_port()
        address = f"tcp://127.0.0.1:{port}"
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER.format(before=before), address],
            env={**os.environ, **environ},
        )
        started.append(process)
        deadline = time.monotonic() + WAIT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return address, process
            assert process.poll() is None
            assert time.monotonic() < deadline

    yield make
    for process in started:
        process.kill()
        process.wait()


def refusal(*addresses: str) -> str:
    """Return the error of attaching; it comes within the configured second, not a minute."""
    started = time.monotonic()
    with configured(mesh_attach_config_timeout="1s"):
        hosts = attach_to_workers(ca="trust_all_connections", workers=list(addresses))
        with pytest.raises(RuntimeError, match="attach failed") as error:
            hosts.initialized.get(timeout=WAIT)
    assert time.monotonic() - started < WAIT / 2
    hosts.stop().get(timeout=WAIT)
    return str(error.value)


def test_nobody_listens(tmp_path: Path) -> None:
    address = f"tcp://localhost:{free_port()}"
    path = f"ipc://{tmp_path}/none"
    said = refusal(address, path)
    assert "no connection to 2 host(s)" in said
    assert f"\n  - {address}: Connection refused" in said  # the address as the program wrote it
    assert f"\n  - {path}: No such file or directory" in said


@pytest.mark.skipif(REASON is not None, reason=f"no networks here: {REASON}")
def test_nothing_comes_back() -> None:
    with network(1) as made:
        made.hosts[0].lose(100)
        address = f"tcp://{made.hosts[0].address}:4444"
        assert re.search(rf"{address}: (timed out|no connection .* for 1 s)", refusal(address))


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(RuntimeError, match="invalid worker address") as error:
        attach_to_workers(ca="trust_all_connections", workers=["tcp://no-such-host.invalid:1"])
    assert "failed to resolve hostname 'no-such-host.invalid'" in str(error.value)
    assert str(error.value).count("invalid worker address") == 1


def test_an_address_that_is_taken(start: Any) -> None:
    address, _ = start()
    done = subprocess.run(
        [sys.executable, "-c", WORKER.format(before=""), address],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 1
    assert "Address already in use" in done.stderr
    assert address.rpartition(":")[2] in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            "runtime.admission.handshake_io as it; it.python_version = lambda: (3, 99)",
            "runs Python 3.99, this",
        ),
        ("protocol.session.handshake as it; it.VERSION = 99", "speaks protocol 99, this side 2"),
    ],
)
def test_another_version_is_told_before_anything_is_read(
    start: Any, before: str, said: str
) -> None:
    address, worker = start(f"import monarch._engine.{before}")
    found = refusal(address)
    assert f"- {address}: the worker {said}" in found
    assert worker.poll() is None


def test_clocks_that_differ(start: Any, tmp_path: Path, faults: list[Any]) -> None:
    """Clocks that are a year off, either way, affect only the times in reports."""
    for number, off in enumerate((-31_536_000, 31_536_000)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            f"import time\nreal = time.time\ntime.time = lambda: real() + {off}\n"
        )
    paths = [f"{tmp_path / str(n)}:{os.environ.get('PYTHONPATH', '')}" for n in range(2)]
    (first, _), (second, _) = (start(PYTHONPATH=path) for path in paths)
    hosts = attach_to_workers(ca="trust_all_connections", workers=[first, second])
    supervisor = Supervisor()
    workers = supervisor.spawn(hosts.spawn_procs(), "workers", Worker)
    early, late = workers.clock.call().get(timeout=WAIT).values()
    assert late - early > 6e7
    with pytest.raises(SupervisionError, match="code 3"):
        workers.slice(hosts=1).exit.call_one(3).get(timeout=WAIT)
    supervisor.healthy.get(timeout=WAIT)
    assert len(workers.pid.call().get(timeout=WAIT).values()) == 2
    hosts.stop().get(timeout=WAIT)
    assert not faults


def test_a_worker_that_hangs_up_in_the_handshake() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the test is over
                while True:
                    sock, _ = door.accept()
                    with sock:
                        sock.recv(64)

        thread = threading.Thread(target=hang_up)
        thread.start()
        address = f"tcp://127.0.0.1:{door.getsockname()[1]}"
        said = refusal(address)
        door.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert f"{address}: it closed the connection during the handshake" in said


def failure(workers: Any) -> str | None:
    try:
        workers.pid.call_one().get(timeout=WAIT)
    except SupervisionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_a_worker_that_dies_while_it_is_attached(
    start: Any, faults: list[Any], delay: float
) -> None:
    """Whenever a worker is killed, the errors of its hosts mesh and of its procs name it."""
    address, worker = start()
    with configured(mesh_attach_config_timeout="1s"):
        hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
        workers = hosts.spawn_procs().spawn("worker", Worker)
        call = workers.pid.call_one()
        time.sleep(delay)  # the moment is under test
        worker.send_signal(signal.SIGKILL)
        with contextlib.suppress(RuntimeError):  # the worker had been attached
            hosts.initialized.get(timeout=WAIT)
        with contextlib.suppress(SupervisionError):
            call.get(timeout=WAIT)
        deadline = time.monotonic() + WAIT
        while (why := failure(workers)) is None:
            assert time.monotonic() < deadline
        assert re.search("unreachable|connection", why)
        hosts.stop().get(timeout=WAIT)
