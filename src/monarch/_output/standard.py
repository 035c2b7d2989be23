"""The standard outputs of a process: which files they are, and whether lines can be redrawn there.

The output of a proc is forwarded to the script by default where it would not appear there anyway.
The agent of a worker that inherited the script's terminal, or its pipe, has the same files as the
script. The agent of a worker on another machine, or of one that writes to a log file, has not.
"""

from __future__ import annotations

import os
import sys

__all__ = ["outputs", "screens"]

_BOOT = "/proc/sys/kernel/random/boot_id"
_WITHOUT_CURSOR = ("", "dumb", "unknown")


def outputs() -> list[str]:
    """Return a name for each of stdout and stderr: equal only if they are one file."""
    try:
        with open(_BOOT) as file:
            machine = file.read().strip()
    except OSError:
        machine = os.uname().nodename
    return [f"{machine} {_file(number)}" for number in (1, 2)]


def screens() -> list[int]:
    """Return which of stdout (1) and stderr (2) are terminals that can redraw lines.

    None is with ``NO_COLOR`` or ``TERM=dumb``: then they are treated as pipes.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in _WITHOUT_CURSOR:
        return []
    open_ = {1: sys.__stdout__, 2: sys.__stderr__}  # a closed one's number may be another file's
    return [number for number, stream in open_.items() if stream and os.isatty(number)]


def _file(number: int) -> str:
    try:
        found = os.fstat(number)
    except OSError:  # it is closed
        return "closed"
    return f"{found.st_dev} {found.st_ino} {found.st_rdev}"
