"""A pool of actors: each call goes to the one that has the least to do.

A pool counts the calls that it has made to an actor and that have no result yet, so two pools over
the same actors know nothing of each other. An actor whose process was lost looks idle; so it is
left out for a while, twice as long each time, until a call to it has succeeded.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from monarch.actor import Actor, Future, SupervisionError, context
from monarch.recipes.completion import first

__all__ = ["ActorPool"]

TActor = TypeVar("TActor", bound=Actor)
T = TypeVar("T")
R = TypeVar("R")
_PAUSES = (0.1, 10.0)  # seconds that an actor is left out after a failure: at first, at most


class ActorPool(Generic[TActor]):
    """The actors of a mesh as a pool.

    Args:
        actors: a mesh of any shape. Under a `Supervisor`, lost ranks come back to the pool.

    >>> from monarch.actor import Actor, endpoint, this_host
    >>> class Squares(Actor):
    ...     @endpoint
    ...     def square(self, x): return x * x
    >>> procs = this_host().spawn_procs({"procs": 2})
    >>> pool = ActorPool(procs.spawn("squares", Squares))
    >>> pool.submit(lambda actor: actor.square.call_one(12)).get()
    144
    >>> list(pool.map(lambda actor, x: actor.square.call_one(x), range(5)))
    [0, 1, 4, 9, 16]
    >>> procs.stop().get()

    Methods are for any thread.
    """

    def __init__(self, actors: TActor) -> None:
        mesh: Any = actors
        flat = mesh.flatten("rank")
        self._lock = threading.Lock()
        self._members = [_Member(flat.slice(rank=i), self._lock) for i in range(flat.size())]
        self._turn = context().actor_instance.rank.rank  # pools of several actors begin apart

    def __len__(self) -> int:
        """Return the number of actors."""
        return len(self._members)

    @property
    def loads(self) -> list[int]:
        """How many calls of this pool each actor has, by its rank."""
        return [member.load for member in self._members]

    def submit(self, call: Callable[[TActor], Future[R]]) -> Future[R]:
        """Choose the actor with the least to do, and return what ``call(actor)`` returns.

        `call` calls one endpoint of the actor, and returns its future. Does not block.
        """
        with self._lock:
            member = self._choose()
            member.load += 1
        try:
            future = call(member.actor)
            future.add_done_callback(member.finish)
        except BaseException:
            with self._lock:
                member.load -= 1
            raise
        return future

    def map(
        self,
        call: Callable[[TActor, T], Future[R]],
        values: Iterable[T],
        *,
        ahead: int = 2,
        timeout: float | None = None,
    ) -> Iterator[R]:
        """Iterate over the results of ``call(actor, value)``, in the order of the values.

        Values are taken as results come: at most `ahead` for each actor are under way, so `values`
        may be endless. Raises the error of a call in its place, and TimeoutError if the next result
        takes longer than `timeout` seconds.
        """
        for future in self._under_way(call, values, ahead, _oldest):
            yield future.get(timeout)

    def map_unordered(
        self,
        call: Callable[[TActor, T], Future[R]],
        values: Iterable[T],
        *,
        ahead: int = 2,
        timeout: float | None = None,
    ) -> Iterator[R]:
        """Iterate as `map`, over the results in the order in which they come."""

        def next_done(pending: deque[Future[R]]) -> Future[R]:
            done, _ = first(pending, timeout=timeout)
            if not done:
                raise TimeoutError(f"none of {len(pending)} calls has ended in {timeout:g} s")
            pending.remove(done[0])
            return done[0]

        for future in self._under_way(call, values, ahead, next_done):
            yield future.get()

    def _under_way(
        self,
        call: Callable[[TActor, T], Future[R]],
        values: Iterable[T],
        ahead: int,
        choose: Callable[[deque[Future[R]]], Future[R]],
    ) -> Iterator[Future[R]]:
        if ahead < 1:
            raise ValueError(f"ahead must be positive, got {ahead}")
        pending: deque[Future[R]] = deque()
        try:
            for value in values:
                pending.append(self.submit(functools.partial(_call, call, value)))
                if len(pending) >= ahead * len(self._members):
                    yield choose(pending)
            while pending:
                yield choose(pending)
        finally:
            for future in pending:  # the iteration was left early
                future.cancel()

    def _choose(self) -> _Member:
        now = time.monotonic()
        members = [member for member in self._members if member.since <= now] or self._members
        self._turn += 1
        turned = members[self._turn % len(members) :] + members[: self._turn % len(members)]
        return min(turned, key=lambda member: member.load)


def _call(call: Callable[[Any, T], Future[R]], value: T, actor: Any) -> Future[R]:
    return call(actor, value)


def _oldest(pending: deque[Future[R]]) -> Future[R]:
    return pending.popleft()


class _Member:
    """An actor, how many calls it has, and the time since when it may get others.

    `lock` is that of the pool, which guards them.
    """

    def __init__(self, actor: Any, lock: threading.Lock) -> None:
        self.actor = actor
        self.load = 0
        self.since = 0.0
        self._pause = 0.0
        self._lock = lock

    def finish(self, future: Future[Any]) -> None:
        """Note the end of a call."""
        is_lost = not future.cancelled() and isinstance(future.exception(), SupervisionError)
        with self._lock:
            self.load -= 1
            if is_lost:
                shortest, longest = _PAUSES
                self._pause = min(longest, 2 * self._pause or shortest)
                self.since = time.monotonic() + self._pause
            elif not future.cancelled():
                self._pause = self.since = 0.0
