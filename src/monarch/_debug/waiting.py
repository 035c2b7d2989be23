"""Waiting for a future inside an actor that is stopped.

A rank at a breakpoint blocks on purpose, and if its endpoint is a coroutine, it blocks the event
loop of its actor. `Future.get` rightly warns about that everywhere else. So the running loop is
hidden during the wait, with the functions that asyncio offers to implementers of event loops.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from monarch.actor import Future

__all__ = ["wait_for"]

T = TypeVar("T")


def wait_for(future: Future[T]) -> T:
    """Block until the future is done, on any thread and in any loop, and return its value."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return future.get()
    finally:
        asyncio._set_running_loop(loop)
