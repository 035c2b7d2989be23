"""Whether the kernel's out-of-memory killer was the one who sent a SIGKILL.

The kernel says nothing to those it kills, or to their parents, but it counts, per control group:
``oom_kill`` in ``memory.events`` (version 2) or ``memory.oom_control`` (version 1). It counts
before it sends the signal, so whoever sees a process end finds it counted. Without a group that
counts there is the count of the whole machine, in ``/proc/vmstat``.

The group is that of the host agent, which is the one of its procs as long as nobody moves them, or
one above. A count has no names: what the group lost otherwise, a data loader's worker say, would be
taken for the next proc that somebody else kills. (The kernel's log has the names, but few programs
may read it, and in a container its pids mean nothing.) It is read when the first procs have
started and when one died of a SIGKILL that was not the agent's.
"""

from __future__ import annotations

import os
import posixpath

__all__ = ["KillCount", "limit_of", "memory_groups", "parse_count"]

_NO_LIMIT = 1 << 60  # what version 1 has for none is the largest number of pages
_COUNTERS = ("memory.events", "memory.oom_control")


class KillCount:
    """How many processes the kernel killed for their memory since this was made."""

    def __init__(self, root: str = "/") -> None:
        proc = os.path.join(root, "proc")
        found = memory_groups(_read(f"{proc}/self/cgroup"), _read(f"{proc}/self/mountinfo"))
        self._groups = [root + group.lstrip("/") for group in found]
        names = [f"{group}/{name}" for group in self._groups for name in _COUNTERS]
        self._file = next((name for name in names if _count(name) is not None), f"{proc}/vmstat")
        self._seen = _count(self._file) or 0

    def claim(self) -> str:
        """Who killed a process that just died of a SIGKILL, if it was the kernel; else empty."""
        if (_count(self._file) or 0) <= self._seen:
            return ""
        self._seen += 1
        limit = limit_of(self._groups)
        known = f" (cgroup limit {_size(limit)})" if limit else ""
        return f"by the kernel's out-of-memory killer{known}"


def memory_groups(cgroup: str, mountinfo: str) -> list[str]:
    """The folders of a process's group and the groups above it, innermost first.

    From its ``/proc/self/cgroup`` and ``mountinfo``. Those of version 1 come first: if they exist
    they have the memory.
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
        # (In a container the mount may begin at the group itself, or show nothing of its path.)
        steps = [] if inner == "." or inner.startswith("..") else inner.split("/")
        found[kind] = ["/".join([mounted, *steps[:n]]) for n in range(len(steps), -1, -1)]
    return found.get("cgroup", []) + found.get("cgroup2", [])


def parse_count(text: str) -> int | None:
    """``oom_kill`` of a file of lines with names and numbers."""
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.isdigit():
            return int(number)
    return None


def limit_of(groups: list[str]) -> int:
    """The bytes that all processes of the first of `groups` may have together; 0: no limit."""
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
    except OSError:  # not this system, or not for us to see
        return ""


def _size(count: int) -> str:
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    return f"{count / unit:.4g} {name}"
