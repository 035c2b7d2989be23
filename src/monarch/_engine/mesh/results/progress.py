"""Lines on stderr about waits that take longer than two seconds.

There are two kinds of waits: a block of code that blocks (`progress`), and a future that is not
settled (`tell_while`), for which the program may wait at any line, or not at all. While there is a
block, only the thread of the outermost block prints. It prints the most specific text: that of the
newest future or, without one, of the innermost block. Under the simulator nothing is printed, since
no real time passes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

from monarch._engine.mesh.results.future import Future
from monarch._engine.runtime.agent.client import client_proc, when_forked
from monarch._engine.runtime.io import environment as environments

__all__ = ["progress", "tell_while"]

_FIRST = 2.0
_NEXT = 10.0
_LOOK = 0.5
_blocks: list[str | Callable[[], str]] = []
_pending: dict[Future[Any], tuple[Callable[[], str], float]] = {}  # future -> text, since when
_told: weakref.WeakSet[Future[Any]] = weakref.WeakSet()  # futures that have a reporting thread
_looking = False


@contextlib.contextmanager
def progress(what: str | Callable[[], str]) -> Generator[None]:
    """Print `what` if the block takes longer than 2 seconds, and every 10 seconds from then on.

    If `what` is a function, it is called for each line. Inside another such block there are no
    further lines: those of the outer block have this `what` as their text.
    """
    done = threading.Event()
    thread = threading.Thread(
        target=_tell, args=(done.wait, _known_best, _FIRST), name="monarch-progress", daemon=True
    )
    _blocks.append(what)
    try:  # whatever an interrupt hits, the thread ends
        if len(_blocks) == 1:
            thread.start()
        yield
    finally:
        done.set()
        try:
            if thread.is_alive():
                thread.join()
        finally:
            _blocks.remove(what)


def tell_while(future: Future[Any], what: Callable[[], str]) -> None:
    """As `progress`, while `future` is not settled. Does not block.

    `what` is called in a thread of its own, so it may block. An empty text is not printed.
    """
    global _looking
    if type(environments.current) is not environments.Environment:
        return
    _pending[future] = what, environments.current.now()
    future._notify(lambda: _pending.pop(future, None))
    if not _looking:
        _looking = True
        client_proc().clock.call_later(_LOOK, _look)


def _look() -> None:
    """Start a reporting thread for each future that has been pending for two seconds."""
    global _looking
    _looking = False
    now = environments.current.now()
    for future, (what, since) in list(_pending.items()):
        if future not in _told and now - since >= _FIRST:
            _take_up(future, what)
    if any(future not in _told for future in list(_pending)):
        _looking = True
        client_proc().clock.call_later(_LOOK, _look)


def _take_up(future: Future[Any], what: Callable[[], str]) -> None:
    _told.add(future)
    done = threading.Event()
    future._notify(done.set)

    def aside() -> str:
        return "" if _blocks or done.is_set() else what()

    tell = functools.partial(_tell, done.wait, aside, 0.0)
    environments.current.start_thread("monarch-progress", tell)


def _known_best() -> str:
    for text, _ in reversed(list(_pending.values())):
        if said := text():
            return said
    now = _blocks[-1] if _blocks else ""
    return now if isinstance(now, str) else now()


def _tell(wait: Callable[[float], bool], text: Callable[[], str], pause: float) -> None:
    waited = _FIRST
    while not wait(pause):
        now = text()
        if now and not wait(0.0):
            sys.stderr.write(f"monarch: {now} ... ({waited:.0f} s)\n")
            sys.stderr.flush()
        waited, pause = waited + _NEXT, _NEXT


def _forked() -> None:
    """In a forked child: forget the waits of the parent, whose threads do not exist here."""
    global _looking
    _looking = False
    _blocks.clear()
    _pending.clear()


when_forked(_forked)
