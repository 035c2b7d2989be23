"""The door of a job: the Unix socket where the next driver of the job connects.

A driver with a grace period (`state`) opens the door: a Unix socket, named like the job,
in a directory of the user (mode 0700). It hands the socket to its host agent, which outlives the
driver. A process that connects proves the job's secret, as between hosts (`handshake_io`). Then the
connection becomes the driver's link to the agent. The first frame on it is JSON, ``welcome`` or
``refused``, and holds all that the driver has to know.

The file stays when the agent is killed. So a job exists only if its door accepts a connection. A
driver that opens a door replaces a file at which no process accepts connections.

The directory is ``$XDG_RUNTIME_DIR/pymonarch``, or ``pymonarch-<user id>`` in the temporary
directory where there is no such variable.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Generator
from typing import Any

from monarch._spi import (
    PATIENCE,
    Arrival,
    ChannelAddr,
    Entrance,
    Greeting,
    HandshakeError,
    Link,
    Reactor,
    direct_way,
    environment,
    introduce,
    key_name,
    listener_names,
    meant,
    path_end,
)

__all__ = ["Rendezvous", "answers", "check_job_id", "dismiss", "jobs", "knock", "open_door"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LONGEST_PATH = 107  # of a Unix socket's name
_WELCOME_LIMIT = 1 << 30
_ENDING = ".door"


def check_job_id(job: str) -> str:
    """Return `job` if it is a valid name for a job. Raises ValueError otherwise."""
    if not _NAME.fullmatch(job):
        raise ValueError(
            f"{job!r} cannot be a job id: it has 1 to 64 letters, digits and -_., and begins with "
            "a letter or digit"
        )
    return job


def jobs() -> list[str]:
    """Return the jobs of this user on this machine whose doors exist; some may have ended."""
    try:
        names = os.listdir(_folder())
    except FileNotFoundError:
        return []
    return sorted(name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING))


def answers(job: str) -> bool:
    """Whether the job exists: its driver lives, or its agent waits for another driver."""
    return _answers(_path(check_job_id(job)))


def open_door(job: str) -> tuple[socket.socket, str]:
    """Return a socket that listens for the next driver, and its path, which the server removes.

    Raises RuntimeError if the job exists, ValueError for an invalid name, OSError where there is no
    place for a socket (PermissionError if another user could replace it).
    """
    path = _path(check_job_id(job), make=True)
    with _alone(os.path.dirname(path)):
        if _answers(path):
            raise RuntimeError(
                f"there is a job {job!r} already: take it over with reattach({job!r}), or choose "
                "another job_id"
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX)
        try:
            with _spelled(path) as name:
                sock.bind(name)
            sock.listen(16)
        except BaseException:
            sock.close()
            raise
    return sock, path


def knock(job: str, key: bytes, timeout: float) -> tuple[socket.socket, dict[str, Any]]:
    """Take over a job without a driver; return the link to its agent, and the first message.

    Blocks for at most about `timeout` seconds. Raises LookupError if there is no such job,
    RuntimeError if it has a driver or refuses, TimeoutError.
    """
    sock = _dial(job, key, {"job": job, "pid": os.getpid()}, timeout)
    try:
        message = _first_message(sock, timeout)
        if message is None:
            raise RuntimeError(f"cannot re-attach to job {job!r}: it has just ended")
        if message["op"] == "refused":
            raise RuntimeError(f"cannot re-attach to job {job!r}: {message['reason']}")
    except BaseException:
        sock.close()
        raise
    return sock, message


def dismiss(job: str, key: bytes, timeout: float) -> None:
    """End a job that has lost its driver; return when it has ended. Raises as `knock`."""
    with _dial(job, key, {"job": job, "pid": os.getpid(), "end": True}, timeout) as sock:
        message = _first_message(sock, timeout)
        if message is not None:
            raise RuntimeError(f"cannot end job {job!r}: {message['reason']}")


def _dial(job: str, key: bytes, purpose: dict[str, Any], timeout: float) -> socket.socket:
    path = _path(check_job_id(job))
    try:
        with _spelled(path) as name:
            # Without records: frames bring descriptors, and no other user can open the file.
            address = ChannelAddr.parse(f"ipc://{name}")
            sock, end = direct_way(address, timeout)
            try:
                sock.settimeout(min(timeout, PATIENCE))
                introduce(sock, key, purpose, meant(address, end))
            except BaseException:
                sock.close()
                raise
    except (FileNotFoundError, ConnectionRefusedError):
        others = ", ".join(repr(name) for name in jobs() if _answers(_path(name))) or "none"
        raise LookupError(
            f"there is no job {job!r} on this machine (jobs of this user here: {others})"
        ) from None
    except HandshakeError as error:
        raise RuntimeError(f"job {job!r} refused this process: {error}") from error
    return sock


def _first_message(sock: socket.socket, timeout: float) -> dict[str, Any] | None:
    """Return the agent's first message, sent before any answer of ours; None at EOF."""
    link = Link(sock, "the job", None, _WELCOME_LIMIT, _WELCOME_LIMIT)
    scratch = memoryview(bytearray(1 << 16))
    deadline = environment.current.now() + timeout
    while True:
        left = deadline - environment.current.now()
        if left <= 0 or not select.select([sock], [], [], left)[0]:
            raise TimeoutError(
                f"the host agent of the job did not answer within {timeout:g} s; it may be stopped "
                "by a signal, or very busy"
            )
        for frame in link.receive(scratch):
            message: dict[str, Any] = json.loads(frame.body)
            return message
        if link.lost is not None:
            return None


