"""Programs on several hosts: worker loops of this machine, over TCP and Unix sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from monarch.actor import (
    Actor,
    ActorError,
    HostMesh,
    SupervisionError,
    Supervisor,
    attach_to_workers,
    current_rank,
    endpoint,
    this_host,
)
from tests.ports import free_port

WAIT = 60.0

WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def ask(self, others: Any, value: Any) -> list[Any]:
        found: list[Any] = others.echo.call(value).get(timeout=WAIT).values()
        return found

    @endpoint
    def spawn(self) -> int:
        """Return the pid of the parent of a process that this actor spawns on its own host."""
        child = this_host().spawn_procs().spawn("child", Parent)
        found: int = child.parent.call_one().get(timeout=WAIT)
        return found

    @endpoint
    def host(self) -> HostMesh:
        return this_host()

    @endpoint
    def exit(self, code: int) -> None:
        os._exit(code)


class Parent(Actor):
    @endpoint
    def parent(self) -> int:
        return os.getppid()


class Elsewhere(Actor):
    """An actor that owns an actor on the given hosts."""

    def __init__(self, hosts: HostMesh) -> None:
        self.worker = hosts.spawn_procs().spawn("elsewhere", Worker)

    @endpoint
    def echo(self, value: Any) -> Any:
        return self.worker.echo.call_one(value).get(timeout=WAIT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[str, subprocess.Popen[bytes]]]]:
    """Yield a function that starts worker loops; end them after the test."""
    started: list[subprocess.Popen[bytes]] = []
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def make(address: str | None = None, **environ: str) -> tuple[str, subprocess.Popen[bytes]]:
        address = address or f"tcp://127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            [sys.executable, str(script), address], env={**os.environ, **environ}
        )
        started.append(process)
        return address, process

    yield make
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a separate secret for each test and all processes that it starts."""
    path = tmp_path / "secret"
    path.write_text("a secret of the tests, and of nobody else\n")
    path.chmod(0o600)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))
    return str(path)


@pytest.fixture(autouse=True)
def faults() -> Iterator[list[Any]]:
    found: list[Any] = []
    before = monarch.actor.unhandled_fault_hook
    monarch.actor.unhandled_fault_hook = found.append
    yield found
    monarch.actor.unhandled_fault_hook = before


@contextlib.contextmanager
def attached(*addresses: str) -> Iterator[HostMesh]:
    hosts = attach_to_workers(ca="trust_all_connections", workers=list(addresses))
    try:
        hosts.initialized.get(timeout=WAIT)
        yield hosts
    finally:
        hosts.stop().get(timeout=WAIT)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_one_program_on_two_hosts(start: Any) -> None:
    """Placement, calls in all directions, slices, payloads of all sizes, spawning on a worker."""
    (first, one), (second, two) = start(), start(f"ipc://@monarch-test-{os.getpid()}")
    with attached(first, second) as hosts:
        assert dict(hosts.extent.items()) == {"hosts": 2}
        procs = hosts.spawn_procs({"gpus": 2})
        workers = procs.spawn("workers", Worker)
        assert workers.rank.call().get(timeout=WAIT).values() == [0, 1, 2, 3]
        pids = workers.pid.call().get(timeout=WAIT).values()
        ancestors = [ancestor(pid, {one.pid, two.pid}) for pid in pids]
        assert ancestors == [one.pid, one.pid, two.pid, two.pid]
        local = this_host().spawn_procs().spawn("local", Worker)
        there = workers.slice(hosts=1)
        here = workers.slice(hosts=0, gpus=0)
        assert here.ask.call_one(there, 5).get(timeout=WAIT) == [5, 5]  # between workers
        assert local.ask.call_one(workers, 6).get(timeout=WAIT) == [6] * 4
        assert here.ask.call_one(local, 7).get(timeout=WAIT) == [7]  # back to the client's host
        for size in (0, 1, 70_000, 300_000, 20_000_000):
            data = os.urandom(size)
            assert here.echo.call_one(data).get(timeout=WAIT) == data
            assert here.ask.call_one(there, data).get(timeout=WAIT) == [data, data]
        child = here.spawn.call_one().get(timeout=WAIT)
        assert ancestor(child, {one.pid, two.pid}) == one.pid
        local._proc_mesh.stop().get(timeout=WAIT)


def ancestor(pid: int, known: set[int]) -> int:
    while pid not in known:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1
    return pid


def test_order_and_exactly_once_under_many_messages(start: Any) -> None:
    address, _ = start()
    with attached(address) as hosts:
        worker = hosts.spawn_procs().spawn("worker", Worker)
        sent = [worker.echo.call_one((n, bytes(n % 5000))) for n in range(2000)]
        assert [future.get(timeout=WAIT)[0] for future in sent] == list(range(2000))


