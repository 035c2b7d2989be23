"""`OsProcess`: an unambiguous reference to a process of this machine that another script started.

Systems reuse process numbers. A process number together with the start time names one process.
Linux reports the start time, in clock ticks since boot. On other systems the number alone is used.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterable
from typing import NamedTuple

from monarch.job.format import savable

__all__ = ["OsProcess", "descendants", "wait_for", "watch"]

_log = logging.getLogger("monarch.job")

_GONE = "ZX"  # states of a process that has exited but was not yet waited for


@savable
class OsProcess(NamedTuple):
    """A process number, and the start time of the process (0: the system does not report it)."""

    pid: int
    started: int = 0

    @staticmethod
    def of(pid: int) -> OsProcess:
        """Return the process that has this number now."""
        found = _look(pid)
        return OsProcess(pid, found[2] if found else 0)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        if os.path.isdir("/proc/self"):
            found = _look(self.pid)
            return found is not None and found[0] not in _GONE and found[2] == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # a process of another user: the number was reused
            return False
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs."""
        if self.alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:  # the process just exited
                return


def descendants(roots: Iterable[OsProcess]) -> list[OsProcess]:
    """Return all current descendants of these processes; none on systems without ``/proc``."""
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
    """Wait until the processes have exited, for at most about `timeout` seconds.

    Return the processes that still run.
    """
    left = [process for process in processes if process.alive]
    pause, waited = 0.005, 0.0
    while left and waited < timeout:
        threading.Event().wait(pause)
        waited += pause
        pause = min(0.05, 2 * pause)
        left = [process for process in left if process.alive]
    return left


def watch(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child on a background thread, and log an unexpected exit status.

    Without the wait the child would stay a zombie.
    """

    def run() -> None:
        status = process.wait()
        if status not in (0, -signal.SIGTERM):
            _log.warning("worker process %d of a job ended with status %d", process.pid, status)

    threading.Thread(target=run, name="monarch-job-watch", daemon=True).start()


def _look(pid: int) -> tuple[str, int, int] | None:
    """Return state, parent and start time of a process; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20:  # the process exited while its file was read
        return None
    return fields[0].decode(), int(fields[1]), int(fields[19])
