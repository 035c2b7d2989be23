"""`SlurmJob` on a real Slurm of this machine, whose nodes have process namespaces of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.actor import Actor, SupervisionError, Supervisor, endpoint
from monarch.job import JobTrait, SlurmJob, job_load
from monarch.job.spmd import serve
from tests.integration.jobs.shadowed import imports_what_the_script_does
from tests.ports import free_port
from tests.processes import files_of_processes

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src"
WAIT = 120.0
PYTHON = f"env PYTHONPATH={SRC} {sys.executable}"


def demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo_slurm", ROOT / "examples/demo_slurm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Worker(Actor):
    @endpoint
    def node(self) -> str:
        return os.environ["SLURMD_NODENAME"]

    @endpoint
    def secrets(self) -> list[str]:
        return [name for name in os.environ if name == "MONARCH_JOB_SECRET"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    module = demo()
    if why := module.unavailable():
        pytest.skip(f"needs a Slurm of its own: {why}")
    # One node more than jobs use, for the job that runs into its time limit meanwhile.
    made = module.Cluster(4, subnet=f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(made)
        except RuntimeError as error:
            pytest.skip(f"no Slurm runs here: {error}")
        yield made


@pytest.fixture(autouse=True)
def environment(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environ[name])


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture
def describe(port: int, tmp_path: Path, killed: Any) -> Callable[..., Any]:
    def make(meshes: dict[str, int], **options: Any) -> Any:
        options = {"python_exe": PYTHON, "monarch_port": port, **options}
        return killed(SlurmJob(meshes, **options))

    return make


@pytest.fixture(autouse=True)
def nothing_left(cluster: Any, environment: None, describe: Any) -> Iterator[None]:
    """After a test no job of it is queued or running; the one with the time limit is excepted."""
    yield
    left = cluster.command("squeue", "--noheader", "--format=%i %j %T").splitlines()
    for line in left:
        if "limited" not in line:
            cluster.command("scancel", line.split()[0])


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def states(cluster: Any, job: Any) -> str:
    shown: str = cluster.command("squeue", "--noheader", "--states=all", "--format=%i %T")
    return dict(line.split() for line in shown.splitlines())[str(job._running_as()._job_id)]


def nodes_of(mesh: Any) -> list[str]:
    return list(mesh.spawn_procs().spawn("workers", Worker).node.call().get(timeout=WAIT).values())


def call_on(workers: Any) -> None:
    """Call until a call fails."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        workers.node.call().get(timeout=WAIT)


def script(text: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT,
    )


@pytest.mark.slow
def test_time_limit_begins(cluster: Any, port: int, tmp_path_factory: Any) -> None:
    """Submit the job that `test_time_limit_ends` looks at once its time is over."""
    folder = tmp_path_factory.mktemp("limited")
    job = SlurmJob(
        {"a": 1},
        python_exe=PYTHON,
        monarch_port=port,
        job_name="limited",
        time_limit="1",
        slurm_args=["--nodelist=n3"],
        log_dir=str(folder),
    )
    job.apply()
    cluster.limited = job
    # Limits are whole minutes, but the end may be any time; the controller looks each 30 seconds.
    # (A job whose end is the second of its start has no end.)
    number = str(job._job_id)
    until(lambda: "RUNNING" in cluster.command("squeue", "-h", "-o%T", f"-j{number}"))
    until(lambda: cluster.command("squeue", "-h", "-o%M", f"-j{number}").strip() > "0:01")
    cluster.command("scontrol", "update", f"jobid={number}", "endtime=now")


def test_start_call_and_kill_with_two_meshes(cluster: Any, describe: Any, tmp_path: Path) -> None:
    job = describe({"a": 2, "b": 1})
    state = job.state(cached_path=None)
    assert dict(state.a.extent) == {"hosts": 2}
    assert nodes_of(state.a) == ["n0", "n1"]
    workers = state.b.spawn_procs({"gpus": 2}).spawn("more", Worker)
    assert list(workers.node.call().get(timeout=WAIT).values()) == ["n2", "n2"]
    assert list(workers.secrets.call().get(timeout=WAIT).values()) == [[], []]
    number = job._job_id
    shown = cluster.command("scontrol", "show", "job", "--details", str(number))
    shown += cluster.command("scontrol", "write", "batch_script", str(number), "-")
    with open(job._secret_file()) as file:
        secret = file.read().strip()
    assert "srun" in shown
    assert secret not in shown
    for line in files_of_processes("cmdline"):
        with contextlib.suppress(OSError):  # the process has exited
            assert secret.encode() not in line.read_bytes()
    job.kill()
    assert not cluster.command("squeue", "--noheader", f"--job={number}").strip()
    assert until(lambda: cluster.idle() >= 3)
    assert "node n2 serves" in next(tmp_path.glob("slurm_*.out")).read_text()


