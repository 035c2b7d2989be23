"""The standard outputs of a process, as files: which of two processes write to the same ones.

The output of a proc is forwarded to the script by default where it would not appear there anyway.
The agent of a worker that inherited the script's terminal, or its pipe, has the same files as the
script. The agent of a worker on another machine, or of one that writes to a log file, has not.
"""

from __future__ import annotations

import os

__all__ = ["outputs"]

_BOOT = "/proc/sys/kernel/random/boot_id"


def outputs() -> list[str]:
    """Return a name for each of stdout and stderr: equal only if they are one file."""
    try:
        with open(_BOOT) as file:
            machine = file.read().strip()
    except OSError:
        machine = os.uname().nodename
    return [f"{machine} {_file(number)}" for number in (1, 2)]


def _file(number: int) -> str:
    try:
        found = os.fstat(number)
    except OSError:  # it is closed
        return "closed"
    return f"{found.st_dev} {found.st_ino} {found.st_rdev}"
