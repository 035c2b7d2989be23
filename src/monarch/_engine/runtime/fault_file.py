"""A file in which a run of tests finds what no caller gets to see.

A process whose environment has `MONARCH_FAULT_FILE` appends a record to the file of that name for
each internal error (one that a reactor survived, or that ended the loop of an actor), and for each
failure that reaches the root. The tests of this project set the variable, and fail the test that
ran.

A record is one line of JSON in one write: kind, pid, when it happened (seconds since the epoch; 0:
now) and text. It takes no lock and starts no thread.
"""

from __future__ import annotations

import contextlib
import json
import os

__all__ = ["VARIABLE", "note_error", "note_failure"]

VARIABLE = "MONARCH_FAULT_FILE"


def note_error(text: str) -> None:
    """An internal error was survived, or ended an actor."""
    _note("error", 0.0, text)


def note_failure(when: float, text: str) -> None:
    """A failure has reached the root; it happened then, on the clock of its host."""
    _note("failure", when, text)


def _note(kind: str, when: float, text: str) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    record = json.dumps([kind, os.getpid(), when, text]).encode() + b"\n"
    # Without descriptors or the right to write, what happened is still on stderr.
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, record)
        finally:
            os.close(fd)
