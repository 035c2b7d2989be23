"""Wait for the first of several calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from monarch.actor import Future

if TYPE_CHECKING:
    import concurrent.futures

__all__ = ["first"]

F = TypeVar("F", bound="Future[Any] | concurrent.futures.Future[Any]")


def first(
    futures: Iterable[F], count: int = 1, *, timeout: float | None = None
) -> tuple[list[F], list[F]]:
    """Wait until `count` of the futures have an outcome; return those, and the others.

    They are calls, or what an `Executor` has submitted. Those with an outcome, a value or an error,
    come in the order in which they got it, and are at most `count`; the others are in the order of
    the arguments. Blocks the calling thread.
    After `timeout` seconds there may be fewer than `count`; there is no error for that. In an async
    endpoint, `asyncio.wait` does the same with ``return_when=asyncio.FIRST_COMPLETED``.

    >>> from monarch.actor import Actor, endpoint, this_host
    >>> class Sleeper(Actor):
    ...     @endpoint
    ...     def sleep(self, seconds):
    ...         import time; time.sleep(seconds)
    ...         return seconds
    >>> procs = this_host().spawn_procs({"procs": 2})
    >>> sleepers = procs.spawn("sleepers", Sleeper)
    >>> calls = [sleepers.slice(procs=i).sleep.call_one(t) for i, t in enumerate([3.0, 0.0])]
    >>> done, pending = first(calls)
    >>> [call.get() for call in done], len(pending)
    ([0.0], 1)
    >>> procs.stop().get()

    Raises ValueError if `count` is not positive or there are fewer futures, or if a future is there
    twice.
    """
    given = list(futures)
    if not 0 < count <= len(given):
        raise ValueError(f"count must be between 1 and the {len(given)} futures, not {count}")
    if len(set(map(id, given))) < len(given):
        raise ValueError("a future is there twice")
    done: list[F] = []
    changed = threading.Condition()

    def settled(future: F, _: object) -> None:
        with changed:
            done.append(future)
            changed.notify()

    callbacks = [functools.partial(settled, future) for future in given]
    for future, callback in zip(given, callbacks, strict=True):
        future.add_done_callback(callback)
    with changed:
        changed.wait_for(lambda: len(done) >= count, timeout)
        found = done[:count]
    for future, callback in zip(given, callbacks, strict=True):
        if isinstance(future, Future):  # that of concurrent.futures keeps its callbacks
            future.remove_done_callback(callback)
    chosen = set(map(id, found))
    return found, [future for future in given if id(future) not in chosen]
