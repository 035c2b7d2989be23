"""The wait status of a process that has exited, in the words of a failure report."""

from __future__ import annotations

import os
import signal

from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, STOPPED, SYSTEM

__all__ = ["describe", "signal_name", "why_exited"]


def why_exited(status: int | None, error: str | None = None) -> tuple[str, str, str]:
    """Return the kind, text and cause of an exit, as for a `Verdict`.

    `error`, if any, is the reason for which the process could not be started.
    """
    if error is not None or status is None:
        return FAILED, f"error creating proc: {error}", INFRASTRUCTURE
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return STOPPED, "process exited cleanly", SYSTEM
    text = f"the process this actor was running on exited with non-zero code {code}"
    if code < 0:
        text = f"the process this actor was running on failed: Killed(sig={-code})"
        text += f", {signal_name(-code)}"
    return FAILED, text, SYSTEM


def describe(status: int) -> str:
    """Return the exit code, or the name of the signal."""
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else signal_name(-code)


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
