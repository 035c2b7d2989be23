"""A marimo server with one notebook, which tests edit as a browser does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

WAIT = 60.0
SESSION = "s_tests0"


class MarimoCell(SimpleNamespace):
    """The visible parts of a cell: console text, the output as (type, data), the state."""

    text: str
    shown: list[tuple[str, Any]]
    status: str

    @property
    def error(self) -> str:
        kind, data = self.shown[-1] if self.shown else ("", "")
        return str(data) if kind == "application/vnd.marimo+error" else ""


class Marimo:
    """A running server and the session of its notebook."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.file = folder / "notebook.py"
        self.file.write_text("import marimo\n\napp = marimo.App()\n")
        self.cells: dict[str, MarimoCell] = {}
        self.log = (folder / "server.log").open("w+")
        command = ("edit", "--headless", "--no-token", "--no-skew-protection", "--port")
        self.server = subprocess.Popen(
            [sys.executable, "-m", "marimo", *command, str(self.port), str(self.file)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.connections = ExitStack()
        self.socket: ClientConnection | None = None

    def open(self) -> None:
        """Open the notebook; each time this starts a kernel, if there is none."""
        address = f"ws://127.0.0.1:{self.port}/ws?session_id={SESSION}"
        end = time.monotonic() + WAIT
        while True:
            assert self.server.poll() is None, "the server has exited"
            try:
                connection = connect(address, open_timeout=WAIT, max_size=None)
                self.socket = self.connections.enter_context(connection)
                break
            except OSError:  # it does not listen yet
                assert time.monotonic() < end
                time.sleep(0.05)
        while json.loads(self.socket.recv(WAIT))["op"] != "kernel-ready":
            pass
        self.post("instantiate", {"objectIds": [], "values": [], "autoRun": False})

    def post(self, what: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/kernel/{what}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Marimo-Session-Id": SESSION},
        )
        urllib.request.urlopen(request, timeout=WAIT).close()

    def start(self, *codes: str) -> str:
        """Run cells, one after the other; return the name of the last."""
        names = [f"cell{len(self.cells) + number}" for number in range(len(codes))]
        for name in names:
            self.cells[name] = MarimoCell(text="", shown=[], status="queued")
        self.post("run", {"cellIds": names, "codes": list(codes)})
        return names[-1]

    def run(self, *codes: str) -> MarimoCell:
        """Run cells to their end; return the last one."""
        return self.wait(self.start(*codes))

    def ok(self, *codes: str) -> str:
        """Run cells of which the last has to succeed; return its console text."""
        cell = self.run(*codes)
        assert not cell.error, (cell.error, cell.text)
        return str(cell.text)

    def wait(self, name: str) -> MarimoCell:
        self.until(lambda: self.cells[name].status == "idle")
        return self.cells[name]

    def until(self, condition: Callable[[], bool]) -> None:
        """Take messages until the condition holds."""
        assert self.socket is not None
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end, f"not within {WAIT} s: {self.cells}"
            try:
                self.take(json.loads(self.socket.recv(1)))
            except TimeoutError:
                assert self.server.poll() is None, "the server has exited"

    def take(self, message: dict[str, Any]) -> None:
        if message["op"] != "cell-op":
            return
        data = message["data"]
        cell = self.cells.get(data["cell_id"])
        if cell is None:
            return
        console = data.get("console") or []
        for output in console if isinstance(console, list) else [console]:
            cell.text += str(output["data"])
        if data.get("output"):
            cell.shown.append((data["output"]["mimetype"], data["output"]["data"]))
        cell.status = data.get("status") or cell.status

    def restart(self) -> None:
        """Restart the kernel, as the command of the menu does."""
        assert self.socket is not None
        self.post("restart_session", {})
        try:
            while True:
                self.socket.recv(WAIT)
        except ConnectionClosed:
            pass
        self.open()


@contextmanager
def running_marimo(folder: Path) -> Iterator[Marimo]:
    marimo = Marimo(folder)
    try:
        marimo.open()
        yield marimo
    finally:
        marimo.connections.close()
        marimo.server.terminate()
        marimo.server.wait(WAIT)
        marimo.log.seek(0)
        print(marimo.log.read())
        marimo.log.close()
