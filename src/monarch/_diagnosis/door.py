"""The door by which ``monarch why`` asks a running script for a diagnosis.

It is a listening Unix socket in the abstract namespace: no file, no port, nothing to clean up. The
kernel says which user connects, and only the script's own user and root are answered; of the
others no byte is read. A connection brings no request: the answer is the diagnosis, as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch._spi import Reactor

__all__ = ["ask_script", "open_door", "running_scripts"]

_PREFIX = "@monarch/"
_SEEN = "/proc/net/unix"
_PATIENCE = 1.0  # seconds for processes that do not answer
_SENDING = 10.0
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
    if _user_of(connection) not in (os.getuid(), 0) or not _MOST.acquire(blocking=False):
        connection.close()
        return
    start_thread("monarch-why", lambda: _serve(connection))


def _serve(connection: socket.socket) -> None:
    from monarch._diagnosis.collect import collect

    try:
        with connection:
            connection.settimeout(_SENDING)
            connection.sendall(json.dumps(collect(_PATIENCE).to_dict()).encode())
    except OSError:
        return  # the command was ended
    finally:
        _MOST.release()


def _user_of(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    user: int = struct.unpack("3i", packed)[1]
    return user


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
    user = os.stat(f"/proc/{pid}").st_uid
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        sock.connect(f"\0monarch/{user}/{pid}")
        if _user_of(sock) not in (user, 0):
            raise PermissionError(f"the socket of process {pid} belongs to another user")
        data = bytearray()
        while chunk := sock.recv(1 << 16):
            data += chunk
    return bytes(data)
