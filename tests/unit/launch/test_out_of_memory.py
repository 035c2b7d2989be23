"""Where the out-of-memory killer's count is read, and what a higher count is attributed to."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch._engine.launch.control_groups import groups_of
from monarch._engine.launch.out_of_memory import KillCount, limit_of, parse_count

V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1 = "9:name=systemd:/\n4:memory:/jobs/one\n3:cpu:/\n0::/\n"
V2_MOUNTS = "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V2 = "0::/user.slice/session 1.scope\n"


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "expected"),
    [
        (
            V1,
            V1_MOUNTS,
            ["memory/jobs/one", "memory/jobs", "memory", "unified"],
        ),
        (V2, V2_MOUNTS, ["user.slice/session 1.scope", "user.slice", ""]),
        # Containers: with a name space; without one, the mount at the group; or below the group.
        ("0::/\n", V2_MOUNTS, [""]),
        (V1, V1_MOUNTS.replace("0:32 /", "0:32 /jobs/one"), ["memory", "unified"]),
        (V1, V1_MOUNTS.replace("0:32 /", "0:32 /jobs/two"), ["memory", "unified"]),
        ("4:cpu,memory:/a\n", V1_MOUNTS, ["memory/a", "memory"]),
        ("", "", []),
        ("what\n\n::::", "is\nthis - \n - - - ", []),
    ],
)
def test_the_groups_of_a_process(cgroup: str, mountinfo: str, expected: list[str]) -> None:
    folders = [f"/sys/fs/cgroup/{name}".rstrip("/") for name in expected]
    assert groups_of("memory", cgroup, mountinfo) == folders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("low 0\nhigh 1\nmax 2\noom 7\noom_kill 3\noom_group_kill 9\n", 3),
        ("oom_kill_disable 1\nunder_oom 1\noom_kill 4\n", 4),
        ("oom_kill_disable 0\nunder_oom 0\n", None),
        ("oom_kill many\n", None),
        ("", None),
    ],
)
def test_the_count(text: str, expected: int | None) -> None:
    assert parse_count(text) == expected


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_limit_is_the_least(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a/b/memory.max": "max\n",
            "a/memory.max": f"{2 << 30}\n",
            "memory.max": f"{3 << 30}\n",
            "one/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert limit_of([f"{tmp_path}/a/b", f"{tmp_path}/a", str(tmp_path)]) == 2 << 30
    assert limit_of([f"{tmp_path}/a/b"]) == 0
    assert limit_of([f"{tmp_path}/one"]) == 0
    assert limit_of([]) == 0


GROUP = "sys/fs/cgroup/job/"
SYSTEMS = {
    "version 2": (
        {
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2_MOUNTS,
            GROUP + "memory.max": f"{5 << 29}\n",
        },
        GROUP + "memory.events",
        " (cgroup limit 2.5 GiB)",
    ),
    "version 1": (
        {
            "proc/self/cgroup": "4:memory:/job\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{64 << 20}\n",
        },
        "sys/fs/cgroup/memory/job/memory.oom_control",
        " (cgroup limit 64 MiB)",
    ),
    "no group": (
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNTS},
        "proc/vmstat",
        "",
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_kill_that_was_counted_is_claimed_once(tmp_path: Path, system: str) -> None:
    files, counter, limit = SYSTEMS[system]
    write(tmp_path, {"proc/vmstat": "oom_kill 0\n", **files, counter: "x 1\noom_kill 7\n"})
    count = KillCount(f"{tmp_path}/")
    assert count.claim() == "", "what was before does not count"
    write(tmp_path, {counter: "x 1\noom_kill 9\n"})
    said = f"by the kernel's out-of-memory killer{limit}"
    assert [count.claim() for _ in range(3)] == [said, said, ""]


def test_a_system_that_counts_nothing(tmp_path: Path) -> None:
    assert KillCount(f"{tmp_path}/").claim() == ""
