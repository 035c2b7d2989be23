"""Calls with futures among their arguments: each is sent when its futures have their values.

A future cannot be pickled. The adverbs of an endpoint come here when the pickling of the arguments
was refused, so calls without futures pay nothing. The values pass through the calling process.

Invariants: a deferred call is sent once at most, never after it was cancelled, and not if a future
has no value but an error, which then is that of the call.

Order: the call is sent on a thread of its own when the last value has arrived, so calls that the
program makes meanwhile are sent before it. If all values are there already, the caller's thread
sends at once. Rejected: to hold back later calls to the same actors, since each call would have to
look for held ones; to send the message at once and let the actor wait for the value, as it does
for distributed tensors, since the actor may be the one that has to compute the value.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from monarch._engine.mesh.results.future import (
    CANCELLED,
    PENDING,
    RAISED,
    Future,
    _running_loop,
)
from monarch._engine.mesh.results.reply import Called
from monarch._engine.runtime.io import environment as environments
from monarch._engine.transport.frame_link import FrameLink

__all__ = ["defer", "has_futures"]

R_co = TypeVar("R_co", covariant=True)


def has_futures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has futures as arguments. Quick: asked for each call that is recorded."""
    kinds = _kinds()
    for value in args:
        if isinstance(value, kinds):
            return True
    return bool(kwargs) and has_futures(tuple(kwargs.values()), {})


def _kinds() -> Any:
    """Return the classes of futures: of calls, and that of `concurrent.futures` if it is loaded."""
    loaded: Any = sys.modules.get("concurrent.futures._base")
    return Future if loaded is None else (Future, loaded.Future)


def defer(
    endpoint: Any,
    adverb: Callable[..., Future[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Future[Any] | None:
    """Return the future of a call that waits for its arguments; None if no argument is a future.

    `endpoint` is an `ActorEndpoint`, whose module uses this one, and `adverb` the method of it that
    makes the call. Does not block.
    """
    kinds = _kinds()
    awaited = [value for value in (*args, *kwargs.values()) if isinstance(value, kinds)]
    if not awaited:
        return None
    future: _Deferred[Any] = _Deferred._new()
    future._endpoint = endpoint
    future._awaited = awaited
    future._failed = None
    future._sent = None
    future._call = functools.partial(_call, adverb, args, kwargs)
    future._context = contextvars.copy_context()
    if all(each.done() for each in awaited):
        future._send()
        return future
    loop = _running_loop()
    for each in awaited:
        if not isinstance(each, Future):
            continue
        if loop is None:
            each._begin()
        else:
            each._drive_async(loop)
    future._advance()
    return future


def _call(
    adverb: Callable[..., Future[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[Any]:
    """Make a call with the values of the futures among its arguments."""
    kinds = _kinds()

    def value(argument: Any) -> Any:
        return argument.result() if isinstance(argument, kinds) else argument

    return adverb(*map(value, args), **{name: value(each) for name, each in kwargs.items()})


def _has_error(future: Any) -> bool:
    """Whether a future with an outcome has an error, as far as that is known without reading it."""
    if isinstance(future, Future):
        return future._has_error()
    return future.exception() is not None


class _Deferred(Called[R_co]):
    """The future of a call that waits for its arguments, and then for its answer."""

    __slots__ = ("_awaited", "_call", "_context", "_endpoint", "_failed", "_sent")

    _awaited: list[Any]
    _call: Callable[[], Future[R_co]]
    _context: contextvars.Context
    _failed: Any  # an argument whose error is that of the call
    _sent: Any  # the future of the call that was sent

    @property
    def _behind(self) -> Any:
        """The future for which this one waits at present; None if it waits for none."""
        if self._sent is not None:
            return self._sent
        return next((each for each in self._awaited if not each.done()), None)

    def _advance(self) -> None:
        """Wait for the next argument without an outcome, or send. From any thread."""
        for each in self._awaited:
            if not each.done():
                if isinstance(each, Future):
                    each._notify(self._advance)
                else:
                    each.add_done_callback(self._advance_after)
                return
        send = functools.partial(self._context.run, self._send)
        environments.current.start_thread("monarch-call", send)

    def _advance_after(self, _future: Any) -> None:
        self._advance()

    def _send(self) -> None:
        """Make the call, or fail as the first argument that has no value."""
        for each in self._awaited:
            if each.cancelled():
                self._resolve(CANCELLED, None)
                return
            if _has_error(each):
                self._failed = each
                self._resolve(RAISED, None)
                return
        if self._phase != PENDING:  # cancelled meanwhile
            return
        try:
            self._sent = sent = self._call()
        except BaseException as error:  # each observer of the call gets it
            self._resolve(RAISED, error)
            return
        self._awaited = []
        del self._call  # it holds the arguments
        if self._phase != PENDING:  # cancelled by another thread
            sent.cancel()
        sent._notify(self._settle)

    def _settle(self) -> None:
        self._resolve(self._sent._phase, self._sent._content)

    def _observe(self) -> R_co:
        # The argument raises its error itself: so the error counts as read when this call is read,
        # and not before.
        if self._phase == RAISED and self._failed is not None:
            self._failed.result()
        return super()._observe()

    def _decode(self, content: Any) -> Any:
        return self._sent._decode(content)

    def _recall(self) -> None:
        if self._sent is not None:
            self._sent.cancel()
            return
        for each in self._awaited:
            if isinstance(each, Future):
                each._give_up(self._advance)

    def _needs(self) -> tuple[int, list[FrameLink]]:
        return 0, []  # it is not sent yet; see `_behind`

    def _asked(self) -> int:
        return 0

    def _overdue(self, timeout: float) -> str:
        if self._sent is not None:
            text: str = self._sent._overdue(timeout)
            return text
        missing = sum(not each.done() for each in self._awaited)
        return (
            f"Endpoint call {self._endpoint.name} was not sent within {timeout:g} s: {missing} of "
            "its arguments are futures without a value"
        )

    def _unanswered(self) -> list[tuple[FrameLink, int, int]]:
        waits = self._awaited if self._sent is None else [self._sent]
        return [
            call
            for each in waits
            if not each.done()
            for call in getattr(each, "_unanswered", list[Any])()
        ]


_Deferred.__name__ = _Deferred.__qualname__ = Future.__name__  # the name in errors of Python
