"""The size of a host's log: a host keeps its output in two files of a bounded size.

All processes of a host write to the same open file, in append mode. So the file cannot be replaced
by another: it is copied to the former one (``0.log.1``), and then emptied. Lines that are written
between the two steps are lost; the alternative, a process through which all output goes, would
hold up all processes when it is slow, and end their output when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Sequence

__all__ = ["LARGEST", "former", "keep_small", "rotate"]

LARGEST = 64 << 20
"""The size in bytes above which a log is rotated."""

_PERIOD = 5.0  # seconds between two looks at the size


def former(path: str) -> str:
    """Return the path of the output before that in `path`."""
    return f"{path}.1"


def rotate(path: str, largest: int = LARGEST) -> bool:
    """Move the content of a log to the former one, if it is larger. Return whether it was."""
    with contextlib.suppress(OSError):  # it was removed with the job, or the disk is full
        if os.path.getsize(path) > largest:
            draft = f"{path}.draft"
            shutil.copyfile(path, draft)
            os.truncate(path, 0)
            os.replace(draft, former(path))
            return True
    return False


def keep_small(paths: Sequence[str], stop: threading.Event) -> None:
    """Rotate each of these logs whenever it is too large, until `stop` is set. Blocks."""
    while not stop.wait(_PERIOD):
        for path in paths:
            rotate(path)
