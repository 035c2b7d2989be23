"""Where the client shows the states of processes: a terminal, or the cell of a notebook.

A file, a pipe, a terminal that cannot move its cursor and marimo show none.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Protocol

from monarch._output.footer import Footer, chosen, fit, plain, room
from monarch._output.standard import screens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["StateView", "fitting", "shown_streams", "state_view"]

_IN_CELL = 50  # lines


class StateView(Protocol):
    """Shows lines in one place. Its methods are called on the printer's thread."""

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines in the place of the former ones."""
        ...

    def is_outdated(self) -> bool:
        """Whether the place has changed, so that the same lines have to be shown again."""
        ...


def shown_streams() -> list[int]:
    """Return of which streams of procs, stdout (1) and stderr (2), this client shows states."""
    if "IPython" in sys.modules:
        from monarch._output.notebook import current_shell, is_kernel

        if is_kernel(current_shell()):
            return [1, 2]
    if "marimo" in sys.modules:
        from monarch._output import marimo_cells

        if marimo_cells.attended is not None:
            return []
    return screens()


def state_view(drawn: Callable[[bool], None]) -> StateView:
    """Return the view of this client, of which `shown_streams` is not empty.

    `drawn` is called with whether a terminal is drawn on, before that begins and after it ends.
    """
    if "IPython" in sys.modules:
        from monarch._output.notebook import current_shell, is_kernel

        if is_kernel(current_shell()):
            return _CellView()
    return _TerminalView(max(screens()), drawn)


def fitting(number: int, line: str) -> str:
    """Return a line, as long as a terminal is wide if stdout (1) or stderr (2) is one."""
    if number not in screens():
        return line
    with contextlib.suppress(OSError):  # hung up
        return fit(line, os.get_terminal_size(number).columns)
    return line


class _TerminalView:
    """The footer of the terminal at a descriptor.

    While another program has the terminal (the script runs in the background) nothing is drawn.
    """

    def __init__(self, fd: int, drawn: Callable[[bool], None]) -> None:
        self._fd = fd
        self._drawn = drawn
        self._footer = Footer()
        self._size = os.terminal_size((0, 0))

    def show(self, lines: Sequence[str]) -> None:
        if lines and not self._is_ours():
            return
        had = self._footer.height > 0
        if lines and not had:
            self._drawn(True)
        with contextlib.suppress(OSError):  # hung up: there is no one to show it to
            self._size = os.get_terminal_size(self._fd)
            columns, rows = self._size
            text = self._footer.draw(chosen(lines, room(rows)), columns, rows)
            view = memoryview(text.encode("utf-8", "replace"))
            while view:
                view = view[os.write(self._fd, view) :]
        if had and not lines:
            self._drawn(False)

    def is_outdated(self) -> bool:
        if not self._footer.height:
            return False
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self._fd) != self._size
        return False

    def _is_ours(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # not the terminal that controls this process
            return True


class _CellView:
    """Output of the cell that runs or ran last, in one place."""

    def show(self, lines: Sequence[str]) -> None:
        from monarch._output.notebook import show_in_place

        show_in_place([plain(line) for line in chosen(lines, _IN_CELL)])

    def is_outdated(self) -> bool:
        return False
