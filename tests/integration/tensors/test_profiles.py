"""Profiles and memory snapshots of all processes of a mesh, which the script starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch import inspect
from monarch.memory import dump_memory_snapshot, record_memory_history
from monarch.mesh_controller import RemoteException
from monarch.profiler import Schedule, profile, record_function

pytestmark = pytest.mark.torch


def events(path: Path) -> list[str]:
    return [str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]]


def test_each_process_writes_a_trace_with_the_named_block(active: Any, tmp_path: Path) -> None:
    with profile(on_trace_ready=str(tmp_path)):
        with record_function("my block"):
            x = torch.ones(2, 2) @ torch.ones(2, 2)
        inspect(x)
    inspect(x)  # after the traces are written
    files = sorted(tmp_path.iterdir())
    assert [path.name.split("_")[1] for path in files] == ["0", "1", "2", "3"]
    for path in files:
        assert {"my block", "aten::mm"} <= set(events(path))


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_a_schedule_counts_steps_of_the_script(active: Any, tmp_path: Path) -> None:
    schedule = Schedule(wait=1, warmup=0, active=1, repeat=2)
    with profile(on_trace_ready=str(tmp_path), schedule=schedule) as profiled:
        for _ in range(4):
            x = torch.ones(2).add_(1)
            profiled.step()
    inspect(x)
    assert len(list(tmp_path.iterdir())) == 2 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_snapshots_of_processes_without_cuda_are_an_error_of_the_call(
    active: Any, tmp_path: Path
) -> None:
    record_memory_history()
    with pytest.raises(RemoteException, match="no CUDA device") as caught:
        active.client.sync()
    assert "record_memory_history()" in str(caught.value)
    dump_memory_snapshot(dir_snapshots=str(tmp_path / "snapshots"))
    with pytest.raises(RemoteException, match="no CUDA device"):
        active.client.sync()
    assert not (tmp_path / "snapshots").exists()
