"""Find a fork server of this host that is warm, or start one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence

from monarch._spi import python_command
from monarch.spmd.message import VERSION

__all__ = ["connect", "start"]

_CODE = (
    "from monarch.spmd.fork_server.server import main; main({fd}, {keep!r}, {path!r}, {modules!r})"
)
# Variables that differ between two shells of one user, and that no library reads.
_VOLATILE = frozenset(
    "_ OLDPWD PWD SHLVL COLUMNS LINES TERM WINDOWID SSH_CLIENT SSH_CONNECTION SSH_TTY".split()
)


def start(environ: Mapping[str, str], modules: Sequence[str]) -> socket.socket:
    """Start a fork server of one's own; return the connection to it. It ends with the connection.

    Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        _start(theirs, "", environ, modules, 0.0)
    return ours


def connect(environ: Mapping[str, str], modules: Sequence[str], keep: float) -> socket.socket:
    """Return a connection to a fork server with this environment and these modules.

    A new server is started if there is none. It answers once it has imported the modules, and ends
    `keep` seconds after its last launch. Raises PermissionError if the directory of the sockets
    belongs to another user, OSError if the server cannot be started.
    """
    folder = _folder()
    path = os.path.join(folder, _key(environ, modules))
    with _locked(folder):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            sock.connect(path)
            _check_peer(sock)
            return sock
        with contextlib.suppress(FileNotFoundError):  # of a server that was killed
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(path)
            listening.listen()
            _start(listening, path, environ, modules, keep)
        sock.connect(path)
        return sock


def _start(
    sock: socket.socket,
    path: str,
    environ: Mapping[str, str],
    modules: Sequence[str],
    keep: float,
) -> None:
    fd = sock.fileno()
    code = _CODE.format(fd=fd, keep=keep, path=path, modules=list(modules))
    process = subprocess.Popen(
        python_command(sys.executable, code),
        env=dict(environ),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[fd],
        start_new_session=True,
    )
    process.returncode = 0  # it outlives this process


def _key(environ: Mapping[str, str], modules: Sequence[str]) -> str:
    variables = sorted(item for item in environ.items() if item[0] not in _VOLATILE)
    python = [sys.executable, sys.version, sys.prefix]
    facts = [*python, __file__, VERSION, list(modules), variables]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _folder() -> str:
    """Return the directory of this user's sockets; create it. Raises PermissionError."""
    path = os.path.join(tempfile.gettempdir(), f"monarch-fork-servers-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionError(
            f"{path} is not a directory that only this user may enter: remove it, or set TMPDIR"
        )
    return path


@contextlib.contextmanager
def _locked(folder: str) -> Generator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _check_peer(sock: socket.socket) -> None:
    if hasattr(socket, "SO_PEERCRED"):
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", data)[1]
        if uid != os.getuid():
            raise PermissionError(f"the fork server belongs to another user ({uid})")
