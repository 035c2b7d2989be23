"""Find a fork server of this host that is warm, or start one, or have one started by the host."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from monarch._spi import peer_of, python_command
from monarch.spmd.message import VERSION, Messages, send

__all__ = [
    "KEEPER",
    "NAME_LENGTH",
    "SOCKET",
    "check_peer",
    "connect",
    "reach",
    "start",
    "start_process",
]

KEEPER = "MONARCH_FORK_SERVERS"
"""The environment variable of a job's host with the directory of its `keeper`."""
SOCKET = "keeper"
"""The name of the keeper's socket in that directory."""
NAME_LENGTH = 24
"""Of the names of the servers' sockets."""

_CODE = (
    "from monarch.spmd.fork_server.server import main; "
    "main({fd}, {keep!r}, {path!r}, {modules!r}, {lifeline})"
)
_PATIENCE = 60.0  # seconds for the answer of a keeper
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
        # Its end is known by the connection.
        start_process(theirs.fileno(), "", environ, modules, 0.0).returncode = 0
    return ours


def connect(environ: Mapping[str, str], modules: Sequence[str], keep: float) -> socket.socket:
    """Return a connection to a fork server with this environment and these modules.

    A new server is started if there is none, on a host of a job by its `keeper`. It answers once it
    has imported the modules, and ends `keep` seconds after its last launch. Raises PermissionError
    if the directory of the sockets belongs to another user, OSError if the server cannot be
    started.
    """
    folder = _kept_folder()
    if folder:
        return _connect(folder, environ, modules, keep, _start_by_keeper)
    return _connect(_folder(), environ, modules, keep, start_process)


def reach(environ: Mapping[str, str], modules: Sequence[str], keep: float) -> socket.socket:
    """As `connect`, for a process whose children end with it.

    Without a keeper, and without a warm server, it starts one of its own.
    """
    folder = _kept_folder()
    if folder:
        return _connect(folder, environ, modules, keep, _start_by_keeper)
    try:
        return _connect(_folder(), environ, modules, keep, None)
    except FileNotFoundError:
        return start(environ, modules)


def start_process(
    fd: int,
    path: str,
    environ: Mapping[str, str],
    modules: Sequence[str],
    keep: float,
    *,
    python: str = sys.executable,
    lifeline: int = -1,
) -> subprocess.Popen[bytes]:
    """Start a fork server, with the descriptor of its socket; see `server.main`. Raises OSError."""
    code = _CODE.format(fd=fd, keep=keep, path=path, modules=list(modules), lifeline=lifeline)
    return subprocess.Popen(
        python_command(python, code),
        env=dict(environ),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[fd] if lifeline < 0 else [fd, lifeline],
        start_new_session=True,
    )


def _connect(
    folder: str,
    environ: Mapping[str, str],
    modules: Sequence[str],
    keep: float,
    starts: Callable[[int, str, Mapping[str, str], Sequence[str], float], Any] | None,
) -> socket.socket:
    """Connect to the server in this directory; without `starts` raise FileNotFoundError if none."""
    path = os.path.join(folder, _key(environ, modules))
    with _locked(folder), contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            sock.connect(path)
            check_peer(sock)
        except (FileNotFoundError, ConnectionRefusedError):
            if starts is None:
                raise FileNotFoundError(path) from None
            with contextlib.suppress(FileNotFoundError):  # of a server that was killed
                os.unlink(path)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
                listening.bind(path)
                listening.listen()
                started = starts(listening.fileno(), path, environ, modules, keep)
                if isinstance(started, subprocess.Popen):
                    started.returncode = 0  # it outlives this process
            sock.connect(path)
        stack.pop_all()
        return sock


def _kept_folder() -> str:
    """Return the directory of this host's keeper; an empty string if there is none.

    Raises PermissionError if the directory belongs to another user.
    """
    folder = os.environ.get(KEEPER, "")
    if not folder or not os.path.exists(os.path.join(folder, SOCKET)):  # its host has ended
        return ""
    _check_private(folder)
    return folder


def _start_by_keeper(
    fd: int, path: str, environ: Mapping[str, str], modules: Sequence[str], keep: float
) -> None:
    request: dict[str, Any] = {
        "op": "start",
        "python": sys.executable,
        "path": path,
        "environ": dict(environ),
        "modules": list(modules),
        "keep": keep,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_PATIENCE)
        sock.connect(os.path.join(os.path.dirname(path), SOCKET))
        check_peer(sock)
        send(sock, request, [fd])
        messages = Messages(sock)
        answers: list[tuple[dict[str, Any], list[int]]] = []
        try:
            while not answers:
                answers = messages.read()
        except EOFError:
            raise ConnectionError("the process of this host ends") from None
    if answers[0][0]["op"] != "started":
        raise OSError(f"this host cannot start a fork server: {answers[0][0]['text']}")


def _key(environ: Mapping[str, str], modules: Sequence[str]) -> str:
    variables = sorted(item for item in environ.items() if item[0] not in _VOLATILE)
    python = [sys.executable, sys.version, sys.prefix]
    facts = [*python, __file__, VERSION, list(modules), variables]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:NAME_LENGTH]


def _folder() -> str:
    """Return the directory of this user's sockets; create it. Raises PermissionError."""
    path = os.path.join(tempfile.gettempdir(), f"monarch-fork-servers-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _check_private(path)
    return path


def _check_private(path: str) -> None:
    status = os.lstat(path)
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionError(
            f"{path} is not a directory that only this user may enter: remove it, or set TMPDIR"
        )


@contextlib.contextmanager
def _locked(folder: str) -> Generator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def check_peer(sock: socket.socket) -> None:
    """Raise PermissionError if the peer is a process of another user."""
    if hasattr(socket, "SO_PEERCRED"):
        _, uid = peer_of(sock)
        if uid != os.getuid():
            raise PermissionError(f"the fork server or its client belongs to another user ({uid})")
