"""The directory of a job on this machine: the job's secret, and the output of its hosts.

Only this user may enter the directory (mode 0700). The secret is created for the job and passed on
by its path only. A remote process receives the secret over a channel that no other user can read.

The script that starts the job holds a lock on the directory until the script exits or kills the
job. Kinds of jobs that pass the lock on (`lock_of`) have it held by the processes that keep the
hosts, too. If all these processes are killed, the next job of that kind removes the directory
(`remove_stale`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile

from monarch._spi import own_folder, when_forked

__all__ = [
    "last_words",
    "lock_of",
    "log_file",
    "make_folder",
    "note",
    "noted",
    "proc_logs",
    "remove_folder",
    "remove_stale",
    "secret_file",
    "use_secret",
]

_LONGEST_PATH = 100  # bytes of a Unix socket's path: systems allow 104 to 108
_LAST = 2000  # bytes at the end of a log that an error shows

_SECRET_VARIABLE = "MONARCH_JOB_SECRET_FILE"  # noqa: S105 - the name of the variable

_locks: dict[str, int] = {}
_before: dict[str, str | None] = {}  # the variable's value before `use_secret`


def make_folder(prefix: str) -> str:
    """Create a directory with a new secret in it; its path is short enough for Unix sockets."""
    parent = _parent(prefix)
    try:
        folder, lock = own_folder.make(prefix, parent)
        _locks[folder] = lock
    except OSError:  # the file system has no locks
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    fd = os.open(secret_file(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return folder


def lock_of(folder: str) -> list[int]:
    """Return the descriptor that holds the lock, to pass on to a host; no item without locks."""
    return [_locks[folder]] if folder in _locks else []


def use_secret(folder: str) -> None:
    """Have this process prove to know the job's secret when it attaches through a gateway.

    A gateway is a worker of the job, and a client with a gateway has no other job. `remove_folder`
    takes it back.
    """
    _before.setdefault(folder, os.environ.get(_SECRET_VARIABLE))
    os.environ[_SECRET_VARIABLE] = secret_file(folder)


def remove_folder(folder: str) -> None:
    """Remove a job's directory, once all processes that use it have exited."""
    if folder in _before:
        before = _before.pop(folder)
        if os.environ.get(_SECRET_VARIABLE) == secret_file(folder):
            del os.environ[_SECRET_VARIABLE]
            if before is not None:
                os.environ[_SECRET_VARIABLE] = before
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


def remove_stale(prefix: str) -> None:
    """Remove the directories of jobs of this user whose script and hosts were killed.

    Only for kinds of jobs whose hosts hold the lock.
    """
    own_folder.remove_stale(prefix, _parent(prefix))


def secret_file(folder: str) -> str:
    """Return the path of the job's secret."""
    return os.path.join(folder, "secret")


def note(folder: str, name: str, text: str) -> None:
    """Keep a fact about the allocation in the directory, for processes without the job."""
    draft = os.path.join(folder, f"{name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        file.write(text)
    os.replace(draft, os.path.join(folder, name))


def noted(folder: str, name: str) -> str:
    """Return a fact that `note` has kept; an empty string if there is none."""
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def log_file(folder: str, number: int) -> str:
    """Return the path of a host's output."""
    return os.path.join(folder, f"{number}.log")


def proc_logs(folder: str) -> str:
    """Return the directory with the output of each process on the job's hosts."""
    return os.path.join(folder, "logs")


def last_words(folder: str, number: int) -> str:
    """Return the end of a host's output; an empty string if there is none."""
    try:
        with open(log_file(folder, number), "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LAST))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _parent(prefix: str) -> str:
    parent = tempfile.gettempdir()
    longest = os.path.join(parent, f"{prefix}12345678", "12345678")
    return parent if len(longest) < _LONGEST_PATH else "/tmp"  # noqa: S108 - see `own_folder`


def _forked() -> None:
    """Close the locks in a child that user code forks: the jobs belong to the parent."""
    while _locks:
        os.close(_locks.popitem()[1])


when_forked(_forked)
