"""The file of a Unix socket that a worker listens at.

The system keeps the file when the process exits, and then refuses to create it again. So a file is
replaced if no process accepts connections there. Two workers that start at the same time must not
each take the other's new file for an old one. Therefore a worker checks the file, binds and begins
to listen while it holds a lock on a file beside it.
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

from monarch._engine.runtime.io import environment as environments

__all__ = ["listen_at", "remove"]

_PATIENCE = 5.0  # seconds to wait for another process that is binding, or removing its file
_PAUSE = 0.01


def listen_at(path: str, backlog: int) -> socket.socket:
    """Return a listening socket. Raises OSError: EADDRINUSE if a process listens there already."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.startswith("\0"):  # an abstract name has no file
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
    """Remove the file after a worker has ended, unless a process listens there (again)."""
    with contextlib.suppress(OSError), _alone(path):
        if _is_left(path):
            os.unlink(path)


def _is_left(path: str) -> bool:
    """Whether this is a socket of this user whose process has exited."""
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
        except OSError:  # its backlog is full, so a process listens
            return False
    return False


@contextlib.contextmanager
def _alone(path: str) -> Generator[None]:
    """Hold the lock for this path."""
    name = f"{path}.lock"
    deadline = environments.current.now() + _PATIENCE
    while (fd := _take(name)) is None:
        if environments.current.now() > deadline:
            raise OSError(errno.EADDRINUSE, f"another process holds the lock {name}", path)
        select.select([], [], [], _PAUSE)
    try:
        yield
    finally:
        os.unlink(name)
        os.close(fd)


def _take(name: str) -> int | None:
    """Take the lock file, which only its user can open; None if another process holds it."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.lstat(name), os.fstat(fd)):
            return fd
    except (BlockingIOError, FileNotFoundError):  # held, or just removed by its holder
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
