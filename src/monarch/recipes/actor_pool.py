"""A pool of actors: each call goes to the one that has the least to do.

A pool counts the calls that it has made to an actor and that have no result yet, so two pools over
the same actors know nothing of each other. An actor whose process was lost looks idle; so it is
left out for a while, twice as long each time, until a call to it has succeeded.

With `retries` a map makes the call of a value again. Whichever thread first knows of the outcome
does that: the one that is notified of it, or the one that iterates. So the actors that are left
have work while the program handles a result. A call that a lost actor refused has not begun, and
does not count. If no actor is left, the iterating thread waits for their supervisor.

Rejected: to take a lost actor into the pool again when its supervisor says so, since a pool may be
in another process than the supervisor; a refused call costs less than a message would.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from monarch.actor import Actor, ActorError, Future, SupervisionError, Supervisor, context
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
        retries: how often `map` and `map_unordered` make the call of a value again if the actor
            that had it was lost. 0: the loss is raised in the place of the value.
        retry_exceptions: classes of exceptions after which they make the call again as well, if an
            endpoint raises one. By default an exception of an endpoint is raised, and its call is
            not repeated, as with `concurrent.futures` and Ray.

    A call that is made again may have been carried out in part, or completely, before its actor was
    lost; so `retries` is for calls that may be repeated.

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

    Methods are for any thread. Raises ValueError if `retries` is negative, or 0 with
    `retry_exceptions`.
    """

    def __init__(
        self,
        actors: TActor,
        *,
        retries: int = 0,
        retry_exceptions: tuple[type[Exception], ...] = (),
    ) -> None:
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        if retry_exceptions and not retries:
            raise ValueError("retry_exceptions needs retries: how often a call is made again")
        mesh: Any = actors
        flat = mesh.flatten("rank")
        self._lock = threading.Lock()
        self._members = [_Member(flat.slice(rank=i)) for i in range(flat.size())]
        self._turn = context().actor_instance.rank.rank  # pools of several actors begin apart
        self._supervisor = Supervisor.of(actors)
        self._retries = retries
        self._retry_exceptions = retry_exceptions

    def __len__(self) -> int:
        """Return the number of actors."""
        return len(self._members)

    @property
    def loads(self) -> list[int]:
        """How many calls of this pool each actor has, by its rank."""
        return [member.load for member in self._members]

    def submit(self, call: Callable[[TActor], Future[R]]) -> Future[R]:
        """Choose the actor with the least to do, and return what ``call(actor)`` returns.

        `call` calls one endpoint of the actor, and returns its future. Does not block, and makes
        the call once, whatever `retries` is: the caller knows what to do after a loss.
        """
        attempt = _Attempt(self._lock, self._take(), call)
        attempt.future.add_done_callback(attempt.end)
        return attempt.future

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

        With `retries` of the pool, a call whose actor was lost is made again, on another actor or
        on the replaced one, so `call` may be called by another thread. The order is kept. If all
        actors are lost, it waits until their supervisor has replaced them, or raises
        `SupervisionError` with the cause if they have none in this process, or it has given up.
        """
        return self._results(call, values, ahead, timeout, ordered=True)

    def map_unordered(
        self,
        call: Callable[[TActor, T], Future[R]],
        values: Iterable[T],
        *,
        ahead: int = 2,
        timeout: float | None = None,
    ) -> Iterator[R]:
        """Iterate as `map`, over the results in the order in which they come."""
        return self._results(call, values, ahead, timeout, ordered=False)

    def _results(
        self,
        call: Callable[[TActor, T], Future[R]],
        values: Iterable[T],
        ahead: int,
        timeout: float | None,
        *,
        ordered: bool,
    ) -> Iterator[R]:
        if ahead < 1:
            raise ValueError(f"ahead must be positive, got {ahead}")
        pending: deque[_Item[R]] = deque()
        try:
            for value in values:
                pending.append(_Item(self, functools.partial(_call, call, value)))
                if len(pending) >= ahead * len(self._members):
                    yield self._next(pending, timeout, ordered=ordered)
            while pending:
                yield self._next(pending, timeout, ordered=ordered)
        finally:
            for item in pending:  # the iteration was left early
                item.drop()

    def _next(self, pending: deque[_Item[R]], timeout: float | None, *, ordered: bool) -> R:
        """Wait for the next result, and remove its item."""
        until = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while True:
            item, attempt = _oldest(pending, left) if ordered else _first(pending, left)
            if not item.renew(attempt):
                if not item.lacks_actor(attempt):
                    pending.remove(item)
                    return attempt.future.result()
                self._await_actors(attempt.future.exception(), left)
                for other in pending:
                    other.renew(other.attempt)
            if until is not None:
                left = max(0.0, until - time.monotonic())

    def _await_actors(self, error: BaseException | None, timeout: float | None) -> None:
        """Wait until the supervisor has replaced the actors, all of which are lost by `error`."""
        if self._supervisor is None:
            count = len(self._members)
            lost = "the only actor of the pool is lost"
            if count > 1:
                lost = f"all {count} actors of the pool are lost, one of them by this"
            all_lost = SupervisionError(f"{lost}: {error}")
            all_lost.failure = getattr(error, "failure", None)
            raise all_lost from error
        self._supervisor.healthy.get(timeout)
        now = time.monotonic()
        with self._lock:
            for member in self._members:
                member.since = min(member.since, now)
                member.pause = 0.0

    def _take(self) -> _Member:
        """Choose an actor for a new call: one that is not left out, unless all are."""
        now = time.monotonic()
        with self._lock:
            ready = [member for member in self._members if member.since <= now]
            return self._least_loaded(ready or self._members)

    def _take_other(self) -> _Member | None:
        """Choose an actor for a call that is made again: a lost one only if no other is left."""
        now = time.monotonic()
        with self._lock:
            members = [member for member in self._members if not member.since]
            members = members or [member for member in self._members if member.since <= now]
            return self._least_loaded(members) if members else None

    def _least_loaded(self, members: Sequence[_Member]) -> _Member:
        self._turn += 1
        turned = (*members[self._turn % len(members) :], *members[: self._turn % len(members)])
        member = min(turned, key=lambda member: member.load)
        member.load += 1
        return member


def _call(call: Callable[[Any, T], Future[R]], value: T, actor: Any) -> Future[R]:
    return call(actor, value)


def _oldest(pending: deque[_Item[R]], timeout: float | None) -> tuple[_Item[R], _Attempt[R]]:
    """Wait for the first item, and return it with its attempt that has ended."""
    attempt = pending[0].attempt
    try:
        attempt.future.result(timeout)
    except Exception:
        if not attempt.future.done():
            raise
    return pending[0], attempt


def _first(pending: deque[_Item[R]], timeout: float | None) -> tuple[_Item[R], _Attempt[R]]:
    """Wait for any item, and return it with its attempt that has ended."""
    attempts = [(item, item.attempt) for item in pending]
    done, _ = first([attempt.future for _, attempt in attempts], timeout=timeout)
    if not done:
        raise TimeoutError(f"none of {len(pending)} calls has ended in {timeout:g} s")
    return next(found for found in attempts if found[1].future is done[0])


class _Member:
    """An actor, how many calls it has, and the time since when it may get others.

    `since` is 0 unless the actor was lost, and no call to it has succeeded since then.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.load = 0
        self.since = 0.0
        self.pause = 0.0


