"""The numbers of a progress bar (`Meter`), and the places where they are shown.

A bar goes where people look: into the terminal, under the cell of a notebook, or, if stderr is
neither, as a line to stderr from time to time. Each kind of place is a view of the same `Meter`.
"""

from __future__ import annotations

import contextlib
import html
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PAUSE", "Meter", "thread_of_cell"]

PAUSE = 0.1
"""Seconds between two messages to a notebook, or from a process."""


class _View(Protocol):
    """A place where a meter is shown."""

    def show(self, meter: Meter, over: bool) -> None:
        """Show the state; `over`: for the last time."""
        ...


class Meter:
    """The numbers of one bar.

    Args:
        total: how many items there will be; None: not known.
        label: a text before the numbers.
        every: seconds between two lines, where there is neither a terminal nor a notebook.
    """

    def __init__(self, total: int | None, label: str, every: float) -> None:
        self.total = total
        self.label = label
        self.done = 0
        self._failed = 0
        self._began = time.monotonic()
        self._view = _view(every)

    def count(self, item: object) -> None:
        """Count an item, and show it."""
        self.done += 1
        self._failed += _has_failed(item)
        self.show()

    def show(self) -> None:
        """Show the numbers as they are now."""
        self._view.show(self, False)

    def text(self, over: bool) -> str:
        """Return such a text as ``120/1,000 in 3 s, 35/s, 25 s left, 3 failed``."""
        taken = time.monotonic() - self._began
        rate = self.done / taken if taken else 0.0
        of = "" if self.total is None else f"/{self.total:,}"
        parts = [f"{self.done:,}{of} in {_duration(taken)}"]
        if rate:
            parts.append(_pace(rate))
        if rate and self.total is not None and not over:
            left = max(0, self.total - self.done)
            parts.append(f"{_duration(left / rate)} left")
        if self._failed:
            parts.append(f"{self._failed:,} failed")
        return ", ".join(parts)

    def __enter__(self) -> Self:
        self.show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._view.show(self, True)


def _has_failed(item: Any) -> bool:
    if not (hasattr(item, "done") and hasattr(item, "exception")):
        return False
    return item.done() and (item.cancelled() or item.exception() is not None)


def _pace(rate: float) -> str:
    if rate >= 100:
        return f"{rate:,.0f}/s"
    return f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def thread_of_cell(run: Callable[[], None]) -> threading.Thread:
    """Return a thread, not started, that may show bars: one of this cell, in marimo."""
    marimo: Any = sys.modules.get("marimo")
    kind: type[threading.Thread] = threading.Thread
    if marimo is not None and marimo.running_in_notebook():
        kind = marimo.Thread
    return kind(target=run, name="monarch-progress-bar", daemon=True)


# -- views ---------------------------------------------------------------------------------------


def _view(every: float) -> _View:
    ipython: Any = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return _Cell(ipython.display.display)
    marimo: Any = sys.modules.get("marimo")
    if marimo is not None and marimo.running_in_notebook():
        return _MarimoCell(marimo.status)
    return _Terminal() if sys.stderr.isatty() else _Log(every)


class _Log:
    """Lines on stderr."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._due = time.monotonic() + every

    def show(self, meter: Meter, over: bool) -> None:
        now = time.monotonic()
        if over or now >= self._due:
            self._due = now + self._every
            label = f"{meter.label}: " if meter.label else ""
            sys.stderr.write(f"{label}{meter.text(over)}\n")
            sys.stderr.flush()


class _Terminal:
    """A bar of rich, below what the program prints."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "a progress bar in a terminal needs rich: pip install 'pymonarch[progress]'",
                name=error.name,
            ) from error
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._task: Any = None

    def show(self, meter: Meter, over: bool) -> None:
        text = meter.text(over)
        if self._task is None:
            self._bars.start()
            self._task = self._bars.add_task(meter.label, total=meter.total, text=text)
        self._bars.update(self._task, completed=meter.done, text=text)
        if over:
            self._bars.stop()


class _Cell:
    """A bar under a cell of Jupyter, in one place."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None
        self._due = 0.0

    def show(self, meter: Meter, over: bool) -> None:
        now = time.monotonic()
        if now < self._due and not over:
            return
        self._due = now + PAUSE
        bar = _Bar(meter, over)
        if self._handle is None:
            self._handle = self._display(bar, display_id=True)
        else:
            self._handle.update(bar)


class _Bar:
    """A state of a meter, which IPython can show."""

    def __init__(self, meter: Meter, over: bool) -> None:
        self._text = f"{meter.label}: {meter.text(over)}" if meter.label else meter.text(over)
        self._done = meter.done
        self._total = meter.total

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        bar = ""
        if self._total is not None:
            bar = f'<progress value="{self._done}" max="{max(self._total, 1)}"></progress> '
        return f"<div>{bar}{html.escape(self._text)}</div>"


class _MarimoCell:
    """A bar of marimo, or a spinner if there is no total."""

    def __init__(self, status: Any) -> None:
        self._status = status
        self._shown = 0
        self._bar: Any = None
        self._open = contextlib.ExitStack()

    def show(self, meter: Meter, over: bool) -> None:
        if self._bar is None:
            title: dict[str, Any] = {"title": meter.label, "remove_on_exit": False}
            if meter.total is None:
                bar = self._status.spinner(**title)
            else:
                title |= {"total": meter.total, "show_rate": False, "show_eta": False}
                bar = self._status.progress_bar(**title)
            self._bar = self._open.enter_context(bar)
        if meter.total is None:
            self._bar.update(subtitle=meter.text(over))
        else:
            self._bar.update(meter.done - self._shown, subtitle=meter.text(over))
        self._shown = meter.done
        if over:
            self._open.close()
