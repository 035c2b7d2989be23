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

from monarch._engine.launch.control_groups import control_groups, read_file

__all__ = ["KillCount", "limit_of", "parse_count"]

_NO_LIMIT = 1 << 60  # version 1 shows "no limit" as the largest number of whole pages, in bytes
_COUNTERS = ("memory.events", "memory.oom_control")


class KillCount:
    """Counts the out-of-memory kills since it was made, and attributes each to one process."""

    def __init__(self, root: str = "/") -> None:
        self._groups = control_groups("memory", root)
        names = [f"{group}/{name}" for group in self._groups for name in _COUNTERS]
        last = os.path.join(root, "proc/vmstat")
        self._file = next((name for name in names if _count(name) is not None), last)
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
            text = read_file(f"{group}/{name}").strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits) % _NO_LIMIT


def _count(file: str) -> int | None:
    return parse_count(read_file(file))


def _size(count: int) -> str:
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    return f"{count / unit:.4g} {name}"