def test_nodes_import_what_the_script_does(
    cluster: Any, describe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = describe({"a": 1}).state(cached_path=None).a
    imports_what_the_script_does(hosts, tmp_path, monkeypatch)


PROGRAM = """
import sys
from monarch.job import SlurmJob
job = SlurmJob({{"a": 1}}, python_exe={python!r}, monarch_port={port})
print(job.state().a.extent, job.apply_id)
"""


def test_the_next_script_finds_the_job(
    cluster: Any, describe: Any, port: int, tmp_path: Path
) -> None:
    text = PROGRAM.format(python=PYTHON, port=port)
    first, second = script(text, tmp_path), script(text, tmp_path)
    assert first.stdout.startswith("{hosts: 1} "), first.stderr
    assert first.stdout == second.stdout
    job = describe({"a": 1})
    assert nodes_of(job.state().a) == ["n0"]
    assert job.apply_id == first.stdout.split()[-1]
    job.kill()
    other = describe({"a": 2})
    assert other.state().a.extent["hosts"] == 2
    assert states(cluster, other) == "RUNNING"


def test_a_job_in_no_file_ends_with_its_script(cluster: Any, port: int, tmp_path: Path) -> None:
    text = PROGRAM.format(python=PYTHON, port=port).replace("state()", "state(None)")
    killed = script(text + "import os; os.kill(os.getpid(), 9)", tmp_path)
    assert killed.returncode == -9, killed.stderr
    until(lambda: cluster.idle() >= 3)


def test_a_second_job_waits_and_is_not_left_in_the_queue(cluster: Any, describe: Any) -> None:
    describe({"a": 3}).state("first.pkl")
    late = describe({"a": 2}, job_start_timeout=1, slurm_args=["--exclude=n3"])
    with pytest.raises(RuntimeError, match=r"Timeout waiting for SLURM job \d+ to start.*PENDING"):
        late.state(cached_path=None)
    assert cluster.command("squeue", "--noheader", "--states=PENDING") == ""


def test_a_job_that_is_refused_leaves_nothing(cluster: Any, describe: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Failed to submit SLURM job: .*invalid partition"):
        describe({"a": 1}, partition="none").state()
    assert not (tmp_path / ".monarch/job_state.pkl").exists()
    assert cluster.idle() >= 3


def test_a_worker_that_cannot_start_says_why(cluster: Any, describe: Any) -> None:
    job = describe({"a": 2}, python_exe="/no/such/python")
    job.apply()
    until(lambda: states(cluster, job) == "FAILED")
    with pytest.raises(RuntimeError, match=r"(?s)FAILED \(.*\.err:\n.*/no/such/python"):
        job.state(cached_path=None)
    again = describe({"a": 2}, bind_to="192.0.2.7")  # no address of this machine
    again.apply()
    until(lambda: states(cluster, again) in ("FAILED", "CANCELLED"))
    with pytest.raises(RuntimeError, match=r"(?s)cannot listen at 192.0.2.7.*another monarch_port"):
        again.state(cached_path=None)


@pytest.mark.failures
def test_cancelled_from_outside(cluster: Any, describe: Any) -> None:
    job = describe({"a": 1})
    workers = job.state().a.spawn_procs().spawn("workers", Worker)
    workers.node.call().get(timeout=WAIT)
    cluster.command("scancel", str(job._job_id))
    with pytest.raises(SupervisionError):
        call_on(workers)
    until(lambda: states(cluster, job) == "CANCELLED")
    with pytest.raises(RuntimeError, match=r"Slurm job \d+ ended: CANCELLED"):
        job.state()
    again = describe({"a": 1})
    assert again.state().a.extent["hosts"] == 1
    assert again._job_id != job._job_id


@pytest.mark.failures
@pytest.mark.slow
def test_a_node_that_dies_is_the_failure_of_its_host(cluster: Any, describe: Any) -> None:
    job = describe({"a": 3}, slurm_args=["--no-kill"])
    workers = job.state().a.spawn_procs().spawn("workers", Worker)
    assert list(workers.node.call().get(timeout=WAIT).values()) == ["n0", "n1", "n2"]
    cluster.kill_node("n1")
    try:
        with pytest.raises(SupervisionError, match=cluster.addresses["n1"]):
            call_on(workers.slice(hosts=1))
        others = [workers.slice(hosts=rank).node.call_one() for rank in (0, 2)]
        assert [call.get(timeout=WAIT) for call in others] == ["n0", "n2"]
    finally:
        cluster.command("scancel", str(job._job_id))
        cluster.start_node("n1")
        until(lambda: cluster.idle() >= 3)


@pytest.mark.failures
@pytest.mark.slow
def test_a_lost_node_is_replaced_in_place(cluster: Any, describe: Any) -> None:
    """The new node also belonged to an earlier job of this process, with another secret."""
    earlier = describe({"a": 3})
    assert nodes_of(earlier.state(cached_path=None).a) == ["n0", "n1", "n2"]
    earlier.kill()
    job = describe({"a": 2}, slurm_args=["--no-kill"])
    state = job.state(cached_path=None)
    supervisor = Supervisor("one_for_one", max_restarts=3, within=600, spares=job)
    mesh = supervisor.spawn(state.a.spawn_procs(), "mesh", Worker)
    assert mesh.node.call().get(timeout=WAIT).values() == ["n0", "n1"]
    known = job.workers
    cluster.kill_node("n1")
    try:
        until(lambda: job.workers != known)
        supervisor.healthy.get(timeout=WAIT)
        assert mesh.node.call().get(timeout=WAIT).values() == ["n0", "n2"]
    finally:
        cluster.start_node("n1")  # Slurm waits for a lost node before it has released a job
        job.kill()
        until(lambda: cluster.idle() >= 3)
    assert running(cluster) == []


TRAIN = """
import os
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURMD_NODENAME", "GREETING"
print(*map(os.environ.get, names), flush=True)
"""


def test_a_torchrun_command_on_the_nodes(
    cluster: Any,
    port: int,
    tmp_path: Path,
    killed: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It runs as often as asked, from another script as well; the nodes stay until `kill`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    role = SimpleNamespace(
        name="trainer",
        entrypoint="torchrun",
        args=["--nproc-per-node=2", "train.py"],
        num_replicas=2,
        env={"GREETING": "hello"},
    )
    options = {"python_exe": PYTHON, "monarch_port": port}
    job = killed(serve(SimpleNamespace(roles=[role]), scheduler="slurm", scheduler_cfg=options))
    job.dump("job")
    for one in (job, job_load("job")):
        one.run_spmd()
        lines = sorted(capfd.readouterr().out.splitlines())
        assert lines == [
            f"[rank {rank}] {rank} 4 {rank % 2} n{rank // 2} hello" for rank in range(4)
        ]
    assert [state.name for state in job._host_states()] == ["n0", "n1"]
    assert len(running(cluster)) == 1
    job.kill()
    assert running(cluster) == []


def running(cluster: Any) -> list[str]:
    shown = cluster.command("squeue", "--noheader", "--format=%i %j %T").splitlines()
    return [line for line in shown if "limited" not in line]


def test_a_replacement_that_fails_leaves_nothing_and_one_that_works_is_part_of_the_job(
    cluster: Any, describe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = describe({"a": 2})
    with pytest.raises(RuntimeError, match="the job does not run"):
        job.replace_host("tcp://x:1")
    job.state(cached_path="job")
    with pytest.raises(ValueError, match="no host at tcp://x:1; its hosts are tcp://"):
        job.replace_host("tcp://x:1")
    before = job.workers
    with monkeypatch.context() as context:
        context.setattr(job, "_python_exe", "no-such-python")
        with pytest.raises(RuntimeError, match=rf"no node in the place of {before[1]}: ") as error:
            job.replace_host(before[1])
    assert "\n" not in str(error.value)
    assert "Slurm job" in str(error.value)
    until(lambda: len(running(cluster)) == 1)
    assert job.workers == before
    new = job.replace_host(before[1])
    assert job.workers == [before[0], new] != before
    assert job.replace_host(before[1]) == new  # asked again
    assert len(running(cluster)) == 2
    job.dump("job")
    saved: Any = job_load("job")
    assert saved.can_run(job)
    assert nodes_of(saved.state().a) == ["n0", "n2"]
    saved.kill()
    assert running(cluster) == []


@pytest.mark.slow
def test_a_requeued_job_is_waited_for_anew(
    cluster: Any, describe: Any, port: int, tmp_path: Path
) -> None:
    done = script(PROGRAM.format(python=PYTHON, port=port), tmp_path)
    assert done.returncode == 0, done.stderr
    number = job_load()._job_id  # type: ignore[attr-defined]
    cluster.command("scontrol", "requeue", str(number))
    until(lambda: "PENDING" in cluster.command("squeue", "-h", "-o%T", f"-j{number}"))
    # Slurm would wait for two minutes. Within the second of the first end a node takes the new
    # credentials of the job for the old ones, which were revoked.
    cluster.command("scontrol", "update", f"jobid={number}", "starttime=now+2seconds")
    job = describe({"a": 1})
    assert nodes_of(job.state().a) == ["n0"]
    assert job._running_as()._job_id == number
    assert "Restarts=1" in cluster.command("scontrol", "show", "job", str(number))


def test_a_partial_allocation_is_cancelled(cluster: Any, describe: Any) -> None:
    job = describe({"a": 2})
    job.apply()
    until(lambda: states(cluster, job) == "RUNNING")
    cluster.command("scontrol", "update", f"jobid={job._job_id}", "numnodes=1")
    with pytest.raises(
        RuntimeError, match=r"Partial allocation not supported: .* has 1 nodes, and 2"
    ):
        job.state(cached_path=None)
    until(lambda: cluster.idle() >= 3)


BATCH = """
import os, sys
from monarch.actor import Actor, endpoint
from monarch.job import SlurmJob
class Worker(Actor):
    @endpoint
    def node(self):
        return os.environ["SLURMD_NODENAME"]
job = SlurmJob({{"a": 1, "b": 1}}, python_exe={python!r}, monarch_port={port})
state = job.state()
for mesh in (state.a, state.b):
    print(mesh.spawn_procs().spawn("w", Worker).node.call_one().get(), flush=True)
print("batch", os.environ["MONARCH_BATCH_JOB"], "MONARCH_JOB_SECRET" in os.environ, flush=True)
sys.exit(3)
"""


def test_batch_mode(cluster: Any, describe: Any, port: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BATCH.format(python=PYTHON, port=port))
    job = describe({"a": 1, "b": 1}, log_dir="logs")
    job.apply(f"{PYTHON} {shlex.quote(str(tmp_path / 'train.py'))}")
    number = job._job_id
    with pytest.raises(RuntimeError, match="only that script connects to it"):
        job.state()
    until(lambda: states(cluster, job) == "FAILED")
    (log,) = (tmp_path / "logs").glob(f"slurm_{number}_*.out")
    (errors,) = (tmp_path / "logs").glob(f"slurm_{number}_*.err")
    said = [line for line in log.read_text().splitlines() if "monarch:" not in line]
    assert said == ["n0", "n1", "batch 1 False"], errors.read_text()
    assert "ExitCode=3:0" in cluster.command("scontrol", "show", "job", str(number))


def test_a_batch_job_is_not_replaced_while_it_runs(cluster: Any, describe: Any) -> None:
    describe({"a": 1}).apply("sleep 600")
    with pytest.raises(RuntimeError, match="batch job that still runs"):
        describe({"a": 1}).state()
    saved: JobTrait = job_load()
    saved.kill()
    until(lambda: cluster.idle() >= 3)
    assert describe({"a": 1}).state().a.extent["hosts"] == 1


def test_through_the_first_node(cluster: Any, port: int, tmp_path: Path) -> None:
    """The client dials the gateway only; its log on the node says that it relays."""
    text = PROGRAM.format(python=PYTHON, port=port).replace("state()", "state(None)")
    text = text.replace('{"a": 1}', '{"a": 2}, out_of_cluster=True')
    more = "from monarch.actor import *\nfrom monarch._spi import gateway\n"
    more += "print(job._connect().a.spawn_procs().initialized.get(), gateway() == job.workers[0])\n"
    done = script(text + more, tmp_path)
    assert done.stdout.endswith("True True\n"), done.stderr


@pytest.mark.slow
def test_time_limit_ends(cluster: Any) -> None:
    job = cluster.limited
    until(lambda: states(cluster, job) == "TIMEOUT")
    with pytest.raises(RuntimeError, match=r"Slurm job \d+ ended: TIMEOUT"):
        job.state(cached_path=None)
    job.kill()
