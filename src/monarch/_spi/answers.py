"""`call_each`: a call of all actors of a mesh, whose future is a function of their values.

It is for features that make such calls often. The result of a call is a `ValueMesh` otherwise: it
has the shape of the mesh, and its values are decoded one by one. That costs as much as the rest of
the call, if each value is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from monarch._engine.mesh.call.endpoint import ActorEndpoint
from monarch._engine.mesh.results.future import RAW, Future
from monarch._engine.mesh.results.reply import Replies, error_of, lost_error
from monarch._engine.runtime.proc.body import decode_body, unreadable
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.wire.frame import ONCE

__all__ = ["call_each"]

R = TypeVar("R")

_LOST = 1 << 16  # beside the flags of a frame: the process of a rank is lost


class _Answers(Replies):
    """The answers of all actors of a mesh, as arguments of a function."""

    __slots__ = ("_function", "_otherwise")

    _function: Callable[[Iterator[Any]], Any]
    _otherwise: Callable[[Exception], object]

    def _lost(self, rank: int, verdict: Verdict) -> None:
        # Kept as it is, so that `_decode` handles it on the thread of the observer.
        self._end(RAW, (_LOST, (rank, verdict)))

    def _recall(self) -> None:
        """Drop the answers; the actors still handle the call."""
        self._close()

    def _decode(self, content: Any) -> Any:
        flags, body = content
        endpoint = self._endpoint
        if flags:
            if flags == _LOST:
                error = lost_error(endpoint, *body)
            else:
                error = error_of(flags, body, endpoint.name)
            if isinstance(error, Exception):
                self._otherwise(error)
            raise error
        bodies, self._outcomes = self._outcomes, []
        return self._function(map(self._value, bodies))

    def _value(self, body: Any) -> Any:
        try:
            return decode_body(body)
        except (ImportError, AttributeError, SystemExit) as error:
            raise unreadable(error, f"the result of {self._endpoint.name}") from None


_Answers.__name__ = _Answers.__qualname__ = Future.__name__  # the name in errors of Python


def call_each(
    endpoint: ActorEndpoint[..., Any],
    args: tuple[Any, ...],
    function: Callable[[Iterator[Any]], R],
    otherwise: Callable[[Exception], object],
) -> Future[R]:
    """Call every actor of a mesh; return the future of ``function(values)``, in order of ranks.

    The first observer calls the function, once, on its thread; each step of the iterator decodes a
    value. An error of the call is raised, after a call of ``otherwise(error)``. The actors handle
    the call also if its future is cancelled.
    """
    future: _Answers = _Answers._new()
    future._endpoint = endpoint
    future._function = function
    future._otherwise = otherwise
    endpoint._collect(future, endpoint._links or endpoint._resolve(), args, {}, ONCE)
    return future
