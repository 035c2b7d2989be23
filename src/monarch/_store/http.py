"""SQL by HTTP, with the standard library only: ``POST /api/query`` on the loopback interface.

The token is a part of the address, so that programs which add ``/api/query`` to it need to know
nothing about it; a header ``Authorization: Bearer`` does as well.

A connection has a thread. Those that have not yet sent a whole request are few: for a new one, the
oldest is closed. So clients that send slowly, or nothing, keep out only each other.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import json
import socket
import threading
from typing import Any, cast

from monarch._store.query import Queries, QueryError

__all__ = ["QueryServer"]

_LARGEST = 1 << 20  # bytes of a request
_HEAD = 32 << 10  # bytes of a request's headers
_PATIENCE = 10.0  # seconds for a client that sends or reads nothing
_READING = 32  # connections whose request is not complete
_AT_ONCE = 128  # connections


class QueryServer:
    """Answers queries by HTTP, on threads of its own.

    Args:
        queries: what answers them.
        token: the key.
        port: the port that is wanted; another one if it is taken.
    """

    def __init__(self, queries: Queries, token: str, port: int = 0) -> None:
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except OSError:
            self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.queries, self._server.token = queries, token
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{token}"
        """The address, which contains the token."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="sql", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    queries: Queries
    token: str

    def __init__(self, *args: Any) -> None:
        self._changing = threading.Lock()
        self._reading: dict[Any, None] = {}
        self._open: set[Any] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            free = len(self._open) < _AT_ONCE
            if free:
                self._open.add(request)
                self._reading[request] = None
            oldest = next(iter(self._reading), None) if len(self._reading) > _READING else None
            if oldest is not None:
                del self._reading[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        if free:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def has_read(self, request: Any) -> None:
        """The request of a connection is complete."""
        with self._changing:
            self._reading.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._reading.pop(request, None)
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of connections: the client has closed it, or is too slow."""


class _Bounded:
    """The part of a file that reads requests, up to a size of their headers."""

    def __init__(self, file: Any) -> None:
        self._left = _HEAD
        self.read, self.close = file.read, file.close
        self._readline = file.readline

    def readline(self, size: int) -> bytes:
        """Return the next line. Raises LineTooLong, once the lines have too many bytes."""
        line: bytes = self._readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("headers")
        return line


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _PATIENCE
    server_version = "monarch"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        bounded: Any = _Bounded(self.rfile)
        self.rfile = bounded

    def do_GET(self) -> None:
        path = self._path()
        if path == "/api/health":
            self._answer(200, {"status": "ok"})
        elif path == "/api/query":
            self._answer(405, {"error": "send the statement by POST, as {'sql': '...'}"})
        elif path is not None:
            self._answer(404, {"error": f"there is no {path}; POST /api/query answers SQL"})

    def do_POST(self) -> None:
        path = self._path()
        if path is None:
            return
        if path != "/api/query":
            self._answer(404, {"error": f"there is no {path}; POST /api/query answers SQL"})
            return
        status, content = self._query()
        self._answer(status, content)

    def _query(self) -> tuple[int, dict[str, Any]]:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            return 411, {"error": "the header Content-Length is missing"}
        if not 0 <= length <= _LARGEST:
            return 413, {"error": f"a request has at most {_LARGEST} bytes"}
        try:
            sent = self.rfile.read(length)
            cast("_Server", self.server).has_read(self.connection)
            body: Any = json.loads(sent or b"{}")
        except (ValueError, RecursionError):
            return 400, {"error": "the body has to be JSON: {'sql': '...'}"}
        content = cast("dict[str, Any]", body) if type(body) is dict else {}
        sql = content.get("sql")
        if not isinstance(sql, str):
            return 400, {"error": "missing 'sql' in request body"}
        queries = cast("_Server", self.server).queries
        try:
            timeout = min(float(content.get("timeout") or 10.0), 600.0)
            answer = queries.query(sql, timeout=timeout)
        except (QueryError, ValueError, TypeError) as error:
            return 400, {"error": str(error)}
        return 200, {
            "rows": answer.dicts(),
            "columns": answer.columns,
            "types": answer.types,
            "truncated": answer.truncated,
        }

    def _path(self) -> str | None:
        """Return the path without the token; answer 401 and return None without a right one."""
        token = cast("_Server", self.server).token
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        path = self.path.partition("?")[0]
        front, _, rest = path[1:].partition("/")
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if host not in ("127.0.0.1", "localhost") or self.headers.get("Origin"):
            self._answer(403, {"error": "only programs of this machine are answered"})
        elif hmac.compare_digest(front.encode(), token.encode()):
            return f"/{rest}"
        elif hmac.compare_digest(bearer.encode(), token.encode()):
            return path
        else:
            self._answer(401, {"error": "the token is missing or wrong"})
        return None

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content, default=str).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is no HTTP, or of another method."""
        self._answer(code, {"error": message or "bad request"})

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: requests contain the token."""
