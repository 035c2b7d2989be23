"""What waits for answers: futures that are sinks of a port.

`Reply` waits for one actor, `Replies` for all of a mesh; `ValueStream` hands answers out as they
arrive. `deliver` runs on the reactor and keeps the bytes, which the thread that looks decodes;
`peer_lost` settles what can no longer come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure
from monarch._engine.mesh.future import RAISED, RAW, Future
from monarch._engine.mesh.value_mesh import ValueMesh
from monarch._engine.runtime.body import decode_body
from monarch._engine.runtime.dispatch import rebuild_error
from monarch._engine.runtime.ends import Verdict
from monarch._engine.wire.frame import FAILURE

if TYPE_CHECKING:
    from monarch._engine.mesh.endpoint import ActorEndpoint

__all__ = ["RAISE", "Replies", "Reply", "ValueStream"]

R_co = TypeVar("R_co", covariant=True)

RAISE = 4  # flag of a POST: the body is an exception to raise as it is


def _error_of(flags: int, body: Any, endpoint_name: str) -> BaseException:
    if flags & FAILURE:
        failure = Failure.from_bytes(body)
        return SupervisionError(failure.report(), endpoint_name)
    if flags & RAISE:
        error: BaseException = decode_body(body)
        return error
    return rebuild_error(body)


def lost_error(endpoint: ActorEndpoint[Any, Any], rank: int, verdict: Verdict) -> BaseException:
    """What a caller is told when the process of one rank is gone."""
    if verdict.never_began:
        return ValueError(verdict.error)
    failure = endpoint.mesh.failure_of_rank(rank, verdict)
    return SupervisionError(failure.report(), endpoint.name)


class Reply(Future[R_co]):
    """The answer of one actor."""

    __slots__ = ("_endpoint", "_link", "_port", "_rank")

    _endpoint: ActorEndpoint[Any, Any]
    _link: Any
    _port: int
    _rank: int

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        self._endpoint.proc.ports.pop(self._port, None)
        self._resolve(RAW, (flags, body))

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        if link is self._link:
            self._endpoint.proc.ports.pop(self._port, None)
            self._resolve(RAISED, lost_error(self._endpoint, self._rank, verdict))

    def _decode(self, content: Any) -> Any:
        flags, body = content
        if flags:
            raise _error_of(flags, body, self._endpoint.name)
        return decode_body(body)


class Replies(Future[Any]):
    """The answers of all actors of a mesh; the first error settles it."""

    __slots__ = ("_bodies", "_endpoint", "_links", "_missing", "_port")

    _bodies: list[Any]
    _endpoint: ActorEndpoint[Any, Any]
    _links: list[Any]
    _missing: int
    _port: int

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        if flags:
            self._endpoint.proc.ports.pop(self._port, None)
            self._resolve(RAW, (flags, body))
            return
        self._bodies[rank] = body
        self._missing -= 1
        if not self._missing:
            self._endpoint.proc.ports.pop(self._port, None)
            self._resolve(RAW, (0, None))

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        for rank, other in enumerate(self._links):
            if other is link and self._bodies[rank] is None:
                self._endpoint.proc.ports.pop(self._port, None)
                self._resolve(RAISED, lost_error(self._endpoint, rank, verdict))
                return

    def _decode(self, content: Any) -> Any:
        flags, body = content
        if flags:
            raise _error_of(flags, body, self._endpoint.name)
        return ValueMesh._lazy(self._endpoint.mesh._shape, self._bodies)


class ValueStream(Generic[R_co]):
    """An iterator of exactly one Future per actor, which resolve in the order answers arrive."""

    def __init__(self, endpoint: ActorEndpoint[Any, R_co], count: int) -> None:
        self._endpoint = endpoint
        self._futures: list[Reply[R_co]] = []
        self._unsettled: deque[Reply[R_co]] = deque()
        self._answered: set[int] = set()
        self._port = 0
        self._links: list[Any] = []
        for _ in range(count):
            future: Reply[R_co] = Reply._new()
            future._endpoint = endpoint
            future._link = None
            future._port = 0
            future._rank = 0
            self._futures.append(future)
        self._unsettled.extend(self._futures)
        self._iterator = iter(self._futures)

    def __iter__(self) -> Iterator[Future[R_co]]:
        return self

    def __next__(self) -> Future[R_co]:
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._futures)

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        if self._unsettled:
            self._answered.add(rank)
            self._next(RAW, (flags, body))

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        for rank, other in enumerate(self._links):
            if other is link and rank not in self._answered and self._unsettled:
                self._answered.add(rank)
                self._next(RAISED, lost_error(self._endpoint, rank, verdict))

    def _next(self, state: int, content: Any) -> None:
        future = self._unsettled.popleft()
        if not self._unsettled:
            self._endpoint.proc.ports.pop(self._port, None)
        future._resolve(state, content)
