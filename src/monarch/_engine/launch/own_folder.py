"""Directories of this user's processes in a place that is everybody's, such as `/tmp`.

One has a random name, belongs to this user and is closed to all others. A directory that is not
like that is neither used nor removed: another user may have put it, or a link, there. Removal goes
from descriptor to descriptor and follows no link, so that it stays inside whatever is replaced
meanwhile.

Those who need the directory hold a lock on it (``flock``), which the system takes back when they
end, whatever ends them; children may inherit it with the descriptor. A directory whose lock is free
is *stale*: its owners were killed before they could remove it. The next process that makes one with
the same prefix removes it first. So a prefix is for directories that are locked as long as they are
needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Callable

__all__ = ["enter", "make", "remove", "remove_content", "remove_stale"]

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 100


def make(prefix: str, parent: str) -> tuple[str, int]:
    """A new directory in `parent`, and a descriptor that holds the lock of it.

    Raises OSError if there can be none, or none with a lock.
    """
    for _ in range(_TRIES):
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)  # mode 0700
        fd = enter(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.lstat(path), os.fstat(fd)):
                return path, fd
        except (BlockingIOError, FileNotFoundError):  # another process takes it for a stale one
            os.close(fd)
            with contextlib.suppress(OSError):
                os.rmdir(path)
        except OSError:  # no locks on this file system
            os.close(fd)
            os.rmdir(path)
            raise
    raise OSError(f"no lock of a directory in {parent} can be had")


def remove_stale(prefix: str, parent: str, ours: Callable[[str], bool] | None = None) -> None:
    """Remove the directories in `parent` that `make` made with this prefix, and that are stale.

    `ours`: as that of `remove_content`.
    """
    made = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}")  # as `mkdtemp` does it
    for name in os.listdir(parent):
        if made.fullmatch(name):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):  # it is another user's, or needed
                fd = enter(path)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_content(path, fd, ours)
                finally:
                    os.close(fd)


def remove_content(path: str, fd: int, ours: Callable[[str], bool] | None = None) -> None:
    """Remove what is in a directory, open as `fd`, then the directory if nothing is left.

    `ours`: whether an entry of this name is to be removed, with all below; None: each is.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(fd):
            if ours is None or ours(name):
                remove(fd, name)
        if os.path.samestat(os.lstat(path), os.fstat(fd)):
            os.rmdir(path)


def enter(path: str) -> int:
    """A descriptor of a directory that is this user's alone; raises OSError if it is not."""
    fd = os.open(path, _OPEN)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise PermissionError(f"{path} is not closed to other users")
    return fd


def remove(parent: int, name: str) -> None:
    """Remove an entry of an open directory, and all below; a link is removed, not followed."""
    with contextlib.suppress(OSError):
        fd = os.open(name, _OPEN, dir_fd=parent)  # OSError: it is no directory
        try:
            for entry in os.listdir(fd):
                remove(fd, entry)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)
        return
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=parent)
