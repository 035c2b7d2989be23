"""Jobs on a real Ray cluster of two nodes, each in a process namespace of this machine."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.job import RayJob
from tests.integration.jobs.launched import LOOPBACK, WAIT, Worker, in_arguments, pids, until

START = 90.0  # seconds for the nodes of Ray
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
OPTIONS = [
    *("--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=0", "--disable-usage-stats"),
    *("--object-store-memory=80000000", "--block"),
]
if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray (pip install 'pymonarch[ray]')", allow_module_level=True)


class Cluster:
    """The nodes of Ray, by name. `kill` ends all processes of one, like a loss of power."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{port}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *place: str) -> None:
        command = [shutil.which("ray") or f"{Path(sys.executable).parent}/ray", "start"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                [*NAMESPACE, *command, *place, f"--node-name={name}", *OPTIONS],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def has_started(self, name: str) -> bool:
        log = (self.folder / f"{name}.log").read_text()
        assert self.nodes[name].poll() is None, log
        return "Ray runtime started" in log

    def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        node.kill()
        node.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    probe = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("needs process namespaces (root), to end the nodes of Ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # (The paths of Ray's sockets must be short.)
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        # A cluster that checks tokens, whether or not the user who runs the tests has one.
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(32))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        cluster = Cluster(Path(folder), port)
        try:
            place = [f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
            cluster.start("a", "--head", *place)
            until(lambda: cluster.has_started("a"), START)
            cluster.start("b", f"--address={cluster.address}")
            until(lambda: cluster.has_started("b"), START)
            yield cluster
        finally:
            for name in list(cluster.nodes):
                cluster.kill(name)


def described(cluster: Cluster, meshes: dict[str, int], **options: Any) -> RayJob:
    return RayJob(meshes, cluster.address, address=LOOPBACK, **options)


@pytest.mark.slow
def test_a_host_on_each_node(cluster: Cluster, killed: Any) -> None:
    job = killed(described(cluster, {"a": 1, "b": 1}))
    state = job.state(cached_path=None)
    secret = Path(job._folder, "secret").read_bytes().strip()
    a = state.a.spawn_procs().spawn("a", Worker)
    b = state.b.spawn_procs().spawn("b", Worker)
    nodes = {mesh.namespace.call_one().get(timeout=WAIT) for mesh in (a, b)}
    assert len(nodes) == 2
    assert a.variable.call_one("MONARCH_JOB_SECRET").get(timeout=WAIT) is None
    assert in_arguments(secret) == []
    job.kill()
    logs = [path for path in cluster.folder.rglob("*") if path.is_file() and "log" in str(path)]
    assert len(logs) > 5
    assert [path for path in logs if secret in path.read_bytes()] == []


def test_the_placement_group_ends_with_the_job(cluster: Cluster, killed: Any) -> None:
    """Each job needs all of the cluster."""
    for _ in range(2):
        job = killed(described(cluster, {"a": 2}))
        assert len(pids(job.state(cached_path=None).a)) == 2
        job.kill()


SCRIPT = """
import os, sys
from monarch.job import RayJob
job = RayJob({"a": 2}, sys.argv[1], address="tcp://127.0.0.1:0")
job.state(cached_path=None).a.initialized.get(timeout=60)
os.kill(os.getpid(), 9)
"""


def test_a_killed_script_leaves_nothing(cluster: Cluster, killed: Any) -> None:
    command = [sys.executable, "-c", SCRIPT, cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    job = killed(described(cluster, {"a": 2}))  # waits until Ray has its resources again
    job.apply()


def test_resources_that_the_cluster_has_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch.job.ray._PLACEMENT", 0.01)
    job = described(cluster, {"a": 1}, num_gpus=1, resources={"tpu": 2})
    with pytest.raises(RuntimeError) as error:
        job.state(cached_path=None)
    text = str(error.value)
    assert "Ray did not place 1 hosts of CPU 1, GPU 1, tpu 2 each (STRICT_SPREAD)" in text
    assert "the cluster has 2 nodes" in text
    assert "\n" not in text


def test_a_worker_that_cannot_start(cluster: Cluster) -> None:
    job = described(cluster, {"a": 1}, python_exe="no-such-python", job_start_timeout=60.0)
    with pytest.raises(RuntimeError, match=r"rank 0: .*no-such-python") as error:
        job.state(cached_path=None)
    assert "\n" not in str(error.value)


def test_an_actor_that_is_lost_before_its_report(cluster: Cluster) -> None:
    """There is no wait for `job_start_timeout`."""
    job = described(cluster, {"a": 2}, python_exe="sh -c 'kill -9 $PPID'")
    with pytest.raises(
        RuntimeError, match=r"rank [01, ]+ ended before .* rank \d was lost"
    ) as error:
        job.state(cached_path=None)
    assert "\n" not in str(error.value)


def test_a_node_that_is_lost_is_the_failure_of_its_host(
    cluster: Cluster, killed: Any, faults: list[Any]
) -> None:
    """The last test of the cluster."""
    job = killed(described(cluster, {"a": 2}))
    hosts = job.state(cached_path=None).a
    workers = hosts.spawn_procs().spawn("workers", Worker)
    workers.pid.call().get(timeout=WAIT)
    cluster.kill("b")
    until(lambda: faults)
    until(lambda: "ended" in job._lost())
    assert not job.can_run(described(cluster, {"a": 2}))


def test_no_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(RuntimeError, match=f"no Ray cluster answers at {address}") as error:
        RayJob({"a": 1}, address).state(cached_path=None)
    assert "\n" not in str(error.value)


def test_a_cluster_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"did not start within 1 s") as error:
            RayJob({"a": 1}, address, job_start_timeout=1.0).state(cached_path=None)
    assert "\n" not in str(error.value)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'pymonarch\[ray\]'"):
        RayJob({"a": 1})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "APART"}, "strategy must be one of STRICT_SPREAD, SPREAD"),
        ({"ray_address": "ray://head:10001"}, "joins the cluster as a driver"),
        ({"num_gpus": -1}, "a host cannot have GPU -1"),
        ({"resources": {"tpu": "2"}}, "a host cannot have tpu '2'"),
        ({"num_cpus": 0}, "a host must reserve something"),
    ],
)
def test_impossible_arguments(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RayJob({"a": 1}, **options)
