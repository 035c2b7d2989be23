"""The jobs of this user on this machine, and what earlier scripts left here.

A job has a directory, see `folder`: its name says the kind of the job. The processes of its hosts
have the path of the job's secret in their environment.

Left behind is only what nothing alive can need:

* A directory whose lock is free, of the kinds whose hosts hold the lock (`_LOCKED`). The hosts of
  other kinds are no processes of this machine, so the directory has to outlive all local processes.
  Their scheduler is asked whether the job has ended (`_ASKED`). If it cannot be asked, the
  directory is kept. So are the directories of all further kinds.
  A directory of warm processes is a host's own, as are those of nodes and of agents.
* A lock file of `saved` that no process holds.
* A mount point whose process was killed together with its guard.
* A host process whose job has no directory: the secret is lost with it, so no script can connect to
  the host again. The directory is looked up as the process sees it, which may be in a container.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import signal
import stat
import tempfile
from collections.abc import Generator
from typing import NamedTuple

from monarch._mounts.mount_point import dead_mounts, unmount_dead
from monarch._spi import own_folder
from monarch.job.os_process import OsProcess, wait_for
from monarch.job.users import User, users
from monarch.spmd.fork_server.keeper import PREFIX

__all__ = ["Leftover", "LocalJobFolder", "host_processes", "job_folders", "leftovers", "remove"]

_LOCKED = (
    *("monarch-process-job-", "monarch-ssh-job-", "monarch-launched-job-"),
    *("monarch-node-", "monarch-scratch-", PREFIX),
)
_ASKED = {
    "monarch-kubernetes-job-": "monarch.job.kubernetes.leftover",
    "monarch-skypilot-job-": "monarch.job.skypilot.leftover",
    "monarch-slurm-job-": "monarch.job.slurm.leftover",
}
_FOLDER = re.compile(r"monarch-([a-z0-9_]+(?:-[a-z0-9_]+)*)-job-[a-z0-9_]{8}")
_SECRET = b"MONARCH_JOB_SECRET_FILE="
_HOST = b"from monarch.job.process import serve"
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL


class LocalJobFolder(NamedTuple):
    """A job with a directory on this machine."""

    path: str
    kind: str
    """The kind of the job in the name of the directory, such as "process"."""
    since: float
    """The start time in seconds since 1970."""
    hosts: list[OsProcess]
    """The processes of its hosts on this machine."""
    users: list[User]
    """The scripts that use it."""


class Leftover(NamedTuple):
    """Something that an earlier script left on this machine."""

    what: str
    """"directory", "lock file", "mount" or "process"."""
    path: str
    """The path; the number of a process."""
    process: OsProcess | None = None
    kept: str = ""
    """Why it is kept although no process of this machine uses it; empty if it can be removed."""


def job_folders() -> list[LocalJobFolder]:
    """Return the jobs of this user that have a directory on this machine, by their start."""
    processes = host_processes()
    found: list[LocalJobFolder] = []
    for path in _entries():
        kind = _FOLDER.fullmatch(os.path.basename(path))
        status = _own(path)
        if kind is not None and status is not None and stat.S_ISDIR(status.st_mode):
            hosts = [process for process, folder in processes if folder == path]
            since = _made(path, status)
            found.append(LocalJobFolder(path, kind[1], since, hosts, users(path)))
    return sorted(found, key=lambda job: job.since)


def _made(path: str, status: os.stat_result) -> float:
    try:  # the secret is written once; the directory changes with its users
        return os.stat(os.path.join(path, "secret")).st_mtime
    except OSError:
        return status.st_mtime


def host_processes() -> list[tuple[OsProcess, str]]:
    """Return the processes of this user that are hosts of a `ProcessJob`, and their directories."""
    found: list[tuple[OsProcess, str]] = []
    names = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    for name in filter(str.isdigit, names):
        with contextlib.suppress(OSError):  # it has just exited, or belongs to another user
            if os.stat(f"/proc/{name}").st_uid != os.getuid():
                continue
            process = OsProcess.of(int(name))
            if _HOST not in _content(name, "cmdline"):
                continue
            for variable in _content(name, "environ").split(b"\0"):
                if variable.startswith(_SECRET):
                    path = os.fsdecode(variable[len(_SECRET) :])
                    found.append((process, os.path.dirname(path)))
    return found


def _content(number: str, what: str) -> bytes:
    with open(f"/proc/{number}/{what}", "rb") as file:
        return file.read()


def leftovers() -> list[Leftover]:
    """Return what earlier scripts of this user left on this machine."""
    found: list[Leftover] = []
    for path in _entries():
        name = os.path.basename(path)
        if name.startswith(_LOCKED):
            with _taken(path) as fd:
                if fd is not None:
                    found.append(Leftover("directory", path))
        elif asked := next((_ASKED[prefix] for prefix in _ASKED if name.startswith(prefix)), ""):
            with _taken(path) as fd:
                if fd is not None:
                    found += _judged(path, asked)
        elif name.startswith(f"monarch_lock_{os.getuid()}_"):
            with _taken(path) as fd:
                if fd is not None:
                    found.append(Leftover("lock file", path))
    found += [Leftover("mount", path) for path in dead_mounts()]
    for process, folder in host_processes():
        with contextlib.suppress(OSError):
            root = f"/proc/{process.pid}/root"
            os.stat(f"{root}/proc")  # raises unless the process' file system can be seen
            if not os.path.lexists(root + folder) and process.alive:
                found.append(Leftover("process", str(process.pid), process))
    return found


def _judged(path: str, module: str) -> list[Leftover]:
    """Ask the scheduler of a job about its directory; return it unless it is needed."""
    try:
        left: bool = importlib.import_module(module).is_left(path)
    except (ImportError, RuntimeError) as error:
        return [Leftover("directory", path, kept=str(error))]
    return [Leftover("directory", path)] if left else []


def remove(one: Leftover) -> bool:
    """Remove it, unless it is in use meanwhile. Return whether it is removed. May block."""
    if one.kept:
        return False
    if one.process is not None:
        one.process.send(signal.SIGTERM)
        for process in wait_for([one.process], _GRACE):
            process.send(signal.SIGKILL)
        return not wait_for([one.process], _GRACE)
    if one.what == "mount":
        return unmount_dead(one.path)
    with _taken(one.path) as fd:
        if fd is not None:
            if one.what == "directory":
                own_folder.remove_content(one.path, fd)
            else:
                os.unlink(one.path)
    return not os.path.lexists(one.path)


@contextlib.contextmanager
def _taken(path: str) -> Generator[int | None]:
    """Hold the lock of an entry of this user; None if another process holds it, or it has none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = -1
    try:
        status = _own(path)
        if status is None or not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            yield None
            return
        fd = os.open(path, flags)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use, or the file system has no locks
            yield None
            return
        same = os.path.samestat(os.fstat(fd), os.lstat(path))
        yield fd if same and not users(path) else None
    except (FileNotFoundError, PermissionError):
        yield None
    finally:
        if fd >= 0:
            os.close(fd)


def _own(path: str) -> os.stat_result | None:
    """Return the status of an entry that belongs to this user and is closed to others."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    private = status.st_uid == os.getuid() and not status.st_mode & 0o077
    return status if private else None


def _entries() -> list[str]:
    """Return the paths of all entries of the directories where jobs are, sorted."""
    parents = {os.path.realpath(tempfile.gettempdir()), os.path.realpath("/tmp")}  # noqa: S108 - see `folder`
    found: list[str] = []
    for parent in sorted(parents):
        with contextlib.suppress(OSError):
            found += [os.path.join(parent, name) for name in sorted(os.listdir(parent))]
    return found
