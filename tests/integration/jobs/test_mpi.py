"""Jobs of a real ``mpirun``, with several "hosts" of this machine behind a stand-in for ssh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch.job import MPIJob
from monarch.job.mpi import mpi_options
from tests.integration.jobs.launched import (
    LOOPBACK,
    WAIT,
    Worker,
    in_arguments,
    marked,
    until,
)
from tests.ports import free_port

REMOTE_SHELL = """#!/bin/bash
# Runs a command for a "host" on this machine.
while [[ $1 == -* ]]; do shift; done
export HOST_OF_THE_TEST=$1; shift
# With a name of its own: daemons of MPI on one host share files, and remove each other's.
exec setsid unshare --uts bash -c "hostname $HOST_OF_THE_TEST; $*"
"""


def lacks() -> str:
    """Return what this machine lacks for a real mpirun; an empty string if nothing."""
    if shutil.which("mpirun") is None:
        return "needs mpirun (Debian: openmpi-bin)"
    if shutil.which("hostname") is None:
        return "needs hostname (Debian: hostname)"
    try:
        subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "needs namespaces for names of hosts (root)"
    return ""


needs_mpi = pytest.mark.skipif(bool(lacks()), reason=lacks())


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return f"OF_THE_TEST={tmp_path}"


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """Return options of mpirun for hosts of any names."""
    agent = tmp_path / "remote-shell"
    agent.write_text(REMOTE_SHELL)
    agent.chmod(0o700)
    options = ["--mca", "plm_rsh_agent", str(agent), "--mca", "plm_rsh_no_tree_spawn", "1"]
    # Its own directory: that of an aborted mpirun would stay in the system's.
    options += ["--mca", "orte_tmpdir_base", str(tmp_path)]
    return [*(["--allow-run-as-root"] if os.geteuid() == 0 else []), *options]


def described(mark: str, own: list[str], hosts: str, meshes: dict[str, int]) -> MPIJob:
    name, _, value = mark.partition("=")
    args = [*own, "--host", hosts]
    return MPIJob(meshes, mpi_args=args, env={name: value}, address=LOOPBACK)


@needs_mpi
def test_a_worker_on_each_host(mark: str, own: list[str], killed: Any) -> None:
    job = killed(described(mark, own, "node0,node1,node2", {"a": 2, "b": 1}))
    state = job.state(cached_path=None)
    a = state.a.spawn_procs().spawn("a", Worker)
    b = state.b.spawn_procs().spawn("b", Worker)
    hosts = [
        host
        for mesh in (a, b)
        for host in mesh.variable.call("HOST_OF_THE_TEST").get(timeout=WAIT).values()
    ]
    assert hosts == ["node0", "node1", "node2"]
    secret = Path(job._folder, "secret").read_bytes().strip()
    assert in_arguments(secret) == []
    job.kill()
    assert marked(mark) == []


@needs_mpi
def test_a_lost_daemon_of_mpi_leaves_no_worker(
    mark: str, own: list[str], killed: Any, faults: list[Any]
) -> None:
    """MPI itself does not end the processes of a daemon that is killed."""
    job = killed(described(mark, own, "node0,node1", {"a": 2}))
    job.state(cached_path=None).a.initialized.get(timeout=WAIT)
    daemons = [pid for pid in marked(mark) if name_of(pid) == "orted"]
    assert len(daemons) == 2
    os.kill(daemons[0], signal.SIGKILL)
    until(lambda: not marked(mark))
    with pytest.raises(RuntimeError, match=r"lost connection to the hosts: `mpirun` ended"):
        job.state(cached_path=None)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@needs_mpi
def test_a_host_that_cannot_be_reached(mark: str, own: list[str], tmp_path: Path) -> None:
    (tmp_path / "remote-shell").write_text("#!/bin/sh\necho no route to $1 >&2; exit 255\n")
    job = described(mark, own, "node0,node1", {"a": 2})
    with pytest.raises(
        RuntimeError, match=r"`mpirun` ended with status .* no route to node"
    ) as error:
        job.state(cached_path=None)
    assert "\n" not in str(error.value)
    until(lambda: not marked(mark))


def test_no_mpirun(mark: str) -> None:
    with pytest.raises(RuntimeError, match=r"`mpirunn --version` cannot be run.*openmpi-bin"):
        MPIJob({"a": 1}, mpirun="mpirunn").apply()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo 'Fortran 77'", "names no MPI that MPIJob knows .*: Fortran 77; use LauncherJob"),
        ("exit 0", "names no MPI that MPIJob knows .*: it says nothing"),
        ("echo 'no license'; exit 9", "ended with status 9 and said: no license"),
        ("while :; do sleep 0.1; done", "did not end within 0.3 s"),
    ],
)
def test_a_command_that_is_no_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, text: str
) -> None:
    monkeypatch.setattr("monarch.job.mpi._VERSION_LIMIT", 0.3 if "while" in script else WAIT)
    command = tmp_path / "mpirun"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o700)
    with pytest.raises(RuntimeError, match=text) as error:
        MPIJob({"a": 1}, mpirun=str(command)).apply()
    assert "\n" not in str(error.value)


def test_the_placement_of_the_user_wins() -> None:
    version, own = "mpirun (Open MPI) 5.0.1", ["--map-by", "slot", "--bind-to", "core"]
    assert mpi_options("mpirun", version, 2, ["A"], own) == ["-np", "2", "-x", "A"]
    options = mpi_options("mpiexec", "Intel(R) MPI Library", 2, ["A", "B"], [])
    assert options == ["-n", "2", "-ppn", "1", "-genvlist", "A,B"]


SCRIPT = """
import os, sys
from monarch.actor import Actor, endpoint
from monarch.job import NodesJob

class Worker(Actor):
    @endpoint
    def rank(self):
        return os.environ["OMPI_COMM_WORLD_RANK"], os.environ.get("MONARCH_JOB_SECRET")

job = NodesJob.from_environment({"a": 1, "b": 2})
state = job.state(cached_path=None)
for mesh in (state.a, state.b):
    print(mesh.spawn_procs().spawn("workers", Worker).rank.call().get(timeout=60).values())
if sys.argv[1:] == ["kill"]:
    job.kill()
if sys.argv[1:] == ["raise"]:
    sys.exit("the script has failed")
"""


def mpirun(mark: str, own: list[str], *arguments: str, **variables: str) -> Any:
    name, _, value = mark.partition("=")
    variables = {name: value, "MONARCH_JOB_SECRET": "a secret of this test", **variables}
    passed = [word for one in variables for word in ("-x", one)]
    script = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(
        ["mpirun", *own, "--host", "a,b,c", "-np", "3", "--bind-to", "none", *passed, *script],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * WAIT,
        check=False,
    )


@needs_mpi
@pytest.mark.parametrize("how", ["", "kill"])
def test_a_script_on_every_node(mark: str, own: list[str], how: str) -> None:
    done = mpirun(mark, own, how, MONARCH_RENDEZVOUS=free_address())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[('0', None)]", "[('1', None), ('2', None)]"]
    until(lambda: not marked(mark))


@needs_mpi
def test_a_script_that_fails_ends_all_nodes(mark: str, own: list[str]) -> None:
    done = mpirun(mark, own, "raise", MONARCH_RENDEZVOUS=free_address())
    assert done.returncode != 0
    assert "the script has failed" in done.stderr
    until(lambda: not marked(mark))


@needs_mpi
def test_hosts_that_do_not_know_where_to_meet(mark: str, own: list[str]) -> None:
    done = mpirun(mark, own)
    assert done.returncode != 0
    assert "Open MPI does not say where rank 0 runs: name its host" in done.stderr


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"