class _Attempt(Generic[R]):
    """A call to an actor of a pool, whose `lock` guards the members.

    Attributes:
        future: its future.
        refused: whether the actor had been lost before, so that the call has not begun.
    """

    def __init__(
        self, lock: threading.Lock, member: _Member, call: Callable[[Any], Future[R]]
    ) -> None:
        self._lock = lock
        self._member = member
        self._is_open = True
        self._was_lost = member.since > 0
        began = time.time()  # noqa: TID251 - failures have the time by the clock of the wall
        try:
            self.future = call(member.actor)
            self.refused = self.future.done() and self._is_of_before(began)
        except BaseException:
            with lock:
                member.load -= 1
            raise

    def _is_of_before(self, began: float) -> bool:
        """Whether the call has failed since its actor had been lost at that time."""
        error = None if self.future.cancelled() else self.future.exception()
        if not isinstance(error, SupervisionError):
            return False
        return self._was_lost or (error.failure is not None and error.failure.root.when < began)

    def end(self, future: Future[Any]) -> None:
        """Note the outcome of the call; only the first time has an effect."""
        cancelled = future.cancelled()
        is_lost = not cancelled and isinstance(future.exception(), SupervisionError)
        member = self._member
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            member.load -= 1
            if is_lost:
                shortest, longest = _PAUSES
                member.pause = min(longest, 2 * member.pause or shortest)
                member.since = time.monotonic() + member.pause
            elif self._was_lost and not cancelled:
                member.pause = member.since = 0.0


class _Item(Generic[R]):
    """A value of a map: its newest attempt, and how often the call may be made again."""

    def __init__(self, pool: ActorPool[Any], call: Callable[[Any], Future[R]]) -> None:
        self._pool = pool
        self._call = call
        self._context = contextvars.copy_context()
        self._retries = pool._retries
        self._waits = pool._retries  # for actors, until a call has begun
        self._over = False
        self._lock = threading.Lock()
        self.attempt = self._try(pool._take())
        self._watch(self.attempt)

    def renew(self, attempt: _Attempt[R]) -> bool:
        """Make the call again if `attempt` has ended in such a way; whether there is a newer one.

        From any thread. Does not wait for an actor.
        """
        with self._lock:
            if self.attempt is not attempt:
                return True
            if not attempt.future.done():
                return False
            attempt.end(attempt.future)
            if not self._may_repeat(attempt):
                return False
            member = self._pool._take_other()
            if member is None:
                return False
            if not attempt.refused:
                self._retries -= 1
            newer = self._context.run(self._try, member)
            self.attempt = newer
        self._watch(newer)
        return True

    def lacks_actor(self, attempt: _Attempt[R]) -> bool:
        """Whether the call may be made again as soon as there is an actor for it."""
        with self._lock:
            if not self._may_repeat(attempt) or not self._is_lost(attempt):
                return False
            self._waits = self._waits - 1 if attempt.refused else self._pool._retries
            return self._waits >= 0

    def drop(self) -> None:
        """Give the call up."""
        with self._lock:
            self._over = True
            attempt = self.attempt
        attempt.future.cancel()

    def _try(self, member: _Member) -> _Attempt[R]:
        return _Attempt(self._pool._lock, member, self._call)

    def _watch(self, attempt: _Attempt[R]) -> None:
        attempt.future.add_done_callback(lambda _: self.renew(attempt))

    def _may_repeat(self, attempt: _Attempt[R]) -> bool:
        if self._over or attempt.future.cancelled() or not self._pool._retries:
            return False
        if self._is_lost(attempt):
            return attempt.refused or self._retries > 0
        error = attempt.future.exception()
        own = error.exception if isinstance(error, ActorError) else error
        return isinstance(own, self._pool._retry_exceptions) and self._retries > 0

    def _is_lost(self, attempt: _Attempt[R]) -> bool:
        return isinstance(attempt.future.exception(), SupervisionError)
