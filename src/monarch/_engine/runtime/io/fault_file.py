"""A file in which a run of tests finds errors and failures that no caller sees.

A process whose environment has `MONARCH_FAULT_FILE` appends records to the file of that name: one
for each internal error (which a reactor survived, or which ended the loop of an actor), and one for
each failure that reaches the root. The tests of this project set the variable, and a test that
leaves a record fails.

A record is one line of JSON in one write: kind, pid, time of the event (seconds since 1970; 0: now)
and text. Writing takes no lock and starts no thread.
"""

from __future__ import annotations

import contextlib
import json
import os

__all__ = ["VARIABLE", "note_error", "note_failure"]

VARIABLE = "MONARCH_FAULT_FILE"


def note_error(text: str) -> None:
    """Record an internal error that was survived, or that ended an actor."""
    _note("error", 0.0, text)


def note_failure(when: float, text: str) -> None:
    """Record a failure that has reached the root; `when` is by the clock of its host."""
    _note("failure", when, text)


def _note(kind: str, when: float, text: str) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    record = json.dumps([kind, os.getpid(), when, text]).encode() + b"\n"
    # If the file cannot be opened, the event is on stderr all the same.
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, record)
        finally:
            os.close(fd)
