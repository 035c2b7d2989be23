"""Stop a process for a while: a process stops only when the system schedules it next."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["stop_process"]


def stop_process(pid: int) -> None:
    """Suspend a process, and wait until it is. ``SIGCONT`` continues it."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until, f"process {pid} does not stop"
        time.sleep(0.001)
