"""Files of ``/proc`` of all processes of this machine.

``Path.glob`` is no substitute: it raises ProcessLookupError (of Python 3.10 to 3.12) if a process
exits between the listing and the look at its file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["files_of_processes"]


def files_of_processes(name: str) -> Iterator[Path]:
    """Yield the path of this file for each process; the process may have exited already."""
    for pid in os.listdir("/proc"):
        if pid.isdecimal():
            yield Path("/proc", pid, name)
