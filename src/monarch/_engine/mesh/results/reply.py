"""Futures that wait for answers: each is the sink of a port.

`Reply` waits for one actor, `Replies` for all of a mesh, `PartialReplies` as well, with errors as
values. `Arrivals` fills the futures (`Arrival`) of a `ValueStream` in the order of answers. So each
adverb that is answered has its class here. `deliver` runs on the reactor and keeps the bytes, which
the observing thread decodes. `peer_lost` settles answers that cannot arrive, and `_expire` those
that are too late for the caller. A thread that begins to wait without a limit rouses the proc's
wait watch.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.mesh.results.future import PENDING, RAISED, RAW, VALUE, Future
from monarch._engine.mesh.results.gather import Gather
from monarch._engine.mesh.results.recall import recall
from monarch._engine.mesh.results.unobserved import Unobserved
from monarch._engine.mesh.results.value_mesh import Answered, Failed, ValueMesh, failure_of
from monarch._engine.runtime.actor.dispatch import rebuild_error, rebuild_raised
from monarch._engine.runtime.proc.body import decode_body, unreadable
from monarch._engine.runtime.proc.ownership import ANY_THREAD, Verdict
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.codec import loads
from monarch._engine.wire.frame import FAILURE

if TYPE_CHECKING:
    import asyncio

    from monarch._engine.mesh.call.endpoint import ActorEndpoint

__all__ = [
    "RAISE",
    "Arrival",
    "Arrivals",
    "Called",
    "PartialReplies",
    "Replies",
    "Reply",
    "ValueStream",
    "error_of",
    "lost_error",
]

R_co = TypeVar("R_co", covariant=True)

RAISE = 4  # flag of a POST: the body is an exception to raise as it is


_INHERITED = (
    "this process was forked after {} was called, and the answer goes to its parent process: call "
    "it in this process"
)


def error_of(flags: int, body: Any, endpoint_name: str) -> BaseException:
    """Return the error of an answer that is no value, by its flags."""
    if type(body) is Unobserved:
        return body.open()
    if flags & FAILURE:
        return SupervisionError.of(Failure.from_bytes(body), endpoint_name)
    if flags & RAISE:
        return rebuild_raised(body)
    return rebuild_error(body)


def _arrived(endpoint: ActorEndpoint[Any, Any], flags: int, body: Any) -> tuple[int, Any]:
    """Return the content of a future whose endpoint raised.

    An actor's failure is not wrapped, since its owner reports it.
    """
    if flags & FAILURE:
        return flags, body
    return flags, Unobserved(endpoint, functools.partial(error_of, flags, body, endpoint.name))


def lost_error(endpoint: ActorEndpoint[Any, Any], rank: int, verdict: Verdict) -> BaseException:
    """Return the error of a call when the process of one rank has exited."""
    if verdict.never_began:
        return ValueError(verdict.error)
    return SupervisionError.of(endpoint.mesh.failure_of_rank(rank, verdict), endpoint.name)


class Called(Future[R_co]):
    """The future of an endpoint's call: implements `Answer` of `monarch._deadlock`."""

    __slots__ = ()

    _endpoint: ActorEndpoint[Any, Any]

    def _is_pending(self) -> bool:
        return self._phase == PENDING

    def _call_name(self) -> str:
        return self._endpoint.name

    def _unanswered(self) -> list[tuple[FrameLink, int, int]]:
        endpoint = self._endpoint
        if endpoint._timeout is not None:
            return []  # the wait ends by itself
        if endpoint.prop._user_port:
            return []  # any holder of the port may answer
        uid = endpoint.mesh._uid
        port, links = self._needs()
        return [(link, uid, port) for link in links]

    def _needs(self) -> tuple[int, list[FrameLink]]:
        """Return the port, and the links that owe answers, if all of them are needed."""
        raise NotImplementedError

    def _overdue(self, timeout: float) -> str:
        return self._endpoint._silence(timeout, self._lacks(), self._asked())

    def _has_error(self) -> bool:
        content = self._content
        return self._phase == RAISED or (self._phase == RAW and bool(content[0]))

    def _lacks(self) -> list[int]:
        """Return the ranks whose answers are missing."""
        raise NotImplementedError

    def _asked(self) -> int:
        """Return how many ranks were called."""
        raise NotImplementedError

    def _drive(self, timeout: float | None) -> None:
        proc = self._endpoint.proc
        if proc.first_port:
            self._refuse_inherited(proc.first_port)
        if timeout is None:
            watch = proc.wait_watch
            if watch.resting:
                watch.rouse()

    def _drive_async(self, loop: asyncio.AbstractEventLoop) -> None:
        """Refuse an inherited future; the gate of an actor's loop reports the await."""
        if first := self._endpoint.proc.first_port:
            self._refuse_inherited(first)

    def _refuse_inherited(self, first: int) -> None:
        """In a forked child, settle a future of the parent, whose answer the parent receives."""
        if self._needs()[0] < first:
            self._resolve(RAISED, RuntimeError(_INHERITED.format(self._call_name())))

    def _decode(self, content: Any) -> Any:
        self._endpoint.proc.asks_ahead = False
        flags, body = content
        if flags:
            raise error_of(flags, body, self._endpoint.name)
        try:
            return loads(body) if type(body) is bytes else decode_body(body)
        except (ImportError, AttributeError, SystemExit) as error:
            raise unreadable(error, f"the result of {self._endpoint.name}") from None


