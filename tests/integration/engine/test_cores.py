"""Processes of a mesh share the cores of their host, whatever computes in whatever thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch.actor import (
    Actor,
    BootstrapCommand,
    HostMesh,
    SupervisionError,
    Supervisor,
    endpoint,
    this_host,
)

pytestmark = pytest.mark.torch
WAIT = 60.0
CORES = len(os.sched_getaffinity(0))
NAME = "OMP_NUM_THREADS"


def compute(found: dict[str, Any]) -> None:
    """Count the threads that a matrix product (MKL) and a function (OpenMP) take."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task")) - before + 1

    before = len(os.listdir("/proc/self/task"))
    square = torch.rand(400, 400)
    for _ in range(3):
        square = square @ square
    found["product"] = threads()
    for _ in range(3):
        torch.rand(1_000_000).sin()
    found["function"] = threads()
    found["torch"] = torch.get_num_threads()


class Computes(Actor):
    @endpoint
    def show(self) -> dict[str, Any]:
        """Return the number of threads in all ways, found in a thread of the program's own."""
        found: dict[str, Any] = {}
        thread = threading.Thread(target=compute, args=(found,))
        thread.start()
        thread.join()
        child = [sys.executable, "-c", f"import os; print(os.environ.get({NAME!r}))"]
        found["child"] = int(subprocess.run(child, capture_output=True, check=True).stdout)
        return found

    @endpoint
    def spawn(self, count: int) -> list[dict[str, Any]]:
        return shown(this_host(), count)

    @endpoint
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def shown(hosts: HostMesh, count: int, **options: Any) -> list[dict[str, Any]]:
    procs = hosts.spawn_procs({"gpus": count}, **options)
    found = list(procs.spawn("computes", Computes).show.call().get(timeout=WAIT).values())
    procs.stop().get(timeout=WAIT)
    return found


def each(count: int, threads: int) -> list[dict[str, Any]]:
    names = ("product", "function", "torch", "child")
    return [dict.fromkeys(names, threads)] * count


@pytest.fixture
def local() -> HostMesh:
    return this_host()


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)


def test_meshes_of_different_sizes(local: HostMesh) -> None:
    """The second and the third come from a process that has loaded torch already."""
    for count in (CORES, 1, CORES, 2 * CORES):
        assert shown(local, count) == each(count, max(1, CORES // count))


def test_a_mesh_of_a_process_of_a_mesh(local: HostMesh) -> None:
    procs = local.spawn_procs({"gpus": CORES})
    found = procs.slice(gpus=0).spawn("computes", Computes).spawn.call_one(1).get(timeout=WAIT)
    assert found == each(1, CORES)
    procs.stop().get(timeout=WAIT)


@pytest.mark.failures
def test_a_process_that_replaces_another(local: HostMesh) -> None:
    procs = local.spawn_procs({"gpus": CORES})
    supervisor = Supervisor()
    mesh = supervisor.spawn(procs, "computes", Computes)
    mesh.slice(gpus=0).end.broadcast()
    with pytest.raises(SupervisionError):
        mesh.slice(gpus=0).show.call_one().get(timeout=WAIT)
    supervisor.healthy.get(timeout=WAIT)
    assert list(mesh.show.call().get(timeout=WAIT).values()) == each(CORES, 1)
    procs.stop().get(timeout=WAIT)


def test_a_process_that_is_bound(local: HostMesh) -> None:
    core = str(min(os.sched_getaffinity(0)))
    assert shown(local, 1, proc_bind=[{"cpus": core}]) == each(1, 1)


def test_what_the_user_sets_wins(local: HostMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "1")
    assert shown(local, 1) == each(1, 1)


def test_an_executed_process(local: HostMesh) -> None:
    command = BootstrapCommand(
        sys.executable, None, ["-m", "monarch._src.actor.bootstrap_main"], {}
    )
    assert shown(local, CORES, bootstrap_command=command) == each(CORES, 1)
    assert shown(local, 1, bootstrap_command=command) == each(1, CORES)
    command = command.with_env({NAME: "1"})
    assert shown(local, 1, bootstrap_command=command) == each(1, 1)
