"""Work for the controller, left by other threads of the client's process.

Work that is left before there is a controller waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Failed", "Work", "attend", "dismiss", "leave"]

Work = Callable[[Any], object]
"""A function to be called with the controller, on its event loop."""

Failed = Callable[[str], object]
"""A function to be called with the reason if there will be no controller."""

_lock = threading.Lock()
_post: Callable[[Work], object] | None = None
_waiting: list[tuple[Work, Failed]] = []


def leave(work: Work, failed: Failed) -> bool:
    """Leave work, from any thread. Return whether it is the first that waits for a controller."""
    with _lock:
        if _post is None:
            _waiting.append((work, failed))
            return len(_waiting) == 1
        _post(work)
        return False


def attend(post: Callable[[Work], object]) -> None:
    """Begin to pass all work on to `post`. The controller calls it."""
    global _post
    with _lock:
        _post = post
        for work, _ in _waiting:
            post(work)
        _waiting.clear()


def dismiss(reason: str) -> None:
    """Pass no more work on, since there is no controller; what waits for one fails."""
    global _post
    with _lock:
        _post = None
        works, _waiting[:] = list(_waiting), []
    for _, failed in works:
        failed(reason)
