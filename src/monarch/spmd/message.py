"""Messages of a launch to its fork servers and ranks: JSON, with open descriptors beside it."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["VERSION", "Messages", "send"]

VERSION = 2
"""Of the messages: a fork server of another version is not asked."""

_HEAD = struct.Struct("!IB")  # the size of the message, and the number of its descriptors
_MOST = 1 << 24  # bytes of a message
_MOST_FDS = 8


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message; blocks while the socket is full. Raises OSError if the peer has exited."""
    data = json.dumps(message).encode()
    data = _HEAD.pack(len(data), len(fds)) + data
    sent = socket.send_fds(sock, [data], list(fds)) if fds else 0
    if sent < len(data):  # a peer that has all may have closed its end
        sock.sendall(data[sent:])


class Messages:
    """The messages that arrive on a socket, each with the descriptors that came with it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self._fds: list[int] = []

    def read(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Read once, and return the complete messages. Raises EOFError at the end of the stream."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, _MOST_FDS)
        except ConnectionResetError:
            data, fds = b"", []
        self._fds += fds
        if not data:
            self.close()
            raise EOFError
        self._data += data
        found: list[tuple[dict[str, Any], list[int]]] = []
        while len(self._data) >= _HEAD.size:
            size, count = _HEAD.unpack_from(self._data)
            if size > _MOST:
                raise EOFError
            if len(self._data) < _HEAD.size + size:
                break
            text = bytes(self._data[_HEAD.size : _HEAD.size + size])
            del self._data[: _HEAD.size + size]
            found.append((json.loads(text), self._fds[:count]))
            del self._fds[:count]
        return found

    def close(self) -> None:
        """Close the descriptors that no message has taken."""
        while self._fds:
            os.close(self._fds.pop())
