"""The doctor's reading of a system's files."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from monarch.cli.machine import Fact, machine


def facts(root: Path, files: dict[str, str]) -> dict[str, Fact]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {fact.name: fact for fact in machine(str(root))}


def _without_nixl(name: str, version: Any = importlib.metadata.version) -> str:
    if name.startswith("nixl"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


def test_limits_of_an_outer_control_group_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = facts(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/memory.max": f"{1 << 30}\n",
            "sys/fs/cgroup/outer/inner/memory.current": f"{900 << 20}\n",
            "sys/fs/cgroup/outer/cpu.max": "50000 100000\n",
        },
    )
    memory: dict[str, Any] = found["memory"].value
    assert memory == {"total": 16 << 30, "available": 8 << 30, "limit": 1 << 30, "used": 900 << 20}
    assert found["memory"].remark == "only 124 MiB are left"
    assert found["cores"].value["quota"] == 0.5
    assert "slow each other down" in found["cores"].remark
    assert "each computes with 1 // N threads, at least 1" in found["cores"].text
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS=3 says" in facts(tmp_path, {})["cores"].text


def test_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(importlib.metadata, "version", _without_nixl)
    found = facts(
        tmp_path,
        {
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t H100\nIRQ: 1\n",
            "proc/driver/nvidia/gpus/0000:02:00.0/information": "Model: \t H100\n",
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
        },
    )
    assert found["RDMA"].text == "mlx5_0 (ACTIVE)"
    assert found["GPUs"].text == "2 x H100"
    assert "by way of main memory" in found["GPUs"].remark
    assert "pip install 'pymonarch[rdma]'" in found["NIXL"].remark
    assert found["numa"].value == {"node0": "0-3", "node1": "4-7"}


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = facts(tmp_path, {})
    assert found["memory"].text == "not told"
    assert found["numa"].text == "not told"
    assert found["GPUs"].text == "none"
    assert found["shared memory"].value is None
