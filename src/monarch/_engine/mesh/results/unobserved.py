"""Reports on stderr, one line each, of errors of calls whose results the program never read.

An endpoint that raises answers with its error, which is kept in a future. If the future is garbage
collected before the program reads it, or the program exits first, the error would be lost without
a trace. So each error that arrives is wrapped (`Unobserved`), and a wrapper that is finalised
without having been opened reports the error. Values are not wrapped: calls that succeed pay
nothing.

Failures of actors are not reported here: they go to the owners of the actors.

A wrapper may be finalised in any thread, at any moment. So the finaliser only puts the error into a
queue; another thread decodes and prints it. The same error of the same endpoint is printed once,
and counted after that.

A test may take the reports instead (`take_unobserved`). An error belongs to the taker at the moment
when it arrived, whenever its future is collected: a test that fails keeps its futures in the
traceback, and these must not fail the next test.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import ActorError, headline
from monarch._engine.base.settings import settings
from monarch._engine.runtime.agent.client import current_proc
from monarch._engine.runtime.io import environment as environments

if TYPE_CHECKING:
    from monarch._engine.mesh.call.endpoint import ActorEndpoint

__all__ = [
    "Unobserved",
    "leave_unobserved_to_exit",
    "report_unobserved",
    "settle_unobserved",
    "take_unobserved",
]

Taker: TypeAlias = Callable[[Any, str], object]

_KINDS = 1000  # different errors that are remembered

_arrived: weakref.WeakSet[Unobserved] = weakref.WeakSet()
_collected: deque[_Lost] = deque()
_shown: dict[tuple[str, str], int] = {}  # endpoint and error -> how often it was not printed
_busy = False  # whether a thread works on `_collected`
_ending = False  # whether the program exits
_reporting = threading.Lock()  # held by a thread that reports, but not at the exit
_taker: Taker | None = None  # gets the reports instead of stderr


class Unobserved:
    """An error that has arrived and that the program has not read yet."""

    __slots__ = ("__weakref__", "_lost")

    def __init__(
        self, endpoint: ActorEndpoint[Any, Any], rebuild: Callable[[], BaseException]
    ) -> None:
        self._lost: _Lost | None = _Lost(endpoint, rebuild)
        _arrived.add(self)

    def open(self) -> BaseException:
        """Return the error, which counts as observed from now on; may be called once."""
        lost, self._lost = self._lost, None
        assert lost is not None  # a future decodes its result once
        return lost.rebuild()

    def __del__(self) -> None:
        lost = self._lost
        proc = current_proc()
        # A forked child also has the futures of its parent, which it must not report.
        if lost is not None and proc is not None and proc is lost.endpoint.proc:
            _collected.append(lost)
            proc.reactor.call_soon(_start)


class _Lost:
    """The content of an `Unobserved`: what is needed to rebuild and report the error."""

    __slots__ = ("endpoint", "rebuild", "taker")

    def __init__(
        self, endpoint: ActorEndpoint[Any, Any], rebuild: Callable[[], BaseException]
    ) -> None:
        self.endpoint = endpoint
        self.rebuild = rebuild
        self.taker = _taker

    def report(self) -> None:
        if not settings.report_unobserved_errors:
            return
        if self.endpoint.mesh._class.__module__.startswith("monarch."):
            return  # errors of the runtime's own calls are reported elsewhere, in user terms
        name = self.endpoint.name
        try:
            error = self.rebuild()
        except Exception as problem:  # the error cannot be rebuilt here: report that instead
            error = problem
        where = ""
        if isinstance(error, ActorError):
            where = f" (rank {error.rank}, pid {error.pid} on {error.host})" if error.host else ""
            error = error.exception
        text = headline(error)
        if self.taker is not None:
            self.taker(self.endpoint.mesh, f"{name} failed: {text}{where}")
            return
        count = _shown.get((name, text))
        if count is not None:
            _shown[name, text] = count + 1
            return
        if len(_shown) >= _KINDS:
            _tell_counts()
        _shown[name, text] = 0
        _write(
            f"{name} failed and its result was never retrieved: {text}{where}. To handle it, get() "
            "or await what the call returned; configure(report_unobserved_errors=False) turns this "
            f"report off.{see_page('result-never-retrieved')}"
        )


def report_unobserved(*, ending: bool = False) -> None:
    """Report the errors in the queue; if the program is `ending`, all other unread ones as well."""
    if ending:
        for error in list(_arrived):
            lost, error._lost = error._lost, None
            if lost is not None:
                _collected.append(lost)
    while _collected:
        _collected.popleft().report()
    if ending:
        _tell_counts()


def take_unobserved(taker: Taker | None) -> Taker | None:
    """Have `taker(actors, report)` called instead of printing; return the taker before.

    That is for errors that arrive from now on; it may be called on any thread. None: print them.
    `actors` is the `ActorMesh` that was called.
    """
    global _taker
    before, _taker = _taker, taker
    return before


def settle_unobserved(patience: float) -> None:
    """Report the errors in the queue, and wait for a thread that does so, at most `patience` s.

    Errors that have arrived and whose futures exist are no longer reported to the taker.
    """
    if _reporting.acquire(timeout=patience):
        try:
            report_unobserved()
        finally:
            _reporting.release()
    for error in list(_arrived):
        lost = error._lost
        if lost is not None:
            lost.taker = None


def leave_unobserved_to_exit() -> None:
    """Start no further threads for reports; the program's exit reports the remaining errors."""
    global _ending
    _ending = True


def _start() -> None:
    """On the reactor: start a thread that reports, since decoding and printing may take long."""
    global _busy
    if _collected and not _busy and not _ending:
        _busy = True
        environments.current.start_thread("monarch-unobserved", _run)


def _run() -> None:
    global _busy
    try:
        with _reporting:
            report_unobserved()
    finally:
        _busy = False
    proc = current_proc()
    if _collected and proc is not None:
        proc.reactor.call_soon(_start)


def _tell_counts() -> None:
    for (name, text), count in _shown.items():
        if count and settings.report_unobserved_errors:
            times = "once more" if count == 1 else f"{count} times more"
            _write(f"{name} failed {times} and its result was never retrieved: {text}")
    _shown.clear()


def _write(text: str) -> None:
    stream = sys.stderr
    if stream is not None:  # pyright: ignore[reportUnnecessaryComparison] - without a console
        stream.write(f"monarch: {text}\n")
        stream.flush()
