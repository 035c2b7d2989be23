"""Report the calls of endpoints to the receivers of `instrument`, while there are some.

`in_span` reports each call as a span. The span has the endpoint's name. It begins on the actor's
thread after the arguments are decoded, and ends with the endpoint: for an ``async`` endpoint when
its coroutine does. An endpoint that is declared with ``instrument=False`` has none. `Recorded`
reports when each call begins and ends, for a receiver of traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._engine.base.instrument import Sink
from monarch._engine.runtime.actor.cell import Handler

__all__ = ["Recorded", "in_span"]


def in_span(sink: Sink, handler: Handler) -> Handler:
    """Return a handler for one call, which reports the call to `sink`."""
    function = handler.function

    def call(*args: Any, **kwargs: Any) -> Any:
        token = sink.begin_span(handler.name)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            sink.end_span(token, error)
            raise
        sink.end_span(token, None)
        return result

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        token = sink.begin_span(handler.name)
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            sink.end_span(token, error)
            raise
        sink.end_span(token, None)
        return result

    return Handler(
        handler.name,
        call_async if handler.is_async else call,
        explicit=handler.explicit,
        concurrent=handler.concurrent,
        is_async=handler.is_async,
    )


class Recorded:
    """An endpoint of an actor whose calls are recorded: `handler` is called in its place.

    It serves all calls, since a handler for each would cost more than the rest: set `pending` to
    the message before the call. An actor takes its next message after the call has begun.

    A message is a list. When its endpoint has ended, the first item becomes the time of that; the
    second one becomes True before, if it raised.

    Args:
        original: the endpoint.
        enter: called with the message where the endpoint begins.
        clock: returns the time; more than 0.
    """

    __slots__ = ("handler", "pending")

    def __init__(
        self, original: Handler, enter: Callable[[Any], object], clock: Callable[[], int]
    ) -> None:
        self.pending: list[Any] = []
        function = original.function

        def call(*args: Any, **kwargs: Any) -> Any:
            message = self.pending
            enter(message)
            try:
                return function(*args, **kwargs)
            except BaseException:
                message[1] = True
                raise
            finally:
                message[0] = clock()

        async def complete(message: list[Any], args: Any, kwargs: Any) -> Any:
            enter(message)
            try:
                return await function(*args, **kwargs)
            except BaseException:
                message[1] = True
                raise
            finally:
                message[0] = clock()

        def call_async(*args: Any, **kwargs: Any) -> Any:
            return complete(self.pending, args, kwargs)

        self.handler = Handler(
            original.name,
            call_async if original.is_async else call,
            explicit=original.explicit,
            concurrent=original.concurrent,
            is_async=original.is_async,
            instrument=original.instrument,
        )