def test_numpy_arrays_arrive_writable(start: Any) -> None:
    numpy = pytest.importorskip("numpy")
    address, _ = start()
    with attached(address) as hosts:
        worker = hosts.spawn_procs().spawn("worker", Worker)
        array = numpy.arange(3_000_000.0)
        back = worker.echo.call_one({"a": array, "b": 1}).get(timeout=WAIT)["a"]
        assert (back == array).all()
        back[0] = 7
        assert array[0] == 0


@pytest.mark.torch
def test_storages_of_torch_cross_hosts(start: Any) -> None:
    torch = pytest.importorskip("torch")
    (first, _), (second, _) = start(), start()
    with attached(first, second) as hosts:
        workers = hosts.spawn_procs().spawn("workers", Worker)
        here, there = workers.slice(hosts=0), workers.slice(hosts=1)
        for count in (3, 300_000):
            tensor = torch.arange(count)
            value = {"storage": tensor.untyped_storage(), "tensors": (tensor, tensor[1:])}
            [back] = here.ask.call_one(there, value).get(timeout=WAIT)
            found = torch.empty(0, dtype=torch.int64).set_(back["storage"])
            assert torch.equal(found, tensor)
            assert torch.equal(back["tensors"][0], tensor)
            assert torch.equal(back["tensors"][1], tensor[1:])
            found.fill_(1)
            assert tensor[2] == 2


def test_payloads_of_any_size_cross_hosts(start: Any) -> None:
    """Payloads in one piece or many, alone or concurrently; the buffers in them stay aligned."""
    numpy = pytest.importorskip("numpy")
    address, _ = start()
    chance = numpy.random.default_rng(1)
    sizes = [1, 70_000, 1 << 18, (1 << 20) - 100, 1 << 20, (1 << 20) + 1, 5_000_001]
    values = [chance.integers(0, 256, size, numpy.uint8) for size in sizes]
    with attached(address) as hosts:
        worker = hosts.spawn_procs().spawn("worker", Worker)
        for _ in range(2):  # the second round reuses the segments
            futures = [worker.echo.call_one(value) for value in values]
            for value, future in zip(values, futures, strict=True):
                back = future.get(timeout=WAIT)
                assert (back == value).all()
                if value.size >= 70_000:
                    assert back.ctypes.data % 64 == 0
            together = worker.echo.call_one([b"x" * 3_000_000, values]).get(timeout=WAIT)
            assert together[0] == b"x" * 3_000_000
            assert all(map(numpy.array_equal, together[1], values))


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_ends_there_is_known_here(start: Any, faults: list[Any], code: int) -> None:
    address, _ = start()
    with attached(address) as hosts:
        procs = hosts.spawn_procs({"gpus": 2})
        workers = procs.spawn("workers", Worker)
        workers.pid.call().get(timeout=WAIT)
        with pytest.raises(SupervisionError) as error:
            workers.slice(gpus=1).exit.call_one(code).get(timeout=WAIT)
        said = "exited cleanly" if code == 0 else "exited with non-zero code 3"
        assert said in str(error.value)
        assert workers.slice(gpus=0).echo.call_one(1).get(timeout=WAIT) == 1
        if code:
            until(lambda: faults)


def test_a_restart_on_another_host(start: Any) -> None:
    address, _ = start()
    with attached(address) as hosts:
        supervisor = Supervisor()
        workers = supervisor.spawn(hosts.spawn_procs({"gpus": 2}), "workers", Worker)
        before = workers.pid.call().get(timeout=WAIT).values()
        with pytest.raises(SupervisionError):
            workers.slice(gpus=1).exit.call_one(1).get(timeout=WAIT)
        supervisor.healthy.get(timeout=WAIT)
        after = workers.pid.call().get(timeout=WAIT).values()
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]


def test_a_worker_that_is_killed_takes_its_procs_with_it(start: Any, faults: list[Any]) -> None:
    (lost, victim), (kept, _) = start(), start()
    with attached(lost, kept) as hosts:
        workers = hosts.spawn_procs().spawn("workers", Worker)
        pids = workers.pid.call().get(timeout=WAIT).values()
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(SupervisionError, match=r"unreachable|connection|ended"):
            until(lambda: workers.slice(hosts=0).echo.call_one(1).get(timeout=WAIT) and False)
        assert workers.slice(hosts=1).echo.call_one(2).get(timeout=WAIT) == 2
        until(lambda: not Path(f"/proc/{pids[0]}").exists())
        until(lambda: faults)


def test_shutdown_ends_the_worker_loop_with_status_0(start: Any) -> None:
    address, worker = start()
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    actors = hosts.spawn_procs().spawn("worker", Worker)
    pid = actors.pid.call_one().get(timeout=WAIT)
    hosts.shutdown().get(timeout=WAIT)
    assert worker.wait(WAIT) == 0
    until(lambda: not Path(f"/proc/{pid}").exists())
    for use in (hosts.spawn_procs, hosts.slice(hosts=0).spawn_procs, hosts.initialized.get):
        with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
            use()


