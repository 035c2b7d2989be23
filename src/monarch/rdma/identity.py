"""The identity of a process in its kernel, so that a handle never reaches another process.

A pid is valid on one booted kernel, in one pid namespace, and only until it is reused. So the
identity also has the kernel's boot id, the namespace and the start time of the process. The host
name is not used: containers share it, and so do clones of a machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from typing import NamedTuple

__all__ = ["Host", "has_memory", "own_host", "start_of"]


class Host(NamedTuple):
    """The kernel and pid namespace within which pids are comparable."""

    boot: str
    """The boot id of the kernel."""
    namespace: int
    """The pid namespace; 0 where there is only one."""


@functools.cache
def own_host() -> Host:
    """Return the host of this process."""
    boot, namespace = "", 0
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    # Without /proc no process is reached by its pid; the name only distinguishes hosts.
    return Host(boot or socket.gethostname(), namespace)


def start_of(pid: int) -> int:
    """Return when process `pid` started, in the kernel's ticks.

    Raises ProcessLookupError if there is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The command name, in parentheses, may itself contain spaces and parentheses.
    return int(stat.rpartition(b")")[2].split()[19])


def has_memory(pid: int) -> bool:
    """Whether process `pid` is alive: an exiting process releases memory first, files later."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return not file.read().startswith("0 ")
    except (FileNotFoundError, ProcessLookupError):
        return False
