"""The users of a job: the scripts that are connected to its hosts.

Each has a file of its own in the job's directory, with a lock (``flock``) on it that it never gives
back: the system does, whatever becomes of the script. So a file whose lock can be had is one that
was left behind. Its content is for people: script, process, since when.

Where that number means something, on the same machine and in the same container, the process itself
is looked for. That is as sure, and does not depend on locks, which some file systems do not have
and some never grant. (A child that the script forks has the lock in common with it, and would keep
the job busy after the script's end; it closes the file first of all.)
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
_joined: dict[str, int] = {}  # directories of jobs, and our file in each


class User(NamedTuple):
    """A script that uses a job."""

    script: str
    pid: int
    since: float
    """Seconds since the epoch: for people, nothing depends on it."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.script} (pid {self.pid}, since {since})"


def join(folder: str) -> None:
    """This process uses the job of this directory from now on, until it ends or `part`."""
    with _lock:
        if folder in _joined:
            return
        name = f"{os.getpid()}.{time.monotonic_ns()}"
        draft = os.path.join(folder, f".{name}")
        here = OsProcess.of(os.getpid())
        who = {"script": _script(), "pid": here.pid, "started": here.started, "place": _place()}
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with contextlib.suppress(OSError):  # no locks here: then the process is looked for
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            since = time.time()  # noqa: TID251 - shown to people
            os.write(fd, json.dumps({**who, "since": since}).encode())
            os.rename(draft, os.path.join(folder, _PREFIX + name))  # others see it locked
        except BaseException:
            os.close(fd)
            os.unlink(draft)
            raise
        _joined[folder] = fd


def part(folder: str) -> None:
    """This process has done with the job of this directory, which may have been killed by now."""
    with _lock:
        fd = _joined.pop(folder, None)
        if fd is not None:
            os.close(fd)


def has_joined(folder: str) -> bool:
    """Whether this process is one of the users of the job of this directory."""
    return folder in _joined


def users(folder: str) -> list[User]:
    """The scripts that use the job of this directory now; this process may be one."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # it was killed
        return []
    found: list[User] = []
    for name in names:
        if name.startswith(_PREFIX):
            with contextlib.suppress(FileNotFoundError):  # it was killed meanwhile
                user = _look(os.path.join(folder, name))
                if user is not None:
                    found.append(user)
    return found


def _look(path: str) -> User | None:
    """The script of this file, if it still runs."""
    with open(path, "rb") as file:
        who = json.loads(file.read())
        if who["started"] and who["place"] and who["place"] == _place():
            if not OsProcess(who["pid"], who["started"]).alive:
                return None
        else:
            with contextlib.suppress(OSError):  # it is held, or there are no locks: to be sure
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
    return User(who["script"], who["pid"], who["since"])


def _script() -> str:
    """A name of this process for people."""
    name = sys.argv[0] if sys.argv else ""
    if name.endswith(os.path.join("monarch", "cli", "__main__.py")):
        return "monarch"
    return {"": "a Python session", "-c": "python -c"}.get(name, name)


def _place() -> str:
    """Where process numbers mean the same as here; empty: this system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _forked() -> None:
    """In a child that user code forks: the job is its parent's."""
    global _lock
    _lock = threading.Lock()  # somebody may have held it
    for fd in _joined.values():
        os.close(fd)
    _joined.clear()


when_forked(_forked)
