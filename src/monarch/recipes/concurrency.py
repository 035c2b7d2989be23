"""`max_concurrency`: a limit on the calls of an actor that run at a time.

The limit is a decorator below `concurrent_endpoint`, since that is where calls of an actor begin to
run beside each other. Rejected: an argument of `spawn`, whose keyword arguments belong to the
constructor; one number for all endpoints of an actor, which would also make those wait that ask
for its state, or end its work.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["max_concurrency"]

P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
_ROOMS = "_max_concurrency"  # the attribute of an actor that has the semaphore of each limit


class max_concurrency:  # noqa: N801 - used like a function
    """Let at most `limit` calls of an endpoint run at a time, in each actor.

    Args:
        limit: how many calls may be between the first line of the method and its return.

    It decorates the ``async def`` below `concurrent_endpoint`. Further calls wait in the actor, at
    no cost but the memory of their arguments; endpoints without the limit run meanwhile. A limit
    that decorates several methods of a class counts their calls together. Callers notice no
    difference; a call that is cancelled while it waits never begins.

    >>> from monarch.actor import Actor, concurrent_endpoint, this_host
    >>> class Model(Actor):
    ...     @concurrent_endpoint
    ...     @max_concurrency(8)
    ...     async def complete(self, prompt): return prompt + "!"
    >>> procs = this_host().spawn_procs()
    >>> model = procs.spawn("model", Model)
    >>> [call.get() for call in [model.complete.call_one(f"{i}") for i in range(3)]]
    ['0!', '1!', '2!']
    >>> procs.stop().get()

    Raises ValueError unless `limit` is at least 1, and TypeError for a method that is no ``async
    def``, or is an endpoint already.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {limit}")
        self._limit = limit

    def __call__(self, method: Method[P, R]) -> Method[P, R]:
        """Return the method with the limit."""
        if not inspect.iscoroutinefunction(method):
            raise TypeError(
                f"max_concurrency({self._limit}) is for an async def, and stands below "
                f"@concurrent_endpoint; it was given {method!r}"
            )

        @functools.wraps(method)
        async def limited(actor: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            async with self._room_of(actor):
                return await method(actor, *args, **kwargs)

        return limited

    def _room_of(self, actor: Any) -> asyncio.Semaphore:
        rooms: dict[max_concurrency, asyncio.Semaphore] = getattr(actor, _ROOMS, {})
        if self not in rooms:
            rooms[self] = asyncio.Semaphore(self._limit)
            setattr(actor, _ROOMS, rooms)
        return rooms[self]
