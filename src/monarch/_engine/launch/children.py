"""The children of this process: those it started, and orphans that came to it.

What user code starts inside a proc (a fork, a command, workers of a DataLoader) must not outlive
the proc, however it ends. So procs, their launchers and the host agent *adopt* (`adopt_orphans`): a
process whose parent ends becomes the child of the nearest of them above it that lives. As long as a
proc lives, what it started stays below it, daemons too. Hence whatever comes to a launcher, or to
the agent, without having been started there was started by a proc that is gone, and is killed.

The kernel moves the children of a process before it announces its end, so a look after each end
(SIGCHLD) misses nobody: those below an orphan come when it has ended. Only children are ever
signalled by pid, since their pids cannot be in use by others before they are reaped here.

Two kinds of orphans clean up after the others and then end by themselves: multiprocessing's
resource tracker and torch's shared-memory manager. They have `GRACE` seconds for it once the others
are gone. Directories of the dead are removed then, too (see `scratch`).

A process that runs as another user cannot be killed, and stays. On systems other than Linux there
are no orphans: they belong to the system's first process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from monarch._engine.launch.scratch import remove_scratch

__all__ = ["Children", "adopt_orphans", "continue_without_parent", "die_with_parent"]

GRACE = 0.3
"""Seconds for those that clean up after others."""

PATIENCE = 1.0
"""Seconds for all to be gone at the end."""

_CHANGES = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
_JANITORS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_prctl: Any = None  # looked up once: a child that looks it up writes to a hundred pages


def _control(option: int, value: int) -> None:
    global _prctl
    if sys.platform == "linux":
        if _prctl is None:
            _prctl = ctypes.CDLL(None).prctl
        _prctl(option, value)


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux)."""
    _control(_PR_SET_PDEATHSIG, signal_number)


def continue_without_parent() -> None:
    """Have the kernel continue this process, if it is stopped, when its parent ends (Linux)."""
    _control(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose parent ends (Linux)."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)


class Children:
    """See the module. To be made on the main thread: it takes over SIGCHLD.

    `own` holds the pids of those that were started here, `debris` the directories of the dead,
    which are removed when no orphan is left. `fileno` is readable when a child ended or was
    stopped: then `reap`, and some time later, when more urgent things are done, `sweep`.
    """

    def __init__(self) -> None:
        self.own: set[int] = set()
        self.debris: list[str] = []
        self._spared: dict[int, float] = {}  # those that clean up, and how long they may
        self.fileno, self._wake = os.pipe()
        os.set_blocking(self.fileno, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def leave_in_child(self) -> None:
        """In a forked child, which has no children."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.fileno)
        os.close(self._wake)

    def reap(self) -> list[tuple[int, int]]:
        """What became of own children since, in order: pid and wait status.

        They ended, were stopped, or go on. Orphans are reaped as well.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self.fileno, 4096)
        changed: list[tuple[int, int]] = []
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, _CHANGES))[0]:
                pid, status = found
                if pid in self.own:
                    if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                        self.own.discard(pid)
                    changed.append(found)
        return changed

    def await_end(self, pid: int) -> None:
        """Reap an own child that is ending; blocks until it has."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self.own.discard(pid)

    def sweep(self) -> float:
        """Kill the orphans that came. When to come again though no child ends; infinity: never."""
        orphans = [pid for pid in _children() if pid not in self.own]
        janitors = {pid for pid in orphans if pid in self._spared or _cleans_up(pid)}
        now = time.monotonic()
        if len(janitors) < len(orphans):
            self._spared = dict.fromkeys(janitors, math.inf)
        else:
            self._spared = {
                pid: min(self._spared.get(pid, math.inf), now + GRACE) for pid in janitors
            }
        for pid in orphans:
            if self._spared.get(pid, 0.0) <= now:
                if pid in janitors:
                    self._spared[pid] = math.inf
                # PermissionError: another user's. It stays.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if not orphans:
            while self.debris:
                remove_scratch(self.debris.pop())
        return min(self._spared.values(), default=math.inf)

    def end(self, *, ask: bool = False) -> None:
        """End all, own or not, and whatever comes then. Blocks for at most `PATIENCE` seconds.

        With `ask`, the own get a SIGTERM and that time for themselves first.
        """
        if ask:
            self._signal_own(signal.SIGTERM)
            self._wait(lambda: not self.own)
        self._signal_own(signal.SIGKILL)
        self._wait(lambda: not _children())

    def _signal_own(self, number: int) -> None:
        for pid in self.own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait(self, done: Callable[[], bool]) -> None:
        poll = select.poll()
        poll.register(self.fileno, select.POLLIN)
        now = time.monotonic()
        deadline = now + PATIENCE
        while now < deadline:
            self.reap()
            again = min(self.sweep(), deadline)
            if done():
                return
            poll.poll(max(0.0, again - now) * 1000)
            now = time.monotonic()


def _children() -> list[int]:
    """The children of this process, those that ended and are not reaped yet included."""
    if sys.platform != "linux":
        return []
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            if thread == str(os.getpid()):
                return _children_by_parent()
    return found


def _children_by_parent() -> list[int]:
    """The same on a kernel that keeps no list of them (it was built without PROC_CHILDREN)."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"/proc/{name}/stat") as file:
                    # The command's name, in parentheses, may hold anything.
                    parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    found.append(int(name))
    return found


def _cleans_up(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(name in command for name in _JANITORS)
