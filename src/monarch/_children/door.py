"""The door of a process, at which its children join the program.

The door is a listening Unix socket in the abstract namespace. A connection becomes the control link
of the child with the host agent: the parent reads nothing from it, and passes it on. So a child can
send as soon as it is connected. The kernel says which user connects, and a process of another user
is refused. A child binds its end to a name that has its uid (`end_of`), which `accept` returns.

The door is opened by the first fork, or when the parent first pickles an `Invitation` for a child
that is not forked. multiprocessing hands that on: a process copies the configuration of its parent,
as it does with the key for connections. joblib's processes are such processes.

Rejected: an environment variable. A child inherits it from the server of a forkserver, which was
started before, and any program started by `subprocess` would take part in this one. Rejected: to
put the door into the pickles of handles. Other objects need the runtime, too, such as RDMA buffers,
and messages between processes would carry it for nothing.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._spi import inheritance, is_simulated, peer_of, settings, start_agent, when_forked

if TYPE_CHECKING:
    from monarch._spi import Proc

__all__ = ["Invitation", "end_of", "hand_on", "invitation", "open_to_children"]

KEY = "monarch"
"""The key of the invitation in the configuration of multiprocessing's processes."""

_BACKLOG = 1024  # children that connect at once
_END = "\0monarch-child"


class Invitation(NamedTuple):
    """The name of the door, and the specification and settings of a child that is not forked."""

    door: str
    spec: dict[str, Any]
    config: dict[str, str]


class _Door:
    """The door of this process; see the module."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self.uid = proc.uid
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self.name = f"\0monarch-children/{proc.uid:x}/{os.urandom(8).hex()}"  # noqa: TID251 - a name

    def open(self) -> None:
        """Listen, unless this process does. Raises OSError where it cannot."""
        with self._lock:
            if self._sock is not None:
                return
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.bind(self.name)
                sock.listen(_BACKLOG)
            except BaseException:
                sock.close()
                raise
            sock.setblocking(False)
            self._sock = sock
            self._proc.reactor.call_soon(
                self._proc.reactor.register, sock.fileno(), functools.partial(self._accept, sock)
            )

    def close(self) -> None:
        """Close the socket in a forked child; the door is the parent's."""
        if self._sock is not None:
            self._sock.close()

    def _accept(self, listener: socket.socket, _mask: int) -> None:
        try:
            sock, name = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        with sock:
            uid = _uid_at(name)
            if uid is not None and peer_of(sock)[1] == os.geteuid():
                start_agent()
                self._proc.tell_agent({"op": "join", "uid": uid}, [sock.fileno()])

    def __reduce__(self) -> tuple[Any, ...]:
        self.open()
        return _invited, (self.name, inheritance(self._proc), settings.snapshot())


_door: _Door | None = None
_invitation: Invitation | None = None


def _invited(door: str, spec: dict[str, Any], config: dict[str, str]) -> Invitation:
    """Note the invitation when a child loads its configuration: then it loads its arguments."""
    global _invitation
    _invitation = Invitation(door, spec, config)
    return _invitation


def hand_on(proc: Proc) -> None:
    """Let children of this process join its program from now on, as processes beside `proc`."""
    global _door
    # No other system has the abstract namespace.
    if sys.platform != "linux" or is_simulated():
        return
    if _door is None:
        when_forked(_leave)
    if _door is None or _door.uid != proc.uid:
        _door = _Door(proc)
    if proc.agent is not None:  # the agent is just starting, so that the import costs no time
        processes: Any = importlib.import_module("multiprocessing.process")
        processes.current_process()._config[KEY] = _door


def open_to_children() -> None:
    """Open the door before a fork."""
    if _door is not None:
        _door.open()


def _leave() -> None:
    if _door is not None:
        _door.close()


def invitation() -> Invitation | None:
    """Return what the parent of this process has handed on; None if it is no child of a program."""
    if _door is not None:  # this process was forked, and has the rest already
        return Invitation(_door.name, {}, {})
    return _invitation


def end_of(uid: int) -> str:
    """Return the name to which the child with this uid binds its end."""
    return f"{_END}/{uid:x}"


def _uid_at(name: object) -> int | None:
    """Return the uid of the child whose end has this name; None if it is no child's."""
    text = name.decode(errors="replace") if isinstance(name, bytes) else ""
    what, _, uid = text.partition("/")
    try:
        return int(uid, 16) if what == _END and len(uid) <= 16 else None
    except ValueError:
        return None
