"""Private directories in a place that all users may write to, such as `/tmp`.

A private directory has a random name, belongs to this user and is closed to all others. A directory
without these properties is neither used nor removed: another user may have put it, or a link,
there. Removal opens each directory relative to its parent's descriptor and follows no link, so it
stays inside even if entries are replaced meanwhile.

Processes that need the directory hold a lock on it (``flock``). The system releases the lock when
they exit, for whatever reason; children may inherit the lock with the descriptor. A directory whose
lock is free is *stale*: its owners were killed before they could remove it. Stale directories are
removed by `remove_stale`, before a new one with the same prefix is made. So a prefix must only be
used for directories that stay locked as long as they are needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable

__all__ = ["enter", "make", "remove", "remove_content", "remove_stale"]

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 100


def make(prefix: str, parent: str) -> tuple[str, int]:
    """Make a directory in `parent`; return its path and a descriptor that holds its lock.

    Raises OSError if the directory cannot be made or locked.
    """
    for _ in range(_TRIES):
        path = _new(prefix, parent)
        try:
            fd = enter(path)
        except FileNotFoundError:  # another process has removed it as a stale one
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.lstat(path), os.fstat(fd)):
                return path, fd
        except (BlockingIOError, FileNotFoundError):  # another process took it for a stale one
            os.close(fd)
            with contextlib.suppress(OSError):
                os.rmdir(path)
        except OSError:  # the file system has no locks
            os.close(fd)
            os.rmdir(path)
            raise
    raise OSError(
        f"cannot lock a new directory in {parent}: another process locked or removed each of the "
        f"{_TRIES} that were made"
    )


def _new(prefix: str, parent: str) -> str:
    """Make a directory with a random name, as `tempfile.mkdtemp` does, whose import takes 5 ms."""
    while True:
        name = prefix + os.urandom(4).hex()  # noqa: TID251 - no seed: several agents start at once
        path = os.path.join(os.path.abspath(parent), name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            return path


def remove_stale(prefix: str, parent: str, ours: Callable[[str], bool] | None = None) -> None:
    """Remove the stale directories in `parent` that `make` made with this prefix.

    `ours` has the same meaning as in `remove_content`.
    """
    # the names that `_new` makes, and that `tempfile.mkdtemp` made in earlier releases
    made = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}")
    for name in os.listdir(parent):
        if made.fullmatch(name):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):  # it belongs to another user, or is locked
                fd = enter(path)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_content(path, fd, ours)
                finally:
                    os.close(fd)


def remove_content(path: str, fd: int, ours: Callable[[str], bool] | None = None) -> None:
    """Remove the entries of a directory, open as `fd`, then the directory itself if it is empty.

    `ours` returns whether to remove the entry of a name, with everything below; None removes all.
    Entries that cannot be removed are left.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(fd):
            if ours is None or ours(name):
                remove(fd, name)
        if os.path.samestat(os.lstat(path), os.fstat(fd)):
            os.rmdir(path)


def enter(path: str) -> int:
    """Open a directory that belongs to this user and is closed to all others.

    Return its descriptor. Raises OSError if the directory is not private, or cannot be opened.
    """
    fd = os.open(path, _OPEN)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise PermissionError(f"{path} is not closed to other users")
    return fd


def remove(parent: int, name: str) -> None:
    """Remove an entry of an open directory, with all below; a link is removed, not followed."""
    with contextlib.suppress(OSError):
        fd = os.open(name, _OPEN, dir_fd=parent)  # OSError: the entry is not a directory
        try:
            for entry in os.listdir(fd):
                remove(fd, entry)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)
        return
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=parent)
