"""A word on stderr about whatever takes longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Generator

__all__ = ["progress"]

_FIRST = 2.0
_NEXT = 10.0


@contextlib.contextmanager
def progress(what: str) -> Generator[None]:
    """Say that `what` is being waited for, after 2 seconds and every 10 from then on."""
    done = threading.Event()

    def tell() -> None:
        waited = _FIRST
        while not done.wait(_FIRST if waited == _FIRST else _NEXT):
            print(f"monarch: {what} ... ({waited:.0f} s)", file=sys.stderr, flush=True)
            waited += _NEXT

    thread = threading.Thread(target=tell, name="monarch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
