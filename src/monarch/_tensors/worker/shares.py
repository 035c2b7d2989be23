"""Values that streams hand to actors of their process, which wait for them by number."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

__all__ = ["share_of", "take"]

_shares: dict[tuple[str, int], Future[Any]] = {}
_lock = threading.Lock()


def share_of(engine: str, number: int) -> Future[Any]:
    """Return the future of a value; the stream settles it, whichever of both comes first."""
    with _lock:
        return _shares.setdefault((engine, number), Future())


def take(engine: str, number: int) -> Future[Any]:
    """Return the future of a value, for the one actor that waits for it."""
    future = share_of(engine, number)
    future.add_done_callback(lambda _: _forget(engine, number))
    return future


def _forget(engine: str, number: int) -> None:
    with _lock:
        _shares.pop((engine, number), None)
