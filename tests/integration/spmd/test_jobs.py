"""`SPMDJob` runs a torchrun command; `StoreJob` makes hosts of the ranks of one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.job.spmd import SPMDJob, StoreJob, serve, spmd_job
from monarch.job.spmd.schedulers import job_of

from .conftest import WAIT

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def serve_here(words: Any, tmp_path: Path) -> SPMDJob:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        return serve(words, scheduler="local_cwd")


DRIVER = """
import sys
from monarch.job import job_loads
from monarch.job.spmd import SPMDJob, serve

job = serve(sys.argv[1:], scheduler="local_cwd")
for one in (job, job_loads(job.dumps())):
    assert isinstance(one, SPMDJob) and one.can_run(job)
    assert one.state(cached_path=None).workers.extent.nelements == 1
    one.run_spmd()
job.kill()
assert not job.active
"""


def drive(folder: Path, environ: dict[str, str], program: str, *words: str) -> Any:
    (folder / "driver.py").write_text(DRIVER)
    (folder / "train.py").write_text(program)
    return subprocess.run(
        [sys.executable, "driver.py", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )


def test_a_command_is_run_as_often_as_asked(tmp_path: Path, environ: dict[str, str]) -> None:
    program = "import os; print(os.environ['RANK'], os.getcwd())"
    done = drive(tmp_path, environ, program, "torchrun", "--nproc-per-node=2", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    expected = [f"[rank {rank}] {rank} {tmp_path}" for rank in (0, 0, 1, 1)]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_rank_that_fails(tmp_path: Path, environ: dict[str, str]) -> None:
    done = drive(tmp_path, environ, "import sys; sys.exit(4)", "python", "train.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: local_cwd://monarch/trainer: rank 0 on ")
    assert last.endswith("exited with status 4")


def test_an_appdef_of_torchx(tmp_path: Path) -> None:
    role = SimpleNamespace(
        name="r", entrypoint="torchrun", args=["x.py", 1], num_replicas=1, env={"A": "b"}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = serve_here(SimpleNamespace(roles=[role, role]), tmp_path)
    assert "only the first of 2 roles" in str(caught[0].message)
    assert job._launch().program == ("x.py", "1")
    role.num_replicas = 2
    with pytest.raises(ValueError, match="2 hosts are asked for"):
        serve(SimpleNamespace(roles=[role]), scheduler="local_cwd")


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ([], "empty"),
        (["torchrun"], "no script or module"),
        (["torchrun", "--nnodes=2", "x.py"], "only single-node"),
        (["mpirun", "x.py"], "'mpirun'"),
        ("torchrun x.py", "list of words"),
        (None, "NoneType"),
    ],
)
def test_impossible_commands(words: Any, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        serve(words, scheduler="local_cwd")


def test_the_default_scheduler_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'mast_conda' is not supported.*local_cwd"):
        serve(["torchrun", "x.py"])


# -- StoreJob --------------------------------------------------------------------------------------

RANKS = """
import datetime, os
from torch.distributed import TCPStore
from monarch.actor import Actor, endpoint
from monarch.job.spmd import StoreJob

class Rank(Actor):
    @endpoint
    def add(self, x):
        return x + 1

rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
store = TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=200))
job = StoreJob.from_store(store)
assert (job is None) == (rank != 0)
if job is not None:
    hosts = job.state().monarch_worker
    procs = hosts.spawn_procs({"gpus": 2})
    print(procs.spawn("ranks", Rank).add.call(1).get().values(), flush=True)
    procs.stop().get()
    store.set("done", "1")
store.get("done")
"""


@pytest.mark.slow
def test_ranks_become_hosts(tmp_path: Path, environ: dict[str, str]) -> None:
    done = drive(tmp_path, environ, RANKS, "torchrun", "--nproc-per-node=2", "train.py")
    assert (done.returncode, done.stdout) == (0, "[rank 0] [2, 2]\n" * 2), done.stderr


@pytest.mark.parametrize(
    ("options", "error", "culprit"),
    [
        ({"transport": "tcp"}, ValueError, "monarch_port"),
        ({"transport": "x"}, ValueError, "transport"),
        ({"rank": 0}, RuntimeError, "LOCAL_RANK"),
        (
            {"rank": 0, "local_rank": 0, "world_size": 3, "local_world_size": 2},
            ValueError,
            "3 ranks",
        ),
    ],
)
def test_what_cannot_be(
    options: dict[str, Any], error: type[Exception], culprit: str, monkeypatch: Any
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(error, match=culprit):
        StoreJob.from_store(SimpleNamespace(set=None, get=None), **options)  # type: ignore[arg-type]


def test_options_of_schedulers() -> None:
    words = ["torchrun", "train.py"]
    with pytest.raises(ValueError, match="'mast_conda' is not supported here; there are 'local_"):
        serve(words)
    with pytest.raises(ValueError, match="local_cwd has no option partition"):
        serve(words, scheduler="local_cwd", scheduler_cfg={"partition": "gpu"})
    with pytest.raises(ValueError, match="slurm has no option queue; there are account, "):
        serve(words, scheduler="slurm", scheduler_cfg={"queue": "gpu"})
    with pytest.raises(ValueError, match="the role names no image, and pods need one"):
        serve(words, scheduler="k8s")


def test_what_a_role_asks_of_a_host() -> None:
    resource = SimpleNamespace(cpu=8, gpu=-1, memMB=1024)
    role = {"num_replicas": 3, "resource": spmd_job._amounts(resource)}
    job: Any = job_of("slurm", {"time": "01:00:00", "cpus_per_task": 4}, role)
    assert job._meshes == {"workers": 3}
    asked = {name: value for name, value in job._options.items() if value is not None}
    assert asked == {
        "ntasks-per-node": 1,
        "time": "01:00:00",
        "cpus-per-task": 4,
        "mem": "1024M",
        "exclusive": True,
    }
    pods: Any = job_of("k8s", {"namespace": "ml", "operator": False}, {**role, "image": "train:1"})
    template = pods._meshes["workers"].template
    assert pods._namespace == "ml"
    assert template["spec"]["containers"][0]["image"] == "train:1"
    amounts = {"cpu": "8", "memory": "1024M"}
    assert template["spec"]["containers"][0]["resources"]["limits"] == amounts
