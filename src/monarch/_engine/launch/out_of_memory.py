"""Detection of the kernel's out-of-memory killer as the sender of a SIGKILL.

The kernel notifies neither the killed process nor its parent, but it counts kills per control
group: ``oom_kill`` in ``memory.events`` (version 2) or ``memory.oom_control`` (version 1). The
counter is incremented before the signal is sent, so a parent that sees the exit sees the new count.
If no group has such a counter, the machine-wide one in ``/proc/vmstat`` is used.

The group is the host agent's, or one above. Its procs are in the same group unless they are moved.
The counter is read when the first procs have started, and when a proc was ended by a SIGKILL that
the agent did not send.

Known limit: the counter has no names. If the kernel killed another process of the group, such as a
worker of a data loader, that kill is attributed to the next proc that any SIGKILL ends. (The
kernel's log has the names, but few programs may read it, and its pids have no meaning in a
container.)
"""

from __future__ import annotations

import os
import posixpath

__all__ = ["KillCount", "limit_of", "memory_groups", "parse_count"]

_NO_LIMIT = 1 << 60  # version 1 shows "no limit" as the largest number of whole pages, in bytes
_COUNTERS = ("memory.events", "memory.oom_control")


class KillCount:
    """Counts the out-of-memory kills since it was made, and attributes each to one process."""

    def __init__(self, root: str = "/") -> None:
        proc = os.path.join(root, "proc")
        found = memory_groups(_read(f"{proc}/self/cgroup"), _read(f"{proc}/self/mountinfo"))
        self._groups = [root + group.lstrip("/") for group in found]
        names = [f"{group}/{name}" for group in self._groups for name in _COUNTERS]
        self._file = next((name for name in names if _count(name) is not None), f"{proc}/vmstat")
        self._seen = _count(self._file) or 0

    def claim(self) -> str:
        """Attribute an out-of-memory kill to a process that just died of a SIGKILL.

        Return a text such as "by the kernel's out-of-memory killer"; empty if all kills counted so
        far have been attributed already.
        """
        if (_count(self._file) or 0) <= self._seen:
            return ""
        self._seen += 1
        limit = limit_of(self._groups)
        known = f" (cgroup limit {_size(limit)})" if limit else ""
        return f"by the kernel's out-of-memory killer{known}"


def memory_groups(cgroup: str, mountinfo: str) -> list[str]:
    """Return the directories of a process's control group and of those above it, innermost first.

    The arguments are the texts of its ``/proc/self/cgroup`` and ``mountinfo``. Groups of version 1
    come first: if they exist, they are the ones that control memory.
    """
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths["cgroup"] = path
        elif number == "0" and not controllers:
            paths["cgroup2"] = path
    found: dict[str, list[str]] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ") if after else ("", "")
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top, mounted = before.split(" ")[3:5]
        inner = posixpath.relpath(paths[kind], top)
        # In a container the mount may begin at the group itself, or not show the group's path.
        steps = [] if inner == "." or inner.startswith("..") else inner.split("/")
        found[kind] = ["/".join([mounted, *steps[:n]]) for n in range(len(steps), -1, -1)]
    return found.get("cgroup", []) + found.get("cgroup2", [])


def parse_count(text: str) -> int | None:
    """Return ``oom_kill`` of a file with a name and a number in each line; None if it has none."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.isdigit():
            return int(number)
    return None


def limit_of(groups: list[str]) -> int:
    """Return the bytes that the processes of the first of `groups` may use together; 0: no limit.

    The limits of the groups above count as well.
    """
    limits = [_NO_LIMIT]
    for group in groups:
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(f"{group}/{name}").strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits) % _NO_LIMIT


def _count(file: str) -> int | None:
    return parse_count(_read(file))


def _read(file: str) -> str:
    try:
        with open(file, errors="replace") as opened:
            return opened.read()
    except OSError:  # it does not exist on this system, or may not be read
        return ""


def _size(count: int) -> str:
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    return f"{count / unit:.4g} {name}"
