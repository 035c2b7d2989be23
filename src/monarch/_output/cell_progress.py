"""How far the calls are that a cell of a notebook awaits for more than two seconds.

A timer of the slow clock looks at the awaited calls twice a second while a cell runs. Only while
one of them is long there is a thread that shows them: as a bar for each call, under the cell and
in the same place (`Bars`). When the cell ends one line stays, about the last of the long calls.

In a terminal there is no such place, and actors write to the same terminal. There a long call is
shown as any other wait is: by a line after two seconds, and every ten seconds from then on
(`print_lines`).

A call is counted from when it was first seen, so up to half a second late. Calls that a task of an
earlier cell awaits already when a cell begins are not of this cell.
"""

from __future__ import annotations

import html
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from monarch._output.awaited import AwaitedCall, awaited_calls
from monarch._spi import Proc, environment

__all__ = ["Bar", "Bars", "CellProgress", "print_lines"]

_LONG = 2.0
_LOOK = 0.5
_AGAIN = 10.0
_MOST = 4  # bars

_STYLE = "font-family:monospace;font-size:12px;opacity:.7"


class Bar(NamedTuple):
    """A line about a long call; `asked` is 1 if there is no count of ranks."""

    text: str
    answered: int = 0
    asked: int = 1
    over: bool = False
    """The call is no longer awaited."""

    def html(self) -> str:
        """Return the line as HTML, with a bar if it has a count."""
        bar = ""
        if self.asked > 1:
            bar = f'<progress value="{self.answered}" max="{self.asked}"></progress> '
        return f'<div style="{_STYLE}">{bar}{html.escape(self.text)}</div>'


class CellProgress:
    """The long calls of one cell, from its begin to `end`.

    Args:
        proc: the process of the cell.
        show: shows these lines in the place of the former ones; called from a thread of this class,
            and in `end`.
    """

    def __init__(self, proc: Proc, show: Callable[[list[Bar]], None]) -> None:
        self._proc = proc
        self._show = show
        self._earlier = set(awaited_calls(proc))
        self._calls: dict[int, AwaitedCall] = {}  # by port
        self._last = ""  # about the last long call that has ended
        self._ended = 0  # long calls
        self._over = threading.Event()
        self._lock = threading.Lock()  # a thread starts before the end, or not at all
        self._thread: threading.Thread | None = None
        proc.clock.call_later(_LOOK, self._look)

    def end(self) -> None:
        """End with the cell; a line about the last long call replaces what was shown."""
        with self._lock:
            self._over.set()
        if self._thread is not None:  # there were long calls
            self._thread.join()
            self._note(over=True)
            more = f"; {self._ended} calls took longer than 2 s" if self._ended > 1 else ""
            self._show([Bar(f"{self._last}{more}", over=True)])

    def _look(self) -> None:
        """Look for a long call; on the clock's thread, which must not be held up by output."""
        with self._lock:
            if self._over.is_set():
                return
            self._note()
            if not self._long():
                self._proc.clock.call_later(_LOOK, self._look)
                return
            name = "monarch-progress"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def _note(self, over: bool = False) -> None:
        """Take note of calls that are awaited now, and of those that no longer are."""
        found = {} if over else awaited_calls(self._proc)
        now = environment.current.now()
        for port, call in list(self._calls.items()):
            # A call that has its last answer is settled a moment later.
            if port not in found and (over or call.is_settled or port in self._proc.ports):
                del self._calls[port]
                if call.seconds(now) >= _LONG:
                    self._ended += 1
                    self._last = call.outcome(now)
        for port, answers in found.items():
            if port not in self._calls and port not in self._earlier:
                self._calls[port] = AwaitedCall(answers, now)

    def _long(self) -> list[AwaitedCall]:
        now = environment.current.now()
        return [call for call in self._calls.values() if call.seconds(now) >= _LONG]

    def _run(self) -> None:
        """Show the long calls while there are any."""
        while not self._over.is_set():
            long = self._long()
            if not long:
                self._show([Bar(self._last, over=True)])
                self._proc.clock.call_later(_LOOK, self._look)
                return
            self._show(list(_bars(long)))
            self._over.wait(_LOOK)
            self._note()


def _bars(long: list[AwaitedCall]) -> Iterator[Bar]:
    """Yield a line for each endpoint."""
    now = environment.current.now()
    groups: dict[str, list[AwaitedCall]] = {}
    for call in long:
        groups.setdefault(call.name, []).append(call)
    for name, calls in itertools.islice(groups.items(), _MOST):
        seconds = f"{max(call.seconds(now) for call in calls):.0f} s"
        if len(calls) > 1:
            yield Bar(f"{name}: {len(calls)} calls ({seconds})")
        else:
            yield Bar(f"{calls[0].state()} ({seconds})", *calls[0].progress())
    if len(groups) > _MOST:
        yield Bar(f"and {len(groups) - _MOST} more endpoints")


class Bars:
    """Shows lines in one place of a notebook.

    Args:
        publish: shows a text and the same as HTML; True: in the place of the former.
    """

    def __init__(self, publish: Callable[[str, str, bool], None]) -> None:
        self._publish = publish
        self._shown = ""

    def show(self, bars: list[Bar]) -> None:
        """Show these lines instead of the former ones."""
        text = "\n".join(bar.text for bar in bars)
        if text != self._shown:
            again, self._shown = bool(self._shown), text
            self._publish(text, "".join(bar.html() for bar in bars), again)


def print_lines() -> Callable[[list[Bar]], None]:
    """Return a function that shows lines on stderr, every ten seconds at most."""
    due = 0.0

    def show(bars: list[Bar]) -> None:
        nonlocal due
        now = environment.current.now()
        told = [f"monarch: {bar.text}\n" for bar in bars if not bar.over]
        if not told:
            due = 0.0
        elif now >= due:
            due = now + _AGAIN
            sys.stderr.write("".join(told))
            sys.stderr.flush()

    return show
