"""The threads of the processes of a mesh, and the processor time that control groups allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch._engine.launch import cores
from monarch._engine.launch.control_groups import cpu_quota
from monarch._engine.launch.cores import divided

NAMES = ("OMP_NUM_THREADS", "MONARCH_CORE_SHARE", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)


@pytest.mark.parametrize(
    ("processes", "threads"), [(1, "8"), (2, "4"), (3, "2"), (8, "1"), (9, "1")]
)
def test_processes_divide_the_cores(processes: int, threads: str) -> None:
    expected = dict(zip(NAMES, (threads, threads, "1000"), strict=True))
    assert divided({"A": "1"}, processes) == ({"A": "1"}, expected)


def test_a_process_of_a_mesh_passes_its_own_number_to_no_mesh() -> None:
    own, added = divided({"A": "1"}, 8)
    assert divided({**own, **added}, 2) == divided({"A": "1"}, 2)


@pytest.mark.parametrize("count", ["1", "4"])
def test_a_number_of_the_users_stays(count: str) -> None:
    """Also if a process of a mesh has changed its own."""
    own, added = divided({}, 3)
    given = {**own, **added, "OMP_NUM_THREADS": count}
    assert divided(given, 1) == (
        {"OMP_NUM_THREADS": count, "GOMP_SPINCOUNT": "1000"},
        {},
    )


@pytest.mark.parametrize("given", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}])
def test_the_users_way_to_wait_stays(given: dict[str, str]) -> None:
    own, added = divided(given, 1)
    assert own == given
    assert set(added) == {"OMP_NUM_THREADS", "MONARCH_CORE_SHARE"}
    assert divided({**own, **added}, 1) == (own, added)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "350000 100000"}, 3.5),
        ({"cpu.max": "350000 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ({"cpu.max": "50000 100000", "a/cpu.max": "max 100000"}, 0.5),
    ],
)
def test_the_quota_of_control_groups(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "a").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a\n")
    mount = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    for name, text in files.items():
        (groups / name).write_text(f"{text}\n")
    assert cpu_quota(f"{tmp_path}/") == quota


def test_the_quota_of_version_1(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/cpu,cpuacct/a"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:cpu,cpuacct:/a\n0::/b\n")
    mount = "30 23 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(f"{tmp_path}/") is None
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    assert cpu_quota(f"{tmp_path}/") == 2
