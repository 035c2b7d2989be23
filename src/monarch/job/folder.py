"""The directory of a job on this machine: its secret, and what its hosts printed.

Nobody else may enter it (mode 0700). The job's own secret is made for it and passed on by its path
only; whoever has to know it elsewhere gets it over a channel that shows it to nobody.

The script that starts the job holds a lock on the directory until it ends or kills the job, and so
do the processes that keep the hosts, where the kind of job passes it on (`lock_of`). If all of them
are killed, the next job of that kind removes the directory (`remove_stale`).
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
    "remove_folder",
    "remove_stale",
    "secret_file",
]

_LONGEST_PATH = 100  # of a Unix socket: systems differ between 104 and 108
_LAST = 2000  # characters

_locks: dict[str, int] = {}


def make_folder(prefix: str) -> str:
    """A new one, with a fresh secret in it; short enough for the names of sockets."""
    parent = _parent(prefix)
    try:
        folder, lock = own_folder.make(prefix, parent)
        _locks[folder] = lock
    except OSError:  # there are no locks
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    fd = os.open(secret_file(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return folder


def lock_of(folder: str) -> list[int]:
    """The descriptor that locks it, to pass on to what keeps a host; none without locks."""
    return [_locks[folder]] if folder in _locks else []


def remove_folder(folder: str) -> None:
    """Remove it, when all that was there has ended."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


def remove_stale(prefix: str) -> None:
    """Remove those of jobs of this user whose script and hosts were killed.

    For kinds of jobs whose hosts hold the lock.
    """
    own_folder.remove_stale(prefix, _parent(prefix))


def secret_file(folder: str) -> str:
    """Where the secret is."""
    return os.path.join(folder, "secret")


def log_file(folder: str, number: int) -> str:
    """Where the output of a host goes."""
    return os.path.join(folder, f"{number}.log")


def last_words(folder: str, number: int) -> str:
    """What a host printed last; empty if nothing."""
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
    """In a child that user code forks: the job is its parent's."""
    while _locks:
        os.close(_locks.popitem()[1])


when_forked(_forked)
