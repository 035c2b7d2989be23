"""Values that streams and actors of one process hand to each other, by key.

A stream hands over the arguments of a call, and the actor waits for them; the actor hands over the
result of an `rref`, and the stream waits for that. Each value is taken once, whichever side comes
first. A key is the number of the call and the place of the value in it.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError
from typing import Any

__all__ = ["RESULT", "Key", "hand_over", "take"]

Key = tuple[int, int]
RESULT = -1
"""The place of the result of a call; the arguments count from 0."""

_shares: dict[tuple[str, Key], Future[Any]] = {}
_lock = threading.Lock()


def _share_of(engine: str, key: Key) -> Future[Any]:
    with _lock:
        return _shares.setdefault((engine, key), Future())


def hand_over(engine: str, key: Key, value: Any = None, error: Exception | None = None) -> None:
    """Give a value, or the error because of which there is none; the first one counts."""
    future = _share_of(engine, key)
    with contextlib.suppress(InvalidStateError):  # the actor was lost, or gave up waiting
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def take(engine: str, key: Key) -> Future[Any]:
    """Return the future of a value, for the one who waits for it."""
    future = _share_of(engine, key)
    future.add_done_callback(lambda _: _forget(engine, key))
    return future


def _forget(engine: str, key: Key) -> None:
    with _lock:
        _shares.pop((engine, key), None)
