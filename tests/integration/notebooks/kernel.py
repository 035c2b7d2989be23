"""A Jupyter kernel that tests drive as a notebook does: by the messages of Jupyter's protocol."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

WAIT = 60.0


class Cell(SimpleNamespace):
    """The output of a cell: text of its streams, displayed results, progress, the error."""

    text: str
    shown: list[dict[str, Any]]
    progress: list[dict[str, Any]]
    error: str


class Kernel:
    """A running kernel."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client: Any = manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT)
        self.cells: dict[str, Cell] = {}
        self._idle: set[str] = set()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def start(self, code: str) -> str:
        """Run a cell; return the identity of its message."""
        ident: str = self.client.execute(code, store_history=False)
        self.cells[ident] = Cell(text="", shown=[], progress=[], error="")
        return ident

    def run(self, code: str) -> Cell:
        """Run a cell to its end."""
        return self.wait(self.start(code))

    def ok(self, code: str) -> str:
        """Run a cell that has to succeed; return its text."""
        cell = self.run(code)
        assert not cell.error, cell.error
        return cell.text

    def wait(self, ident: str) -> Cell:
        """Wait until a cell has ended."""
        self.until(lambda: ident in self._idle)
        return self.cells[ident]

    def until(self, condition: Any) -> None:
        """Take messages until the condition holds."""
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end, f"not within {WAIT} s: {self.cells}"
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                assert self.manager.is_alive(), f"the kernel has ended: {self.cells}"
                continue
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        ident = message["parent_header"].get("msg_id")
        kind, content = message["msg_type"], message["content"]
        cell = self.cells.get(ident)
        if cell is None:
            return
        if kind == "stream":
            cell.text += content["text"]
        elif kind in ("display_data", "execute_result", "update_display_data"):
            ident = content.get("transient", {}).get("display_id", "")
            where = cell.progress if ident.startswith("monarch-") else cell.shown
            where.append(content["data"])
        elif kind == "error":
            cell.error = "\n".join(content["traceback"])
        elif kind == "status" and content["execution_state"] == "idle":
            self._idle.add(ident)


@contextmanager
def running_kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel whose files are in `folder`."""
    variables = ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")
    environ = {**os.environ, **{name: str(folder / name.lower()) for name in variables}}
    manager = KernelManager(connection_file=str(folder / "kernel.json"))
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="Python",
        language="python",
    )
    manager.start_kernel(env=environ, cwd=str(folder))
    running = Kernel(manager)
    try:
        yield running
    finally:
        running.client.stop_channels()
        manager.shutdown_kernel(now=True)
