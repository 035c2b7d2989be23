"""The first bytes of a connection between hosts: the handshake, then what it is for.

`dial` is the blocking side, for a thread of its own. `Greeting` is the listening side, driven by a
reactor: any number of strangers may be in the middle of theirs, and nobody waits for them. A
stranger has `PATIENCE` seconds for all of it; what it sends has a fixed size until it has proved
itself, and is bounded afterwards.

After the handshake the dialer says what the connection is for: a length and a JSON object of at
most `_MOST` bytes. The rest of the connection belongs to the channel.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from monarch._engine.base.address import ChannelAddr
from monarch._engine.protocol.handshake import Dialer, HandshakeError, Listener
from monarch._engine.runtime.reactor import WRITE, Reactor, Timer

__all__ = ["PATIENCE", "Greeting", "dial", "listen", "python_version"]

PATIENCE = 5.0
"""Seconds that a handshake may take, name look-up and connection not included."""

_MOST = 4096
_LENGTH = struct.Struct("<H")


def python_version() -> tuple[int, int]:
    """What must be the same on both sides."""
    return sys.version_info[0], sys.version_info[1]


def _nonce() -> bytes:
    return os.urandom(32)  # noqa: TID251 - must not repeat in any universe


def connect(address: ChannelAddr, timeout: float) -> socket.socket:
    """A connected socket. Raises OSError."""
    if address.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            sock.connect(_unix_path(address))
        except BaseException:
            sock.close()
            raise
        return sock
    return socket.create_connection((address.host, address.port), timeout)


def listen(address: ChannelAddr) -> socket.socket:
    """A listening socket. Raises OSError."""
    if address.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(_unix_path(address))
    else:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
    sock.listen(1024)
    return sock


def dial(
    address: ChannelAddr, key: bytes, purpose: Mapping[str, Any], timeout: float
) -> socket.socket:
    """An authenticated connection. Blocks; raises OSError or HandshakeError."""
    sock = connect(address, timeout)
    try:
        sock.settimeout(min(timeout, PATIENCE))
        side = Dialer(key, _nonce(), python_version())
        sock.sendall(side.hello)
        while side.wants:
            data = sock.recv(side.wants)
            if not data:
                raise HandshakeError("it closed the connection during the handshake")
            sock.sendall(side.receive(data))
        said = json.dumps(purpose).encode()
        sock.sendall(_LENGTH.pack(len(said)) + said)
    except BaseException:
        sock.close()
        raise
    return sock


class Greeting:
    """One stranger at the door. `accepted(sock, purpose)`, or `refused(why)`, is called once.

    Args:
        reactor: drives it.
        sock: the accepted connection, which is handed on or closed.
        find_key: from a key name to a secret, see `Listener`.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        find_key: Callable[[bytes], bytes | None],
        accepted: Callable[[socket.socket, dict[str, Any]], None],
        refused: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._reactor = reactor
        self._sock = sock
        self._side = Listener(find_key, _nonce(), python_version())
        self._accepted = accepted
        self._refused = refused
        self._said = bytearray()
        self._timer: Timer = reactor.call_later(PATIENCE, self._too_slow)
        reactor.register(sock.fileno(), self._ready)

    def _ready(self, mask: int) -> None:
        if not mask & ~WRITE:
            return
        try:
            self._read()
        except HandshakeError as error:
            with contextlib.suppress(OSError):  # it is told if it still listens
                self._sock.send(self._side.farewell)
            self._close(str(error))
        except (OSError, ValueError, TypeError) as error:
            self._close(f"{type(error).__name__}: {error}")

    def _read(self) -> None:
        wants = self._side.wants or self._missing()
        data = self._sock.recv(wants)
        if not data:
            raise HandshakeError("it closed the connection during the handshake")
        if self._side.wants:
            # (What is sent here fits into any socket's buffer.)
            self._sock.send(self._side.receive(data))
            return
        self._said += data
        if self._missing():
            return
        purpose: dict[str, Any] = json.loads(self._said[_LENGTH.size :])
        if type(purpose) is not dict:
            raise TypeError("a purpose that is no object")
        self._stop()
        self._accepted(self._sock, purpose)

    def _missing(self) -> int:
        """Bytes of the purpose that are yet to come."""
        if len(self._said) < _LENGTH.size:
            return _LENGTH.size - len(self._said)
        (size,) = _LENGTH.unpack_from(self._said)
        if size > _MOST:
            raise ValueError(f"a purpose of {size} bytes")
        return int(size) + _LENGTH.size - len(self._said)

    def _too_slow(self) -> None:
        self._close(f"it did not prove itself within {PATIENCE:g} s")

    def _close(self, why: str) -> None:
        self._stop()
        self._sock.close()
        self._refused(why)

    def _stop(self) -> None:
        self._timer.cancel()
        self._reactor.unregister(self._sock.fileno())


def _unix_path(address: ChannelAddr) -> str:
    name = address.name
    return "\0" + name[1:] if name.startswith("@") else name
