"""marimo: what its cells need once this process is a client.

marimo redirects descriptors 1 and 2 to a pipe of its own while a cell runs, and processes that are
spawned in a cell inherit the pipe. It stops reading the pipe if something arrives while no cell
runs, so actors must not write there: their output is streamed to the client instead.

- Output is printed under the cell that made the last call. A cell that makes its first call flushes
  what was printed before, for the cell before. marimo has no public hook for the end of a cell, so
  that is also how the last lines get under the right cell.
- Lines on stderr say how far long calls are (`cell_progress`). They are not shown in place, since
  the output of a cell could be overwritten that ends at this very moment.
- ``.get()`` in a cell is not warned of: it blocks the loop of the kernel, as any cell does.

The context and the messages are internals of marimo. If a version has others, a warning says so and
actors write to the pipe. An app (`marimo run`) has no consoles: its processes write to the terminal
of the server.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

from monarch._output.cell_progress import CellProgress, print_lines
from monarch._output.notebook import allow_get
from monarch._spi import Proc, before_calls, settings

__all__ = ["MarimoCells", "attend", "attended"]

attended: MarimoCells | None = None
"""The cells of the notebook that this process runs; None outside of marimo."""


def attend(proc: Proc, flush: Callable[[], None]) -> None:
    """Do from now on what marimo needs, if a cell of marimo runs on this thread.

    Args:
        proc: the client.
        flush: prints what actors have printed so far.
    """
    global attended
    try:
        context = _of_marimo("_runtime.context").safe_get_context()
        if context is None or context.stdout is None or context.cell_id is None:
            return
        attended = MarimoCells(context, flush)
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules["marimo"], "__version__", "?")
        warnings.warn(
            f"the output of actors is not shown under the cells of marimo {version}, which has "
            f"changed since this release was tested with it: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    before_calls(attended.before_call)
    allow_get()
    if settings.call_progress:
        CellProgress(proc, print_lines())


def _of_marimo(name: str) -> Any:
    return importlib.import_module(f"marimo.{name}")


class MarimoCells:
    """The consoles of the cells of a notebook.

    Args:
        context: marimo's, of a cell that runs.
        flush: as for `attend`.
    """

    def __init__(self, context: Any, flush: Callable[[], None]) -> None:
        outputs = _of_marimo("_messaging.cell_output").CellOutput
        self._outputs = {1: outputs.stdout, 2: outputs.stderr}
        self._message = _of_marimo("_messaging.notification").CellNotification
        self._send = _of_marimo("_messaging.notification_utils").broadcast_notification
        self._context = context
        self._flush = flush
        self._cell = context.cell_id

    def before_call(self) -> None:
        """Let the cell that runs be the one to which output belongs."""
        cell = self._context.cell_id
        if cell is not None and cell != self._cell:
            self._flush()
            self._cell = cell

    def print(self, number: int, text: str) -> None:
        """Print text on stdout (1) or stderr (2) of the cell that made the last call."""
        self._context.stdout.flush()  # what the cell itself has printed before
        message = self._message(cell_id=self._cell, console=self._outputs[number](text))
        self._send(message, self._context.stream)
