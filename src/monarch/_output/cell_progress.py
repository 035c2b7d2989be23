"""How far the calls are that a cell of a notebook awaits for more than two seconds.

A timer of the slow clock looks at the awaited calls twice a second while a cell runs. Only when one
of them is long, a thread begins to show them: a bar for each call, under the cell and in the same
place until the cell ends. What stays then is one line about the last of the long calls.

In a terminal there is no such place, and actors write to the same terminal. There a long call is a
wait as any other (`tell_while`): a line after two seconds, and every ten seconds from then on.

A call is counted from when it was first seen, so up to half a second late. Calls that a task of an
earlier cell awaits already when a cell begins are not of this cell.
"""

from __future__ import annotations

import html
import itertools
import threading
from collections.abc import Callable, Iterator

from monarch._output.awaited import AwaitedCall, awaited_calls
from monarch._spi import Proc, environment, tell_while

__all__ = ["CellProgress", "tell_long_calls"]

_LONG = 2.0
_LOOK = 0.5
_MOST = 4  # bars

_STYLE = "font-family:monospace;font-size:12px;opacity:.7"

Publish = Callable[[str, str, bool], None]
"""Shows a text and the same as HTML; True: in the place of the former."""


class CellProgress:
    """The long calls of one cell, from its begin to `end`.

    Args:
        proc: the process of the cell.
        publish: shows them; called from a thread of this class and in `end`.
    """

    def __init__(self, proc: Proc, publish: Publish) -> None:
        self._proc = proc
        self._publish = publish
        self._earlier = set(awaited_calls(proc))
        self._calls: dict[int, AwaitedCall] = {}  # by port
        self._last = ""  # about the last long call that has ended
        self._ended = 0  # long calls
        self._shown = ""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        proc.clock.call_later(_LOOK, self._look)

    def end(self) -> None:
        """End with the cell; what was shown is replaced by a line about the last long call."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._shown:
            self._note(over=True)
            more = f"; {self._ended} calls took longer than 2 s" if self._ended > 1 else ""
            self._show([(f"{self._last}{more}", 0, 1)])

    def _look(self) -> None:
        """Look for a long call; on the clock's thread, which must not be held up by output."""
        if self._over.is_set():
            return
        self._note()
        if self._long():
            self._thread = threading.Thread(target=self._run, name="monarch-progress", daemon=True)
            self._thread.start()
        else:
            self._proc.clock.call_later(_LOOK, self._look)

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
        while not self._over.is_set():
            long = self._long()
            if long:
                self._show(list(_states(long)))
            elif self._last:
                self._show([(self._last, 0, 1)])
            self._over.wait(_LOOK)
            self._note()

    def _show(self, bars: list[tuple[str, int, int]]) -> None:
        text = "\n".join(line for line, _, _ in bars)
        if text != self._shown:
            again, self._shown = bool(self._shown), text
            self._publish(text, "".join(_bar(*bar) for bar in bars), again)


def _states(long: list[AwaitedCall]) -> Iterator[tuple[str, int, int]]:
    """Yield a text for each endpoint, and how many of how many ranks have answered."""
    now = environment.current.now()
    groups: dict[str, list[AwaitedCall]] = {}
    for call in long:
        groups.setdefault(call.name, []).append(call)
    for name, calls in itertools.islice(groups.items(), _MOST):
        seconds = f"{max(call.seconds(now) for call in calls):.0f} s"
        if len(calls) > 1:
            yield f"{name}: {len(calls)} calls ({seconds})", 0, 1
        else:
            yield f"{calls[0].state()} ({seconds})", *calls[0].progress()
    if len(groups) > _MOST:
        yield f"and {len(groups) - _MOST} more endpoints", 0, 1


def _bar(text: str, answered: int, asked: int) -> str:
    bar = f'<progress value="{answered}" max="{asked}"></progress> ' if asked > 1 else ""
    return f'<div style="{_STYLE}">{bar}{html.escape(text)}</div>'


def tell_long_calls(proc: Proc, over: threading.Event) -> None:
    """Print lines on stderr about the long calls that are awaited until `over` is set."""
    known = set(awaited_calls(proc))

    def look() -> None:
        if over.is_set():
            return
        now = environment.current.now()
        for port, answers in awaited_calls(proc).items():
            if port not in known:
                known.add(port)
                _tell(AwaitedCall(answers, now))
        proc.clock.call_later(_LOOK, look)

    def _tell(call: AwaitedCall) -> None:
        tell_while(call.answers, lambda: "" if over.is_set() else call.state())

    proc.clock.call_later(_LOOK, look)
