"""The states of processes according to the kernel; the host agents' part of the census."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["count", "runnable_threads", "state_of"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


def count(pids: Mapping[int, int], parents: Mapping[int, int]) -> list[list[Any]]:
    """Return a row for each process of this host, for the agent: uid, parent, pid, state, memory.

    Memory is in bytes, the time of the processor, in the last column, in seconds.
    """
    return [[uid, parents.get(uid, 0), pid, *state_of(pid)] for uid, pid in pids.items()]


def state_of(pid: int) -> tuple[str, int, float]:
    """Return the state, the memory in bytes and the processor seconds of a process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", 0, 0.0
    return fields[0], int(fields[21]) * _PAGE, (int(fields[11]) + int(fields[12])) / _TICKS


def runnable_threads() -> int:
    """Return how many threads of this process compute, or want to; the calling one is not counted.

    A thread that holds the interpreter, and those in native code.
    """
    found = 0
    own = str(threading.get_native_id())
    with contextlib.suppress(FileNotFoundError):  # no such file system
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat", "rb") as file:
                found += thread != own and file.read().rpartition(b")")[2].split()[0] == b"R"
    return found
