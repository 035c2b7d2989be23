"""Spans: named stretches of user code.

`span` chooses the sinks when it is called, so that entering and leaving the span only report to
them. Without any sink it returns one shared object.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, overload

from monarch._spi import instrument
from monarch._telemetry import otel

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["get_monarch_tracer", "span", "traced"]

_trace = otel.part("trace")
_tracer = None if _trace is None else _trace.get_tracer("monarch")

F = TypeVar("F", bound="Callable[..., Any]")


class Span:
    """A span without a sink."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class _HeardSpan(Span):
    """A span that is reported to the instrument slot's sink, to OpenTelemetry, or to both."""

    __slots__ = ("_name", "_sink", "_token", "_twin")

    def __init__(self, name: str, sink: instrument.Sink | None) -> None:
        self._name = name
        self._sink = sink
        self._token: object = None
        self._twin = None if _tracer is None else _tracer.start_as_current_span(name)

    def __enter__(self) -> Self:
        if self._sink is not None:
            self._token = self._sink.begin_span(self._name)
        if self._twin is not None:
            self._twin.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._twin is not None:
                self._twin.__exit__(kind, error, traceback)
        finally:
            if self._sink is not None:
                self._sink.end_span(self._token, error)


_UNHEARD = Span()


def span(name: str) -> Span:
    """Return a context manager that reports the code inside it as ``name``.

    The manager can be entered once. An exception propagates, and marks the span as failed.

    >>> with span("load batch"):
    ...     batch = list(range(3))
    """
    sink = instrument.sink
    if sink is None and _tracer is None:
        return _UNHEARD
    return _HeardSpan(name, sink)


@overload
def traced(fn: F, *, name: str | None = None) -> F: ...
@overload
def traced(fn: None = None, *, name: str | None = None) -> Callable[[F], F]: ...
def traced(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Callable[..., Any]:
    """Report every call of a function as a span. By default the span has the function's name.

    The decorator is used bare or with a name, on plain and on ``async`` functions. The span of an
    ``async`` function lasts until its result is available. The decorated function keeps its name,
    docstring and signature.

    >>> @traced(name="square")
    ... def f(x):
    ...     return x * x
    >>> f(3)
    9
    """
    if fn is None:
        return functools.partial(traced, name=name)
    label = fn.__name__ if name is None else name

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def async_call(*args: Any, **kwargs: Any) -> Any:
            with span(label):
                return await fn(*args, **kwargs)

        return async_call

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with span(label):
            return fn(*args, **kwargs)

    return call


def get_monarch_tracer() -> Any:
    """Return the OpenTelemetry tracer of this library.

    Raises `ModuleNotFoundError` where ``opentelemetry-api`` is not installed.
    """
    if _tracer is None:
        raise ModuleNotFoundError(
            "get_monarch_tracer() returns an OpenTelemetry tracer, and opentelemetry-api is not "
            "installed: pip install 'pymonarch[telemetry]'",
            name="opentelemetry",
        )
    return _tracer
