"""The processes of a mesh share the cores of their host."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from monarch import remote
from monarch.actor import ProcMesh

pytestmark = pytest.mark.torch


def test_processes_do_not_take_each_others_cores(procs: ProcMesh) -> None:
    cores = len(os.sched_getaffinity(0))
    threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, cores // len(procs))
    with procs.activate():
        found = remote("torch.get_num_threads", propagate="inspect").call().get(timeout=60)
    assert list(found.values()) == [threads] * len(procs)
