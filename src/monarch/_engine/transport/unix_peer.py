"""The process at the other end of a Unix socket, as the kernel knows it (SO_PEERCRED; Linux)."""

from __future__ import annotations

import socket
import struct

__all__ = ["peer_of"]

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process that connected, or began to listen, there."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user
