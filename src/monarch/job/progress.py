"""A word on stderr about whatever takes longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator

__all__ = ["progress"]

_FIRST = 2.0
_NEXT = 10.0
_waits: list[str | Callable[[], str]] = []  # the innermost, which knows best, is the last


@contextlib.contextmanager
def progress(what: str | Callable[[], str]) -> Generator[None]:
    """Say that `what` is being waited for, after 2 seconds and every 10 from then on.

    A function is asked each time. Within another wait nothing is printed in addition: the other
    one says `what` instead of its own.
    """
    _waits.append(what)
    if len(_waits) > 1:
        try:
            yield
        finally:
            _waits.remove(what)
        return
    done = threading.Event()

    def tell() -> None:
        waited = _FIRST
        while not done.wait(_FIRST if waited == _FIRST else _NEXT):
            now = _waits[-1]
            text = now if isinstance(now, str) else now()
            sys.stderr.write(f"monarch: {text} ... ({waited:.0f} s)\n")
            sys.stderr.flush()
            waited += _NEXT

    thread = threading.Thread(target=tell, name="monarch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _waits.remove(what)
