"""The users of a job: the scripts that are connected to its hosts.

Each script has a file of its own in the job's directory and holds a lock (``flock``) on it. The
script never releases the lock; the system does when the script exits, however it exits. So a file
whose lock is free was left behind. The content is for messages: script, process number, start of
the use.

Where the process number is meaningful, on the same machine and in the same container, the process
itself is checked instead. That check is as reliable as the lock, and some file systems have no
locks, or never grant them.

A child that the script forks shares the lock, and would keep the job in use after the script's
exit. So the child closes the file right after the fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from typing import NamedTuple

from monarch._spi import when_forked
from monarch.job.os_process import OsProcess

__all__ = ["User", "has_joined", "join", "part", "users"]

_PREFIX = "user."
_lock = threading.Lock()
_joined: dict[str, int] = {}  # descriptor of this script's file, by the job's directory


class User(NamedTuple):
    """A script that uses a job."""

    script: str
    pid: int
    since: float
    """The start time in seconds since 1970; only shown to people."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.script} (pid {self.pid}, since {since})"


def join(folder: str) -> None:
    """Register this process as a user of the job of this directory, until it exits or `part`."""
    with _lock:
        if folder in _joined:
            return
        name = f"{os.getpid()}.{time.monotonic_ns()}"
        draft = os.path.join(folder, f".{name}")
        here = OsProcess.of(os.getpid())
        who = {"script": _script(), "pid": here.pid, "started": here.started, "place": _place()}
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with contextlib.suppress(OSError):  # no locks here: others check the process instead
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            since = time.time()  # noqa: TID251 - shown to people
            os.write(fd, json.dumps({**who, "since": since}).encode())
            # The file gets its final name only now, so other scripts never see it unlocked.
            os.rename(draft, os.path.join(folder, _PREFIX + name))
        except BaseException:
            os.close(fd)
            os.unlink(draft)
            raise
        _joined[folder] = fd


def part(folder: str) -> None:
    """Unregister this process as a user of the job of this directory.

    The job may have been killed already, so that the directory no longer exists.
    """
    with _lock:
        fd = _joined.pop(folder, None)
        if fd is not None:
            os.close(fd)


def has_joined(folder: str) -> bool:
    """Whether this process is one of the users of the job of this directory."""
    return folder in _joined


def users(folder: str) -> list[User]:
    """Return the scripts that use the job of this directory now; this process may be one."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # the job was killed
        return []
    found: list[User] = []
    for name in names:
        if name.startswith(_PREFIX):
            with contextlib.suppress(FileNotFoundError):  # the job was killed meanwhile
                user = _look(os.path.join(folder, name))
                if user is not None:
                    found.append(user)
    return found


def _look(path: str) -> User | None:
    """Return the script of this file, or None if the script has exited."""
    with open(path, "rb") as file:
        who = json.loads(file.read())
        if who["started"] and who["place"] and who["place"] == _place():
            if not OsProcess(who["pid"], who["started"]).alive:
                return None
        else:
            # An error means that the lock is held, or that there are no locks: assume a user then.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
    return User(who["script"], who["pid"], who["since"])


def _script() -> str:
    """Return a name of this process for messages."""
    name = sys.argv[0] if sys.argv else ""
    if name.endswith(os.path.join("monarch", "cli", "__main__.py")):
        return "monarch"
    return {"": "a Python session", "-c": "python -c"}.get(name, name)


def _place() -> str:
    """Return an identifier of this machine and process namespace; empty if unknown.

    Process numbers mean the same in two processes with equal identifiers.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _forked() -> None:
    """Close the files in a child that user code forks: the jobs are used by the parent."""
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one
    for fd in _joined.values():
        os.close(fd)
    _joined.clear()


when_forked(_forked)
