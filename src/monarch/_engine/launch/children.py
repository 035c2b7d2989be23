"""The child processes of this process: those it started, and orphans that it adopted.

Processes that user code starts inside a proc (a fork, a command, workers of a DataLoader) must not
outlive the proc, however the proc exits. So procs, launchers and the host agent are *subreapers*
(`adopt_orphans`): when a process exits, its children become children of the nearest subreaper above
it that still runs. While a proc runs, all that it started stays below it, daemons included. Hence a
child of a launcher or of the agent that was not started there was started by a proc that has
exited. Such an orphan is killed.

The kernel reparents the children of a process before it sends SIGCHLD for the process. So looking
for orphans after each SIGCHLD misses none: descendants of an orphan arrive once the orphan has
exited. Signals are sent by pid to children only: the pid of a child cannot be reused before the
child is reaped here.

Three kinds of orphans clean up after other processes and then exit: multiprocessing's resource
tracker, torch's shared-memory manager, and the guard of a FUSE mount. The manager serves all
processes that map the memory, and exits after the last of them; processes that lose it abort. So it
stays while this process runs. The others are given some time, counted from when no other orphan is
left. Directories of exited procs are removed when no orphan is left but managers (see `scratch`).

A process that runs as another user cannot be killed, and stays. On systems other than Linux there
are no subreapers: orphans become children of the system's first process.
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
"""How many seconds processes that clean up after others get, after the others have exited."""

_GUARD_GRACE = 30.0  # for one that exits by itself, and is slow only where the machine is busy

PATIENCE = 1.0
"""How many seconds all processes get to exit after a signal."""

_CHANGES = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
_JANITORS = {
    b"multiprocessing.resource_tracker": GRACE,
    b"torch_shm_manager": math.inf,
    b"_mounts/unmounter.py": _GUARD_GRACE,
}
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_prctl: Any = None  # kept: in a forked child the look-up would write to, and copy, a hundred pages


def _control(option: int, value: int) -> None:
    global _prctl
    if sys.platform == "linux":
        if _prctl is None:
            _prctl = ctypes.CDLL(None).prctl
        _prctl(option, value)


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent exits (Linux)."""
    _control(_PR_SET_PDEATHSIG, signal_number)


def continue_without_parent() -> None:
    """Have the kernel continue this process, if it is stopped, when its parent exits (Linux)."""
    _control(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits (Linux)."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)


class Children:
    """Reaps the children of this process and kills orphans; see the module.

    To be made on the main thread, since it handles SIGCHLD.

    `own` holds the pids of children that were started here, `debris` the directories of exited
    procs, which are removed when no orphan is left. `fileno` is readable when a child exited, was
    stopped or continued. Then call `reap`, and `sweep` once more urgent work is done.
    """

    def __init__(self) -> None:
        self.own: set[int] = set()
        self.debris: list[str] = []
        self._spared: dict[int, float] = {}  # orphans that clean up -> when they are killed
        self._graces: dict[int, float] = {}  # ... -> how many seconds they get
        self._ending = False
        self.fileno, self._wake = os.pipe()
        os.set_blocking(self.fileno, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def leave_in_child(self) -> None:
        """In a forked child: restore SIGCHLD and close the pipe."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.fileno)
        os.close(self._wake)

    def reap(self) -> list[tuple[int, int]]:
        """Return the pid and wait status of own children that changed state, in order.

        A change is an exit, a stop or a continuation. Exited orphans are reaped as well.
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
        """Reap an own child that is about to exit; blocks until it has exited."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self.own.discard(pid)

    def sweep(self) -> float:
        """Kill the adopted orphans; return when to call again even if no child exits.

        The result is a time of `time.monotonic`, infinity for never.
        """
        orphans = [pid for pid in _children() if pid not in self.own]
        graces = {pid: self._graces.get(pid) or _grace(pid) for pid in orphans}
        if self._ending:
            graces = {pid: GRACE if grace == math.inf else grace for pid, grace in graces.items()}
        janitors = self._graces = {pid: grace for pid, grace in graces.items() if grace}
        now = time.monotonic()
        if len(janitors) < len(orphans):
            self._spared = dict.fromkeys(janitors, math.inf)
        else:
            self._spared = {
                pid: min(self._spared.get(pid, math.inf), now + grace)
                for pid, grace in janitors.items()
            }
        for pid in orphans:
            if self._spared.get(pid, 0.0) <= now:
                if pid in janitors:
                    self._spared[pid] = math.inf
                # PermissionError: the orphan runs as another user, and stays.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if all(grace == math.inf for grace in graces.values()):
            while self.debris:
                remove_scratch(self.debris.pop())
        return min(self._spared.values(), default=math.inf)

    def end(self, *, ask: bool = False) -> None:
        """Kill all children, own and adopted, and those adopted meanwhile; wait until they exited.

        With `ask`, own children first get a SIGTERM and up to `PATIENCE` seconds to exit. Blocks
        for at most `PATIENCE` seconds, with `ask` for twice as long.
        """
        self._ending = True
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
    """Return the pids of all children, including those that exited and are not yet reaped."""
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
    """As `_children`, on a kernel that was built without PROC_CHILDREN and has no such list."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"/proc/{name}/stat") as file:
                    # The command's name, in parentheses, may contain any character.
                    parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    found.append(int(name))
    return found


def _grace(pid: int) -> float:
    """Return how many seconds an orphan gets to clean up; 0: it does not."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((grace for name, grace in _JANITORS.items() if name in command), 0.0)