def test_what_the_program_ends_is_no_failure_by_whatever_handle_it_was_made(
    start: Any, faults: list[Any]
) -> None:
    (lost, worker), (kept, _) = start(), start()
    with attached(kept) as others:
        hosts = attach_to_workers(ca="trust_all_connections", workers=[lost])
        again = attach_to_workers(ca="trust_all_connections", workers=[lost])
        here = hosts.spawn_procs().spawn("here", Worker).host.call_one().get(timeout=WAIT)
        received = here.spawn_procs().spawn("received", Worker)
        shared = again.spawn_procs().spawn("shared", Worker)
        parent = others.spawn_procs().spawn("parent", Elsewhere, here)
        for mesh in (received, shared, parent):
            assert mesh.echo.call_one(1).get(timeout=WAIT) == 1

        hosts.shutdown().get(timeout=WAIT)

        assert worker.wait(WAIT) == 0
        for mesh in (received, shared, parent):
            ended = r"selective drain|was (released|shut down)"
            with pytest.raises((SupervisionError, ActorError), match=ended):
                mesh.echo.call_one(1).get(timeout=WAIT)
        with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
            here.spawn_procs()
    assert not faults


def test_two_meshes_on_the_same_workers(start: Any) -> None:
    address, worker = start()
    with attached(address) as kept:
        stays = kept.spawn_procs().spawn("stays", Worker)
        with attached(address) as hosts:
            goes = hosts.spawn_procs().spawn("goes", Worker)
            assert goes.echo.call_one(1).get(timeout=WAIT) == 1
        assert stays.echo.call_one(2).get(timeout=WAIT) == 2
        with pytest.raises(SupervisionError):
            goes.echo.call_one(1).get(timeout=WAIT)
    with attached(address) as hosts:  # attach once more
        again = hosts.spawn_procs().spawn("again", Worker)
        assert again.echo.call_one(3).get(timeout=WAIT) == 3
    assert worker.poll() is None


CLIENT = """
import os, sys
from monarch.actor import Actor, attach_to_workers, endpoint
class Worker(Actor):
    @endpoint
    def pid(self): return os.getpid()
hosts = attach_to_workers(ca="trust_all_connections", workers=sys.argv[1:])
worker = hosts.spawn_procs().spawn("worker", Worker)
print(worker.pid.call_one().get(timeout=60), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "end"])
def test_a_client_that_goes_takes_its_procs_and_leaves_the_worker(
    start: Any, tmp_path: Path, how: str
) -> None:
    address, worker = start()
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    for _ in range(2):  # the second attaches to a worker that has served before
        client = subprocess.Popen(
            [sys.executable, str(script), address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert client.stdout is not None
        assert client.stdin is not None
        pid = int(client.stdout.readline())
        assert ancestor(pid, {worker.pid}) == worker.pid
        if how == "SIGKILL":
            client.kill()
        client.stdin.close()
        client.wait(WAIT)
        client.stdout.close()
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
    assert worker.poll() is None


@pytest.mark.failures
def test_another_secret_is_refused(start: Any, tmp_path: Path, capfd: Any) -> None:
    other = tmp_path / "other"
    other.write_text("another secret, of somebody else\n")
    other.chmod(0o600)
    address, worker = start(MONARCH_SECRET_FILE=str(other))
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    with pytest.raises(RuntimeError, match=r"attach failed(.|\n)*another secret"):
        hosts.initialized.get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="unreachable"):
        hosts.spawn_procs().spawn("worker", Worker).pid.call_one().get(timeout=WAIT)
    assert worker.poll() is None


def test_strangers_at_the_door_harm_nobody(start: Any) -> None:
    """The worker continues after noise, silent connections and a port scan."""
    port = free_port()
    start(f"tcp://127.0.0.1:{port}")
    until(lambda: can_connect(port))
    silent = socket.create_connection(("127.0.0.1", port))
    for noise in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        os.urandom(5000),
        b"monarch\x01" + bytes(200),
    ):
        stranger = socket.create_connection(("127.0.0.1", port))
        with stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(noise)
    with attached(f"tcp://127.0.0.1:{port}") as hosts:
        worker = hosts.spawn_procs().spawn("worker", Worker)
        assert worker.echo.call_one(1).get(timeout=WAIT) == 1
    silent.close()


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_bad_addresses() -> None:
    with pytest.raises(RuntimeError, match="invalid worker address"):
        attach_to_workers(ca="trust_all_connections", workers=["zzz"])
    with pytest.raises(NotImplementedError, match="TLS security plumbing"):
        attach_to_workers(ca="/etc/ca.pem", workers=["tcp://127.0.0.1:1"])
    empty = attach_to_workers(ca="trust_all_connections", workers=[])
    assert dict(empty.extent.items()) == {"hosts": 0}
    with pytest.raises(RuntimeError, match="reference instead of owned"):
        this_host().stop()
