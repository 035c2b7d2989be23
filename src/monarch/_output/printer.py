"""The printer: the client's end of streamed logs.

The messages of a host's relay are printed on a thread of its own, since `sys.stdout` may be slow,
or any object that the program put there. The relay bounds the printer's queue: it sends no more
than a certain amount ahead of `acknowledge`.

Lines of a *group* with a window are gathered in an `Aggregator`, one per group, which exists only
while it holds lines. So there is nothing to set up and nothing to forget. An aggregator prints when
its window ends, when it is full, and when the relay closes the group (its procs exited, or no
longer aggregate).
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from monarch._output.lines import Aggregator, format_line

__all__ = ["LogPrinter"]

_NAMES = {1: "stdout", 2: "stderr"}
_LONGEST_WAIT = 3600.0
_Item = dict[str, Any] | Callable[[], object] | None  # a message, a call, or the end of the thread


class LogPrinter:
    """Prints streamed logs. Methods are for any thread, and all but `close` return at once.

    Args:
        acknowledge: called with the name of the sending agent and the size of what was printed of
            its messages, so that the agent sends more.
    """

    def __init__(self, acknowledge: Callable[[str, int], None]) -> None:
        self._acknowledge = acknowledge
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._groups: dict[int, Aggregator] = {}
        self._mute: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="monarch-logs", daemon=True)
        self._thread.start()

    def take(self, message: dict[str, Any]) -> None:
        """Handle a message of a relay: print its lines, or close its group."""
        self._queue.put(message)

    def call(self, callback: Callable[[], object]) -> None:
        """Call `callback()` on the printer's thread once everything taken before is printed.

        Lines that wait for the end of their window stay; see `flush`.
        """
        self._queue.put(callback)

    def flush(self, callback: Callable[[], object]) -> None:
        """Print everything, also what waits for the end of a window; then call `callback()`."""
        self._queue.put(self._print_groups)
        self._queue.put(callback)

    def close(self, timeout: float) -> None:
        """Print everything and end the thread; blocks for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    # -- on the printer's thread -----------------------------------------------------------------

    def _run(self) -> None:
        open_ = True
        while open_:
            printed: dict[str, int] = {}
            for item in self._next_items():
                if item is None:
                    open_ = False
                elif callable(item):
                    item()
                else:
                    self._handle(item, printed)
            now = time.monotonic()
            for group, lines in list(self._groups.items()):
                if not open_ or (lines.deadline is not None and lines.deadline <= now):
                    self._print_group(group)
            for agent, size in printed.items():
                self._acknowledge(agent, size)

    def _next_items(self) -> list[_Item]:
        """Wait for an item or the end of a window; return all items that are in the queue."""
        deadlines = [
            group.deadline for group in self._groups.values() if group.deadline is not None
        ]
        wait = None
        if deadlines:
            wait = min(_LONGEST_WAIT, max(0.0, min(deadlines) - time.monotonic()))
        items: list[_Item] = []
        try:
            items.append(self._queue.get(timeout=wait))
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items

    def _handle(self, message: dict[str, Any], printed: dict[str, int]) -> None:
        if "close" in message:
            self._print_group(message["close"])
            return
        stream, rank, lines = message["stream"], message["rank"], message["lines"]
        window = message["window"]
        if window is None:
            head = message["host"], message["proc"], rank
            self._write(stream, "".join([format_line(*head, line) + "\n" for line in lines]))
        else:
            group = self._groups.get(message["group"])
            if group is None:
                group = self._groups[message["group"]] = Aggregator(window)
            now = time.monotonic()
            for line in lines:
                group.add(_NAMES[stream], rank, line, now)
        agent = message["agent"]
        printed[agent] = printed.get(agent, 0) + message["size"]

    def _print_groups(self) -> None:
        for group in list(self._groups):
            self._print_group(group)

    def _print_group(self, ident: int) -> None:
        group = self._groups.pop(ident, None)
        if group is None:
            return
        terminals = [name for name in _NAMES.values() if _is_terminal(getattr(sys, name))]
        wall = datetime.fromtimestamp(time.time_ns() / 1e9)  # noqa: DTZ006 - for people here
        numbers = {name: number for number, name in _NAMES.items()}
        for name, text in group.flush(time.monotonic(), wall, terminals):
            self._write(numbers[name], text)

    def _write(self, number: int, text: str) -> None:
        out = getattr(sys, _NAMES[number])
        if out is None:
            return
        if "ipykernel" in sys.modules:
            from monarch._output.notebook import under_cell

            under_cell(out)
        try:
            if "marimo" in sys.modules:
                from monarch._output import marimo_cells

                if marimo_cells.attended is not None:
                    marimo_cells.attended.print(number, text)
                    return
            try:
                out.write(text)
            except UnicodeEncodeError:
                out.write(text.encode(out.encoding, "replace").decode(out.encoding))
            out.flush()
        except Exception as error:  # closed, a broken pipe, or the program's own object
            # These lines are lost, as the program's own would be. Procs must not wait for them.
            if number not in self._mute:
                self._mute.add(number)
                print(f"monarch: cannot print logs: {error!r}", file=sys.__stderr__)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and hasattr(stream, "isatty") and bool(stream.isatty())
