"""The door by which ``monarch why`` asks a running script for a diagnosis.

It is a listening Unix socket in the abstract namespace: no file, no port, nothing to clean up. The
kernel says which user connects, and only the script's own user and root are answered; of the
others no byte is read. A connection brings a request, one short line of JSON. The answer to most is
the diagnosis, as JSON. Other features serve requests of their own by a hook, such as a profile.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from monarch._spi import peer_of

if TYPE_CHECKING:
    from monarch._spi import Reactor

__all__ = ["ask_script", "knock", "open_door", "running_scripts"]

_PREFIX = "@monarch/"
_SEEN = "/proc/net/unix"
_PATIENCE = 1.0  # seconds for processes that do not answer
_SENDING = 10.0
_ASKING = 2.0  # seconds for the request
_LONGEST = 4096  # bytes of a request
_MOST = threading.BoundedSemaphore(4)  # diagnoses at a time


def open_door(reactor: Reactor) -> None:
    """Open the door of this process, which `reactor` watches; without effect where it cannot."""
    from monarch._spi import when_forked

    if sys.platform != "linux":  # no other system has the abstract namespace
        return
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0monarch/{os.getuid()}/{os.getpid()}")
        sock.listen(4)
        sock.setblocking(False)
    except OSError:  # refused by a sandbox, or the name belongs to another pid namespace
        sock.close()
        return
    when_forked(sock.close)
    reactor.call_soon(reactor.register, sock.fileno(), functools.partial(_accept, sock))


def _accept(sock: socket.socket, _mask: int) -> None:
    from monarch._spi import start_thread

    try:
        connection, _ = sock.accept()
    except (BlockingIOError, ConnectionError):
        return
    if peer_of(connection)[1] not in (os.getuid(), 0) or not _MOST.acquire(blocking=False):
        connection.close()
        return
    start_thread("monarch-why", lambda: _serve(connection))


def _serve(connection: socket.socket) -> None:
    from monarch._diagnosis.collect import collect
    from monarch._spi import find

    try:
        with connection:
            asked = _request(connection)
            connection.settimeout(_SENDING)
            if asked["ask"] == "diagnosis":
                connection.sendall(json.dumps(collect(_PATIENCE).to_dict()).encode())
                return
            serve = find(f"door {asked['ask']}")
            if serve is not None:
                serve(connection, asked)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # the command was ended, or is no command
    finally:
        _MOST.release()


def _request(connection: socket.socket) -> dict[str, Any]:
    connection.settimeout(_ASKING)
    data = bytearray()
    while not data.endswith(b"\n"):
        chunk = connection.recv(_LONGEST)
        if not chunk or len(data) > _LONGEST:
            raise ValueError("no request")
        data += chunk
    asked: dict[str, Any] = json.loads(data)
    return asked


def running_scripts() -> list[int]:
    """Return the pids of the scripts of this user (root: of all users) on this machine."""
    with open(_SEEN, encoding="utf-8", errors="replace") as file:
        names = [line.rpartition(" ")[2].strip() for line in file]
    found = [name[len(_PREFIX) :].split("/") for name in names if name.startswith(_PREFIX)]
    mine = os.getuid()
    return sorted({int(pid) for user, pid in found if mine in (0, int(user))})


def ask_script(pid: int, timeout: float) -> bytes:
    """Return the diagnosis of the script with this pid, as JSON.

    Raises ConnectionRefusedError or FileNotFoundError if there is no such script, PermissionError
    if the door belongs to another user, and TimeoutError after `timeout` seconds.
    """
    with knock(pid, {"ask": "diagnosis"}, timeout) as sock:
        data = bytearray()
        while chunk := sock.recv(1 << 16):
            data += chunk
    return bytes(data)


def knock(pid: int, request: dict[str, Any], timeout: float) -> socket.socket:
    """Send a request to the script with this pid; return the connection. Raises as `ask_script`."""
    user = os.stat(f"/proc/{pid}").st_uid
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(f"\0monarch/{user}/{pid}")
        if peer_of(sock)[1] not in (user, 0):
            raise PermissionError(f"the socket of process {pid} belongs to another user")
        sock.sendall(json.dumps(request).encode() + b"\n")
    except BaseException:
        sock.close()
        raise
    return sock
