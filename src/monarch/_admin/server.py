"""The HTTP server: uvicorn on a thread of the observer, with bounds for slow and hostile clients.

A connection has ten seconds for each request line with headers, whose size is bounded; there are at
most 256 connections. A port that is taken is replaced by the next free one.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import socket
import ssl
import threading
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Server", "bind", "parse_address", "serve"]

_HEADER_TIME = 10.0
_CONNECTIONS = 256
_HEADER_BYTES = 32_768
_TRIES = 50  # ports after the wanted one
_STOPPING = 2


class _Protocol(H11Protocol):
    """HTTP/1.1 with a limit for the time until a request is complete, and errors in JSON."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > _CONNECTIONS:
            transport.abort()
            return
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and not self._in_request():
            self._expect()
        super().data_received(data)
        if self._in_request():
            self._cancel()

    def _in_request(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _expect(self) -> None:
        self._cancel()
        self._timer = self.loop.call_later(_HEADER_TIME, self._too_slow)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self._in_request() and not self.transport.is_closing():
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request; the connection is closed."""
        content = {"error": {"code": "bad_request", "message": "this is no HTTP request"}}
        body = json.dumps(content).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server:
    """An app that is served. `url` is its address, without the token.

    `wanted` is the port that was asked for; it differs from `port` if that one was taken.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        if ipaddress.ip_address(host).is_unspecified:
            shown = socket.gethostname()
        self.port: int = port
        self.url = f"{'https' if tls else 'http'}://{shown}:{port}"
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_STOPPING,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            proxy_headers=False,
        )
        config.load()
        config.ssl = tls
        self._server = uvicorn.Server(config)
        self._sock = sock
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._sock]))

    def is_alive(self) -> bool:
        """Whether it answers still."""
        return self._thread.is_alive()

    def close(self, timeout: float = 10.0) -> None:
        """Answer no more. Blocks until the thread has ended, or for `timeout` seconds."""
        self._server.should_exit = True
        self._thread.join(timeout)
        self._sock.close()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of an address.

    >>> parse_address("127.0.0.1:1729"), parse_address("[::1]:0"), parse_address("localhost")
    (('127.0.0.1', 1729), ('::1', 0), ('localhost', 1729))

    Raises ValueError for anything else.
    """
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and int(port) < 65536)):
        raise ValueError(f"{text!r} is no address; write it as 127.0.0.1:1729 or [::1]:1729")
    return host, int(port or 1729)


def bind(address: str) -> socket.socket:
    """Return a listening socket at an address, or at the next free port if that one is taken.

    Raises OSError if there is no such address, or no free port.
    """
    host, wanted = parse_address(address)
    family, _, _, _, where = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    for port in [*range(wanted, min(wanted + _TRIES, 65536)), 0]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((where[0], port, *where[2:]))
            sock.listen(128)
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or not port:
                raise
        else:
            sock.setblocking(False)
            return sock
    raise OSError(errno.EADDRINUSE, f"no free port at {host}")


def serve(app: ASGIApp, sock: socket.socket, tls: ssl.SSLContext | None = None) -> Server:
    """Serve an app on a listening socket (`bind`), on a thread of its own."""
    return Server(app, sock, tls)
