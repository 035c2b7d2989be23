"""`serve(..., scheduler="k8s")`: ranks of a torchrun command in pods, which are processes here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("kubernetes.client", reason="needs the client of Kubernetes")
pytest.importorskip("torch")

from monarch.job.spmd import SPMDJob, serve
from tests.kubernetes_kit import Cluster

from .conftest import WAIT

pytestmark = pytest.mark.torch

PROGRAM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
print(os.environ["LOCAL_RANK"], os.environ["MONARCH_SERVICE_PROC_RANK"], total.item())
dist.destroy_process_group()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[SPMDJob]:
    (tmp_path / "train.py").write_text(PROGRAM)
    role = SimpleNamespace(
        name="trainer",
        entrypoint="torchrun",
        args=["--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", str(tmp_path / "train.py")],
        num_replicas=2,
        env={},
        image="train:1",
    )
    options: dict[str, Any] = {
        "namespace": "ml",
        "kubeconfig": str(cluster.kubeconfig()),
        "port_forward": False,
        "timeout": WAIT,
    }
    made = serve(SimpleNamespace(roles=[role]), scheduler="k8s", scheduler_cfg=options)
    yield made
    made.kill()
    assert not cluster.objects


LINES = ["[rank 0] 0 0 6", "[rank 1] 1 0 6", "[rank 2] 0 1 6", "[rank 3] 1 1 6"]


def test_a_command_runs_on_pods_as_often_as_asked(
    job: SPMDJob, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        job.run_spmd()
        assert sorted(capfd.readouterr().out.splitlines()) == LINES


def test_a_pod_that_is_deleted_between_two_runs_comes_back(
    job: SPMDJob, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    job.run_spmd()
    capfd.readouterr()
    name = next(name for name in cluster.names("pods") if name.endswith("-1"))
    cluster.delete("pods", "ml", name, {})  # its set makes another one
    job.run_spmd()
    assert sorted(capfd.readouterr().out.splitlines()) == LINES
