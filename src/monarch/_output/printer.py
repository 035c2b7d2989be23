"""The printer: the client's end of streamed logs.

The messages of a host's relay are printed on a thread of its own, since `sys.stdout` may be slow,
or any object that the program put there. The relay bounds the printer's queue: it sends no more
than a certain amount ahead of `acknowledge`.

Lines of a *group* with a window are gathered in an `Aggregator`, one per group, which exists only
while it holds lines. So there is nothing to set up and nothing to forget. An aggregator prints when
its window ends, when it is full, and when the relay closes the group (its procs exited, or no
longer aggregate).

States (see `screen`) come from relays, and from procs whose output is not captured. The newest are
in `Standing`, and a `StateView` draws them at most ten times a second. When a proc has exited, the
states that it has left become lines.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar

from monarch._output.lines import Aggregator, format_line
from monarch._output.standing import Standing
from monarch._output.state_views import StateView, fitting, shown_streams, state_view

__all__ = ["LogPrinter"]

_NAMES = {1: "stdout", 2: "stderr"}
_LONGEST_WAIT = 3600.0
_REDRAW = 0.1  # seconds between two draws, and until states are drawn
_LOOK = 0.5  # seconds between two looks at the size of the terminal, while states stand
_Item = dict[str, Any] | Callable[[], object] | None  # a message, a call, or the end of the thread


class LogPrinter:
    """Prints streamed logs.

    Methods are for any thread, and all but `hide` and `close` return at once.

    Args:
        acknowledge: called with the name of the sending agent and the size of what was printed of
            its messages, so that the agent sends more.
        when_gone: calls a function on any thread once the proc with a uid has exited.
        drawn: called with whether the terminal is drawn on, when that changes.
    """

    over: ClassVar[bool] = False
    """Whether the program ends: states that come now are no longer drawn."""

    def __init__(
        self,
        acknowledge: Callable[[str, int], None],
        when_gone: Callable[[int, Callable[[], None]], None],
        drawn: Callable[[bool], None],
    ) -> None:
        self._acknowledge = acknowledge
        self._when_gone = when_gone
        self._drawn = drawn
        self._standing = Standing()
        self._watched: set[int] = set()  # procs with states, until they have exited
        self._shown: list[int] = []  # streams
        self._view: StateView | None = None  # made for the first states
        self._can_show = True
        self._is_drawn = True  # the newest states
        self._next_draw = 0.0
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

    def hide(self, timeout: float) -> None:
        """Draw nothing from now on, and erase what was drawn; blocks for at most `timeout`."""
        LogPrinter.over = True
        done = threading.Event()
        self._queue.put(self._hide)
        self._queue.put(done.set)
        done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Print everything and end the thread; blocks for at most `timeout` seconds."""
        LogPrinter.over = True
        self._queue.put(self._hide)
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
            if not open_:
                for uid in self._standing.uids():
                    self._print_states_of(uid)
            now = time.monotonic()
            for group, lines in list(self._groups.items()):
                if not open_ or (lines.deadline is not None and lines.deadline <= now):
                    self._print_group(group)
            self._draw(now)
            for agent, size in printed.items():
                self._acknowledge(agent, size)

    def _next_items(self) -> list[_Item]:
        """Wait for an item or the end of a window; return all items that are in the queue."""
        deadlines = [
            group.deadline for group in self._groups.values() if group.deadline is not None
        ]
        if self._view is not None and not self._is_drawn:
            deadlines.append(self._next_draw)
        elif self._view is not None and self._standing.uids():
            deadlines.append(time.monotonic() + _LOOK)
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
        agent = message.get("agent")
        if "states" in message:
            self._note_states(message)
        else:
            self._take_lines(message)
        if agent is not None:
            printed[agent] = printed.get(agent, 0) + message["size"]

    def _take_lines(self, message: dict[str, Any]) -> None:
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

    def _note_states(self, message: dict[str, Any]) -> None:
        if self._view is None and self._can_show and not self.over:
            self._shown = shown_streams()
            self._view = state_view(self._drawn) if self._shown else None
        for uid, label, rank, number, states in message["states"]:
            self._standing.update(uid, number, message["host"], label, rank, states)
            if states and uid not in self._watched:
                self._watched.add(uid)
                end = functools.partial(self._end_states_of, uid)
                self._when_gone(uid, functools.partial(self.call, end))
        self._is_drawn = False

    def _end_states_of(self, uid: int) -> None:
        """Print the states that an exited proc has left."""
        self._watched.discard(uid)
        self._print_states_of(uid)

    def _print_states_of(self, uid: int) -> None:
        self._is_drawn = False
        for number, line in self._standing.remove(uid):
            self._write(number, f"{fitting(number, line)}\n")

    def _draw(self, now: float) -> None:
        """Draw the states if they have changed, and if the last draw is long enough ago."""
        view = self._view
        if view is None or now < self._next_draw:
            return
        if not self._is_drawn or view.is_outdated():
            self._next_draw = now + _REDRAW
            self._is_drawn = True
            self._show(view, self._standing.lines(self._shown))

    def _hide(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            self._show(view, [])

    def _show(self, view: StateView, lines: list[str]) -> None:
        try:
            view.show(lines)
        except Exception as error:  # of the notebook; what is printed matters more
            self._view, self._can_show = None, False
            print(f"monarch: cannot show progress bars: {error!r}", file=sys.__stderr__)

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