class Rendezvous:
    """The agent's side of the door: admits processes that know the secret.

    Args:
        reactor: watches the socket.
        sock: a listening socket, see `open_door`.
        path: of the socket; `close` removes the file.
        key: the secret.
        knocked: called with an authenticated connection, and its purpose.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        path: str,
        key: bytes,
        knocked: Callable[[socket.socket, dict[str, Any]], None],
    ) -> None:
        self._reactor = reactor
        self._path = path
        self._end = path_end(path)
        self._keys = {key_name(key): key}
        self._knocked = knocked
        self._entrance = Entrance(reactor, sock, self._came)

    def _came(self, sock: socket.socket, _address: Any) -> None:
        names = listener_names(sock, end=self._end)
        Greeting(self._reactor, sock, self._keys.get, self._arrived, lambda _why: None, names)

    def _arrived(self, arrival: Arrival) -> None:
        assert isinstance(arrival.sock, socket.socket)  # there is no TLS at this door
        self._knocked(arrival.sock, arrival.purpose)

    def close(self) -> None:
        """Stop listening, and remove the file."""
        self._entrance.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


# -- the place of the socket ---------------------------------------------------------------------


def _folder() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return os.path.join(runtime, "pymonarch")
    return os.path.join(tempfile.gettempdir(), f"pymonarch-{os.getuid()}")


def _path(job: str, *, make: bool = False) -> str:
    folder = _folder()
    if make:
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder, 0o700)
    with contextlib.suppress(FileNotFoundError):  # no job of this user has had a door yet
        status = os.lstat(folder)
        own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not own or status.st_mode & 0o077:
            remedy = f"chmod 700 {folder}" if own else "have it removed, or set XDG_RUNTIME_DIR"
            raise PermissionError(
                f"{folder} must be a directory of this user (now: user {status.st_uid}) that is "
                f"closed to others (mode 0700): {remedy}"
            )
    return os.path.join(folder, job + _ENDING)


@contextlib.contextmanager
def _spelled(path: str) -> Generator[str]:
    """Yield a name for this path that is short enough for a socket. Raises ValueError."""
    folder, name = os.path.split(path)
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
    elif sys.platform == "linux":
        fd = os.open(folder, os.O_RDONLY)
        try:
            yield f"/proc/self/fd/{fd}/{name}"
        finally:
            os.close(fd)
    else:
        raise ValueError(f"no socket can be called {path}: it is too long; set XDG_RUNTIME_DIR")


@contextlib.contextmanager
def _alone(folder: str) -> Generator[None]:
    """Hold a lock, so that two drivers do not open the same door."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            with _spelled(path) as name:
                sock.connect(name)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True