class Reply(Called[R_co]):
    """The answer of one actor."""

    __slots__ = ("_endpoint", "_link", "_port", "_rank")

    _link: FrameLink
    _port: int
    _rank: int

    def _needs(self) -> tuple[int, list[FrameLink]]:
        return self._port, [self._link]

    def _recall(self) -> None:
        self._endpoint.proc.ports.pop(self._port, None)
        recall(self._link, self._endpoint.mesh._uid, self._port)

    def _lacks(self) -> list[int]:
        return [self._rank]

    def _asked(self) -> int:
        return 1

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        self._endpoint.proc.ports.pop(self._port, None)
        self._resolve(RAW, _arrived(self._endpoint, flags, body) if flags else (0, body))

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        if link is self._link:
            self._endpoint.proc.ports.pop(self._port, None)
            self._resolve(RAISED, lost_error(self._endpoint, self._rank, verdict))

    def peer_moved(self, rank: int, old: FrameLink, new: FrameLink) -> None:
        self._link = new

    def _expire(self) -> None:
        self._endpoint.proc.ports.pop(self._port, None)
        self._resolve(RAISED, self._endpoint._late([self._rank], 1))


class Replies(Gather[Any], Called[Any]):
    """The answers of all actors of a mesh; the first error settles it."""

    __slots__ = ("_endpoint",)

    def _needs(self) -> tuple[int, list[FrameLink]]:
        return self._port, self._owing()

    def _recall(self) -> None:
        self._close()
        for link in self._owing():
            recall(link, self._endpoint.mesh._uid, self._port)

    def _lacks(self) -> list[int]:
        return self._owed()

    def _asked(self) -> int:
        return len(self._links)

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        # The same as `_book`, in line, since this runs once per rank of every call.
        outcomes = self._outcomes
        if outcomes[rank] is None:
            outcomes[rank] = body
            self._missing -= 1
            if flags:
                self._end(RAW, _arrived(self._endpoint, flags, body))
            elif not self._missing:
                self._end(RAW, (0, None))

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self._end(RAISED, lost_error(self._endpoint, rank, verdict))

    def _expire(self) -> None:
        late, count = self._owed(), len(self._links)
        instead = 'take what came in time with on_failure="partial"' if len(late) < count else ""
        self._end(RAISED, self._endpoint._late(late, count, instead))

    def _decode(self, content: Any) -> Any:
        flags, body = content
        if flags:
            raise error_of(flags, body, self._endpoint.name)
        endpoint = self._endpoint
        return ValueMesh._lazy(endpoint.mesh._shape, self._outcomes, endpoint.name)


class PartialReplies(Replies):
    """The answers of all actors of a mesh; an error is an answer like others."""

    __slots__ = ()

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        self._note(rank, (flags, body))

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self._note(rank, lost_error(self._endpoint, rank, verdict))

    def _expire(self) -> None:
        for rank in self._owed():
            self._note(rank, self._endpoint._late([rank], 1))

    def _note(self, rank: int, outcome: Any) -> None:
        if self._book(rank, outcome) and not self._missing:
            self._resolve(RAW, (0, None))

    def _decode(self, content: Any) -> Any:
        cells = [self._cell(outcome) for outcome in self._outcomes]
        return ValueMesh._of_cells(self._endpoint.mesh._shape, cells)

    def _cell(self, outcome: Any) -> Any:
        if isinstance(outcome, BaseException):
            return Failed(failure_of(outcome))
        flags, body = outcome
        if not flags:
            return Answered(body)
        try:
            error = error_of(flags, body, self._endpoint.name)
        except BaseException as problem:  # an exception that cannot be rebuilt here
            error = problem
        return Failed(failure_of(error))


class Arrival(Called[R_co]):
    """One of the answers to a stream."""

    __slots__ = ("_arrivals", "_endpoint")

    _arrivals: Arrivals

    def _needs(self) -> tuple[int, list[FrameLink]]:
        arrivals = self._arrivals
        last = list(arrivals._line)[-1:]
        return arrivals._port, arrivals._owing() if last == [self] else []

    def _lacks(self) -> list[int]:
        return self._arrivals._owed()

    def _asked(self) -> int:
        return len(self._arrivals._links)


class Arrivals(Gather[None]):
    """The answers of all actors of a mesh, each for the next future in line."""

    __slots__ = ("_endpoint", "_line")

    _endpoint: ActorEndpoint[Any, Any]
    _line: deque[Arrival[Any]]

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        self._next(rank, RAW, _arrived(self._endpoint, flags, body) if flags else (0, body))

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self._next(rank, RAISED, lost_error(self._endpoint, rank, verdict))

    def _expire(self) -> None:
        for rank in self._owed():
            self._next(rank, RAISED, self._endpoint._late([rank], 1))

    def _next(self, rank: int, state: int, content: Any) -> None:
        if self._book(rank, True):
            self._line.popleft()._resolve(state, content)
            if not self._missing:
                self._resolve(VALUE, None)


ANY_THREAD.add(Reply)

for _kind in (Called, Reply, Replies, PartialReplies, Arrival):
    _kind.__name__ = _kind.__qualname__ = Future.__name__  # the name in errors of Python


class ValueStream(Generic[R_co]):
    """An iterator of exactly one future per actor; the futures resolve as answers arrive."""

    def __init__(self, futures: list[Arrival[R_co]]) -> None:
        self._futures = futures
        self._iterator = iter(futures)

    def __iter__(self) -> Iterator[Future[R_co]]:
        return self

    def __next__(self) -> Future[R_co]:
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._futures)
