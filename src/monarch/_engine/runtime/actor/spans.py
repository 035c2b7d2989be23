"""Report each call of an endpoint as a span, while the process has a sink for spans.

The span has the endpoint's name. It begins on the actor's thread after the arguments are decoded,
and ends with the endpoint: for an ``async`` endpoint when its coroutine does. An endpoint that is
declared with ``instrument=False`` has none.
"""

from __future__ import annotations

from typing import Any

from monarch._engine.base.instrument import Sink
from monarch._engine.runtime.actor.cell import Handler

__all__ = ["in_span"]


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
