"""`OsProcess`: a process of this machine that another script started, without mistaking it.

A process number is used again after a while. With the moment of its start it is a name for one
process; Linux tells it, in clock ticks since boot. Elsewhere the number has to do.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["OsProcess", "descendants", "wait_for", "watch"]

_log = logging.getLogger("monarch.job")

_GONE = "ZX"  # states of those that are dead, and only not waited for


class OsProcess(NamedTuple):
    """A process, and when it started (0: this system does not tell)."""

    pid: int
    started: int = 0

    @staticmethod
    def of(pid: int) -> OsProcess:
        """The process that has this number now."""
        found = _look(pid)
        return OsProcess(pid, found[2] if found else 0)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        if os.path.isdir("/proc/self"):
            found = _look(self.pid)
            return found is not None and found[0] not in _GONE and found[2] == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's: the number was used again
            return False
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:  # just now
                return


def descendants(roots: Iterable[OsProcess]) -> list[OsProcess]:
    """All processes below these, as of now; none where the system does not tell."""
    children: dict[int, list[OsProcess]] = {}
    names = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    for name in names:
        if name.isdigit() and (found := _look(int(name))):
            _, parent, started = found
            children.setdefault(parent, []).append(OsProcess(int(name), started))
    found_below: list[OsProcess] = []
    unseen = list(roots)
    while unseen:
        below = children.get(unseen.pop().pid, [])
        found_below += below
        unseen += below
    return found_below


def wait_for(processes: Iterable[OsProcess], timeout: float) -> list[OsProcess]:
    """Wait until they have ended, at most about `timeout` seconds; those that have not."""
    left = [process for process in processes if process.alive]
    pause, waited = 0.005, 0.0
    while left and waited < timeout:
        threading.Event().wait(pause)
        waited += pause
        pause = min(0.05, 2 * pause)
        left = [process for process in left if process.alive]
    return left


def watch(process: subprocess.Popen[bytes]) -> None:
    """Aside, wait for the end of a child, so that it is no zombie, and log an unexpected one."""

    def run() -> None:
        status = process.wait()
        if status not in (0, -signal.SIGTERM):
            _log.warning("worker process %d of a job ended with status %d", process.pid, status)

    threading.Thread(target=run, name="monarch-job-watch", daemon=True).start()


def _look(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start of a process; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20:  # it went while it was read
        return None
    return fields[0].decode(), int(fields[1]), int(fields[19])
