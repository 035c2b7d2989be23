"""A listening socket on a reactor, which accepts connections and survives a lack of descriptors.

A process without free descriptors cannot accept, and a connection that waits raises an event again
and again. So the socket is not watched for `_PAUSE` seconds then. A warning is logged, and not
repeated until a connection is accepted.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

from monarch._engine.runtime.io.reactor import Reactor

__all__ = ["Entrance"]

_PAUSE = 0.25  # seconds; a handshake may take 5
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger("monarch.worker")


class Entrance:
    """Accepts the connections of one listening socket, on the thread of `reactor`.

    Args:
        reactor: watches the socket.
        sock: a listening socket, owned by this object.
        came: called with each connection and the peer's address.
    """

    def __init__(
        self, reactor: Reactor, sock: socket.socket, came: Callable[[socket.socket, Any], None]
    ) -> None:
        sock.setblocking(False)
        self._reactor = reactor
        self._sock = sock
        self._came = came
        self._fd = sock.fileno()
        self._scarce = False
        reactor.register(self._fd, self._accept)

    def close(self) -> None:
        """Stop listening."""
        self._reactor.unregister(self._fd)
        self._sock.close()

    def _accept(self, _mask: int) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno not in _SCARCE:
                raise
            if not self._scarce:
                self._scarce = True
                text = (
                    "cannot accept connections (%s), so new ones wait; raise the limit (ulimit -n)"
                )
                _log.warning(text, error.strerror)
            self._reactor.watch(self._fd, reads=False, writes=False)
            self._reactor.call_later(_PAUSE, self._resume)
            return
        self._scarce = False
        self._came(sock, address)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._reactor.watch(self._fd, reads=True, writes=False)
