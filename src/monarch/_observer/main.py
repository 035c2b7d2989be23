"""The observer's process: it takes rows from the processes of a job, and answers by HTTP.

Three kinds of threads: this one reads the script's socket, one reads the connections with rows and
stores them, and those of HTTP servers answer. The process has low priority, so the job goes first.

Its memory is bounded, whatever is asked of it: an allocation beyond the bound fails, which ends a
query. If a thread ends by an error, so does the process; the script starts a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import threading
from collections import deque
from typing import Any

from monarch._observer.places import Place, forget, note
from monarch._observer.topology import Topology
from monarch._observer.web import Web, WebError, available, user_name
from monarch._store.http import QueryServer
from monarch._store.store import Store
from monarch._telemetry.kinds import BatchReader

__all__ = ["main"]

_NICE = 10
_ROOM = 1 << 30  # bytes for all but the store
_SETTLING = 5.0  # seconds that a query waits for rows that have arrived
_NEW, _ASKED = b"n", b"a"  # messages to the thread that reads rows
_AGAIN = 5.0  # seconds until the file of this observer is written again


def main(fd: int) -> None:
    """Observe until the socket `fd` to the script ends."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.excepthook = _end
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with socket.socket(fileno=fd) as script:
        _Observation(script).run()


def _end(_arguments: object) -> None:
    os._exit(3)


def _bound(size: int) -> None:
    """Let allocations fail beyond `size` bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    least = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (least, hard))


class _Observation:
    def __init__(self, script: socket.socket) -> None:
        self._script = script
        self._store: Store | None = None
        self._rows: _Rows | None = None
        self._sql: QueryServer | None = None
        self._place: Place | None = None
        self._web: dict[str, Web] = {}
        self._noted = False

    def run(self) -> None:
        pid = 0
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self._script, 1 << 16, 1)
                if not data:
                    return
                message: dict[str, Any] = json.loads(data)
                if message.get("op") == "rows":
                    self._adopt(fds)
                else:
                    pid = message["pid"]
                    self._show(message)
        except ConnectionError:
            return
        finally:
            if pid:
                forget(pid)

    def _adopt(self, fds: list[int]) -> None:
        for fd in fds:
            sock = socket.socket(fileno=fd)
            if self._rows is None:
                sock.close()
            else:
                self._rows.add(sock)

    def _show(self, options: dict[str, Any]) -> None:
        token = options["token"]
        place = self._place or Place(options["pid"], options["script"], token=token)
        try:
            if self._store is None and options.get("telemetry"):
                _bound(3 * options["limit"] + _ROOM)
                self._store = Store(options["limit"], options["retention"])
                self._rows = _Rows(self._store)
                self._store.before_query_of([""], self._rows.settle)  # each text contains it
                started = options["started"], user_name()
                Topology(self._store, options["pid"], started, options.get("retained", 100))
                self._sql = QueryServer(self._store, token, _port(options, "telemetry_url"))
                place = place._replace(telemetry_url=self._sql.url)
            port = options.get("dashboard")
            self._serve("admin_url", options.get("admin"), options, "the admin API")
            address = None if port is None else f"127.0.0.1:{port}"
            self._serve("dashboard_url", address, options, "the dashboard")
            self._note(place, options)
            # Telemetry brings the admin API with it, without a word where that is not possible.
            if options.get("telemetry") and "admin" not in options and available():
                self._serve("admin_url", options["web"], options)
                self._note(place, options)
        except OSError as error:
            self._tell({"fault": f"its observer could not start ({error})"})
            raise SystemExit(2) from None

    def _note(self, place: Place, options: dict[str, Any]) -> None:
        """Send where this observer can be reached. Where the admin API is, so is the dashboard."""
        admin, dashboard = self._web.get("admin_url"), self._web.get("dashboard_url")
        if dashboard is None and admin is not None and admin.has_dashboard:
            dashboard = admin
        self._place = place._replace(
            admin_url="" if admin is None else admin.url,
            dashboard_url="" if dashboard is None else dashboard.url,
        )
        self._write()
        self._tell({**self._place._asdict(), "number": options.get("number", 0)})

    def _write(self) -> None:
        """Write the file by which commands find this observer; later, if the disk is full."""
        assert self._place is not None
        try:
            note(self._place)
        except OSError as error:
            if not self._noted:
                self._tell({"warning": f"commands do not find this script's telemetry: {error}"})
            timer = threading.Timer(_AGAIN, self._write)
            timer.daemon = True
            timer.start()
        self._noted = True

    def _serve(
        self, name: str, address: str | None, options: dict[str, Any], noun: str = ""
    ) -> None:
        """Serve at an address, or no more if it is None; warn of what goes wrong with `noun`."""
        served = self._web.get(name)
        if served is not None and served.address != address:
            if address is None and "admin" not in options and name == "admin_url":
                return  # it came with telemetry
            self._web.pop(name).close()
            served = None
        if address is None or served is not None:
            return
        try:
            port = _port(options, name)
            web = Web(address, options, options["token"], self._store, port)
            self._web[name] = web
        except WebError as error:
            if noun:
                self._tell({"warning": f"{noun} is off: {error}"})
            return
        if noun and web.warning:
            self._tell({"warning": f"{noun}: {web.warning}"})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._script.send(json.dumps(message).encode())


def _port(options: dict[str, Any], name: str) -> int:
    """Return the port of an earlier observer of the script at this address; 0: there is none."""
    port: int = options.get("ports", {}).get(name, 0)
    return port


class _Rows:
    """The thread that reads the connections with rows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._new: list[socket.socket] = []
        self._asked: deque[threading.Event] = deque()
        threading.Thread(target=self._run, name="rows", daemon=True).start()

    def add(self, sock: socket.socket) -> None:
        """Read a connection from now on, until it ends."""
        self._new.append(sock)
        self._wake.send(_NEW)

    def settle(self) -> None:
        """Wait until the rows that have arrived by now are stored, at most five seconds."""
        done = threading.Event()
        self._asked.append(done)
        self._wake.send(_ASKED)
        done.wait(_SETTLING)

    def _run(self) -> None:
        buffer = memoryview(bytearray(1 << 20))
        while True:
            asked = 0
            for key, _ in self._selector.select():
                sock: Any = key.fileobj
                if key.data is None:
                    asked = sock.recv(64).count(_ASKED)
                    self._take_new()
                else:
                    self._read(sock, key.data, buffer)
            for _ in range(asked):  # what came before these requests was ready as they were
                self._asked.popleft().set()

    def _take_new(self) -> None:
        while self._new:
            sock = self._new.pop()
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, BatchReader())

    def _read(self, sock: socket.socket, reader: BatchReader, buffer: memoryview) -> None:
        try:
            count = sock.recv_into(buffer)
            for batch in reader.feed(buffer[:count]):
                self._store.put(batch)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError):  # closed, or no batches
            count = 0
        if not count:
            self._selector.unregister(sock)
            sock.close()
