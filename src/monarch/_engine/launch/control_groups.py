"""The control groups of this process: where they are, and the processor time that they allow."""

from __future__ import annotations

import os
import posixpath

__all__ = ["control_groups", "cpu_quota", "groups_of", "read_file"]


def groups_of(controller: str, cgroup: str, mountinfo: str) -> list[str]:
    """Return the directories of a process's control group and of those above it, innermost first.

    `cgroup` and `mountinfo` are the texts of its files in ``/proc/self``. Groups of version 1 come
    first: if they exist, they are the ones that have the controller.
    """
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    found: dict[str, list[str]] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ") if after else ("", "")
        if kind not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        top, mounted = before.split(" ")[3:5]
        inner = posixpath.relpath(paths[kind], top)
        # In a container the mount may begin at the group itself, or not show the group's path.
        steps = [] if inner == "." or inner.startswith("..") else inner.split("/")
        found[kind] = ["/".join([mounted, *steps[:n]]) for n in range(len(steps), -1, -1)]
    return found.get("cgroup", []) + found.get("cgroup2", [])


def control_groups(controller: str, root: str = "/") -> list[str]:
    """Return those of this process, as `groups_of`, in the file system at `root`."""
    proc = os.path.join(root, "proc")
    found = groups_of(
        controller, read_file(f"{proc}/self/cgroup"), read_file(f"{proc}/self/mountinfo")
    )
    return [os.path.join(root, group.lstrip("/")) for group in found]


def cpu_quota(root: str = "/") -> float | None:
    """Return the number of cores whose time the control groups allow; None if they do not limit it.

    Version 2 has ``cpu.max`` ("50000 100000": half a core), version 1 two files.
    """
    quotas: list[float] = []
    for group in control_groups("cpu", root):
        words = read_file(f"{group}/cpu.max").split()
        if not words:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [read_file(f"{group}/{name}").strip() for name in names]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def read_file(path: str) -> str:
    """Return the text of a file of the system; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:  # it does not exist on this system, or may not be read
        return ""
