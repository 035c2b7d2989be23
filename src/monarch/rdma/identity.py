"""Which process on which host: what a handle says of its owner, so that no other is taken for it.

A pid means something on one booted kernel and in one pid namespace, and there until it is used
again; so the boot, the namespace and the moment at which the process began belong to it. The host's
name says nothing: containers share it, and clones of a machine do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from typing import NamedTuple

__all__ = ["Host", "has_memory", "own_host", "start_of"]


class Host(NamedTuple):
    """Where pids are comparable."""

    boot: str
    """The kernel since it was booted."""
    namespace: int
    """Of pids; 0 where there is only one."""


@functools.cache
def own_host() -> Host:
    """The host of this process."""
    boot, namespace = "", 0
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    # Without /proc no pid is ever used to reach anybody; the name keeps hosts apart.
    return Host(boot or socket.gethostname(), namespace)


def start_of(pid: int) -> int:
    """When process `pid` began, in the kernel's ticks. Raises ProcessLookupError if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    return int(stat.rpartition(b")")[2].split()[19])


def has_memory(pid: int) -> bool:
    """Whether process `pid` lives: one that is ending gives its memory up first, files later."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return not file.read().startswith("0 ")
    except (FileNotFoundError, ProcessLookupError):
        return False
