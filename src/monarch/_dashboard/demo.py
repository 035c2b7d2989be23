"""A server of the dashboard with an invented cluster: ``monarch dashboard --demo``, and tests.

It answers with the shapes of the admin API, by the standard library alone, so the pages can be
seen without a job, and without the packages of the admin server. It listens on the loopback
interface. SQL is answered by sqlite3 on a few rows of the cluster; statements can only read.
"""

from __future__ import annotations

import contextlib
import json
import mimetypes
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from monarch._dashboard import FOLDER
from monarch._dashboard.cluster import Cluster

__all__ = ["Demo"]

_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:"
_PERIOD = 0.5
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
_LARGEST = 1 << 20


class Demo:
    """See the module. `close` ends it; `pause` makes it refuse all, as if the server were lost."""

    def __init__(self, cluster: Cluster, port: int = 0) -> None:
        self.cluster = cluster
        self.lost = threading.Event()
        self.closing = threading.Event()
        self._begun = time.monotonic()
        self._tables = _tables(cluster)
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.demo = self
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="demo", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Return the second of the cluster."""
        return 30.0 + time.monotonic() - self._begun

    def pause(self, lost: bool) -> None:
        """Refuse all requests and end all streams, or answer again."""
        (self.lost.set if lost else self.lost.clear)()

    def close(self) -> None:
        """End the server."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._tables.close()

    def answer(self, path: str, query: dict[str, str]) -> dict[str, Any] | None:
        """Answer a GET below ``/api``; None if there is no such route."""
        cluster, t = self.cluster, self.now()
        if path.startswith("actors/") and path.endswith("/live"):
            return cluster.live(t, unquote(path[len("actors/") : -len("/live")]))
        window = float(query.get("window", 60))
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "health": lambda: {"status": "ok"},
            "about": lambda: cluster.about(t),
            "grid": lambda: cluster.grid(t, query.get("mesh")),
            "waits": lambda: cluster.waits(t),
            "failures": lambda: cluster.failures(t),
            "processes": lambda: cluster.processes(t),
            "endpoints": lambda: cluster.endpoints(t, window),
            "endpoints/history": lambda: cluster.history(t, window, int(query.get("buckets", 60))),
            "logs": lambda: cluster.logs(t, query, int(query.get("limit", 200))),
        }
        found = answers.get(path)
        return None if found is None else found()

    def query(self, sql: str) -> dict[str, Any]:
        """Answer a statement that reads. Raises sqlite3.Error."""
        with self._lock:
            cursor = self._tables.execute(sql)
            rows = cursor.fetchmany(1001)
        names = [each[0] for each in cursor.description or ()]
        values = [list(row) for row in rows[:1000]]
        return {
            "columns": names,
            "types": ["" for _ in names],
            "rows": [dict(zip(names, row, strict=True)) for row in values],
            "values": values,
            "truncated": len(rows) > 1000,
        }

    def threads(self, reference: str) -> dict[str, Any]:
        """Answer with the invented stacks of a process, as py-spy gives them."""
        return {"proc_ref": reference, "result": self.cluster.threads()}

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the events of one stream: all actors first, then what changes."""
        cluster = self.cluster
        t = self.now()
        yield "hello", {"as_of_us": cluster.now_us(t), "about": cluster.about(t)}
        before: dict[str, Any] = {}
        while not (self.lost.is_set() or self.closing.is_set()):
            t = self.now()
            rows = cluster.rows(t)
            keys = {ref: _key(row, t) for ref, row in rows.items()}
            changed = [row for ref, row in rows.items() if keys[ref] != before.get(ref)]
            before = keys
            when = cluster.now_us(t)
            yield "actors", {"as_of_us": when, "changed": changed, "removed": []}
            processes = cluster.processes(t)["processes"]
            yield "procs", {"as_of_us": when, "changed": processes, "removed": []}
            self.closing.wait(_PERIOD)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    demo: Demo

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that leave; other errors are in the answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _demo(self) -> Demo:
        assert isinstance(self.server, _Server)
        return self.server.demo

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer with a file, data, or the stream."""
        demo = self._demo
        parts = urlsplit(self.path)
        if demo.lost.is_set():
            self.close_connection = True
            return
        if parts.path == "/api/stream":
            self._stream()
        elif parts.path.startswith("/api/"):
            try:
                found = demo.answer(parts.path[len("/api/") :], dict(parse_qsl(parts.query)))
            except ValueError as error:
                self._json({"error": {"code": "bad_request", "message": str(error)}}, 400)
                return
            if found is None:
                fault = {"code": "not_found", "message": f"there is no {parts.path}"}
                self._json({"error": fault}, 404)
            else:
                self._json(found)
        else:
            self._file(unquote(parts.path).lstrip("/") or "index.html")

    def do_POST(self) -> None:
        """Answer SQL, and requests for the stacks of a process."""
        path, size = self.path.partition("?")[0], int(self.headers.get("Content-Length", "0"))
        answers = {"/api/query": self._demo.query, "/api/pyspy/capture": self._demo.threads}
        if path not in answers or size > _LARGEST:
            self.close_connection = True
            self._json({"error": {"code": "not_found", "message": f"there is no {path}"}}, 404)
            return
        try:
            (asked,) = json.loads(self.rfile.read(size)).items() - {("limit", 1000)}
            self._json(answers[path](str(asked[1])))
        except (sqlite3.Error, ValueError, TypeError, AttributeError) as error:
            self._json({"error": str(error)}, 400)

    def _file(self, path: str) -> None:
        found = os.path.realpath(os.path.join(FOLDER, path))
        if not found.startswith(os.path.realpath(FOLDER) + os.sep) or not os.path.isfile(found):
            self._send(b"not found", "text/plain", 404)
            return
        with open(found, "rb") as file:
            self._send(file.read(), mimetypes.guess_type(found)[0] or "application/octet-stream")

    def _json(self, data: Any, status: int = 200) -> None:
        self._send(json.dumps(data).encode(), "application/json", status)

    def _send(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):
            for kind, data in self._demo.events():
                text = json.dumps(data, separators=(",", ":"))
                self.wfile.write(f"event: {kind}\ndata: {text}\n\n".encode())
                self.wfile.flush()


def _key(row: dict[str, Any], t: float) -> tuple[Any, ...]:
    """Return what a change is about: not the age, but the second at which the call began."""
    begun = None if row["age"] is None else round(t - row["age"])
    return row["state"], row["endpoint"], row["queued"], row["place"], begun


def _tables(cluster: Cluster) -> sqlite3.Connection:
    """Return a database with a few tables of the cluster, which can only be read."""
    tables = sqlite3.connect(":memory:", check_same_thread=False)
    tables.execute("CREATE TABLE actors (full_name, mesh_name, rank, latest_status)")
    tables.executemany(
        "INSERT INTO actors VALUES (?, ?, ?, ?)",
        [(row["ref"], row["name"], row["rank"], row["state"]) for row in _all(cluster)],
    )
    tables.execute("CREATE TABLE messages (endpoint, mesh_name, duration_us)")
    tables.executemany(
        "INSERT INTO messages VALUES (?, ?, ?)",
        [
            (row["endpoint"], row["mesh"], row["p50_us"] * (1 + place % 7))
            for row in cluster.endpoints(30.0, 60.0)["endpoints"]
            for place in range(40)
        ],
    )
    tables.commit()
    tables.set_authorizer(_only_reading)
    return tables


def _only_reading(action: int, *_names: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY


def _all(cluster: Cluster) -> list[dict[str, Any]]:
    return list(cluster.rows(30.0).values())
