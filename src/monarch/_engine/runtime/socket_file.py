"""The file of a Unix socket that a worker listens at.

The system leaves it when the process ends, and refuses to make it again. So one where no process
accepts connections is replaced. Two workers that start at the same time do not take each other's
for such a one: each looks, binds and begins to listen while it holds a lock on a file beside it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
from collections.abc import Generator

from monarch._engine.runtime import driver as drivers

__all__ = ["listen_at", "remove"]

_PATIENCE = 5.0  # seconds for another that is about to listen, or to remove its file
_PAUSE = 0.01


def listen_at(path: str, backlog: int) -> socket.socket:
    """A socket that listens there. Raises OSError: EADDRINUSE if a process does already."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.startswith("\0"):  # no file
            sock.bind(path)
            sock.listen(backlog)
            return sock
        with _alone(path):
            if _is_left(path):
                os.unlink(path)
            sock.bind(path)
            sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def remove(path: str) -> None:
    """Remove the file, unless a process listens there (again); for one that has just ended."""
    with contextlib.suppress(OSError), _alone(path):
        if _is_left(path):
            os.unlink(path)


def _is_left(path: str) -> bool:
    """Whether this is the socket of a process of this user that has ended."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        return False
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:  # it has no room for more, but listens
            return False
    return False


@contextlib.contextmanager
def _alone(path: str) -> Generator[None]:
    """Hold the lock for this path."""
    name = f"{path}.lock"
    deadline = drivers.current.now() + _PATIENCE
    while (fd := _take(name)) is None:
        if drivers.current.now() > deadline:
            raise OSError(errno.EADDRINUSE, f"another process holds the lock {name}", path)
        select.select([], [], [], _PAUSE)
    try:
        yield
    finally:
        os.unlink(name)
        os.close(fd)


def _take(name: str) -> int | None:
    """The lock of this file, which only its user can open; None if another process has it."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.lstat(name), os.fstat(fd)):
            return fd
    except (BlockingIOError, FileNotFoundError):  # it is held, or was removed when it was released
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
