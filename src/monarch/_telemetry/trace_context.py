"""The context of a trace, as messages carry it: ``traceparent`` and ``tracestate`` of W3C.

A trace is a number of 128 bits, a span one of 64. A call carries those of the code that makes it;
the message is then a span of that trace, below the calling one, and so are the spans inside the
endpoint. The header is ``00-<trace>-<span>-<flags>`` in hexadecimal digits, with the state of other
vendors in a second line if there is one (https://www.w3.org/TR/trace-context/).

OpenTelemetry's SDK, if the program uses it, has a current span of its own. `foreign` returns it,
and `attach` makes a message's context the current one there, so that spans of the program's own
tracer are linked across processes as well.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

__all__ = ["TraceContext", "attach", "foreign", "has_sdk", "parse"]

_VERSION_END, _TRACE_END, _SPAN_END, _END = 2, 35, 52, 55
_STATE = 512  # characters of a tracestate that are kept, as the standard asks for
_DIGITS = frozenset("0123456789abcdef")


class TraceContext(NamedTuple):
    """A span of a trace, by their numbers; `state` belongs to the vendors of tracing systems."""

    trace: int
    span: int
    flags: int = 1
    state: str = ""

    def header(self) -> str:
        """Return the text that a message carries.

        >>> TraceContext(1, 2).header()
        '00-00000000000000000000000000000001-0000000000000002-01'
        """
        text = f"00-{self.trace:032x}-{self.span:016x}-{self.flags:02x}"
        return f"{text}\n{self.state}" if self.state else text


def parse(header: object) -> TraceContext | None:
    """Return the context in a header; None if it is none. Never raises.

    >>> parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00").flags
    0
    >>> parse("00-00000000000000000000000000000000-b7ad6b7169203331-00")
    """
    if type(header) is not str:
        return None
    text, _, state = header.partition("\n")
    if len(text) < _END or text[2] != "-" or text[_TRACE_END] != "-" or text[_SPAN_END] != "-":
        return None
    version, flags = text[:_VERSION_END], text[_SPAN_END + 1 : _END]
    trace, span = text[_VERSION_END + 1 : _TRACE_END], text[_TRACE_END + 1 : _SPAN_END]
    if not _DIGITS.issuperset(version + trace + span + flags) or version == "ff":
        return None
    if len(text) > _END and (version == "00" or text[_END] != "-"):
        return None  # a later version may have more fields
    numbers = int(trace, 16), int(span, 16)
    if not all(numbers):
        return None
    return TraceContext(*numbers, int(flags, 16), state if len(state) <= _STATE else "")


def has_sdk() -> bool:
    """Whether the program has loaded OpenTelemetry's SDK."""
    return "opentelemetry.sdk.trace" in sys.modules


def foreign() -> TraceContext | None:
    """Return the current span of OpenTelemetry's SDK; None if there is none, or no SDK."""
    if not has_sdk():
        return None
    from opentelemetry import trace

    span = trace.get_current_span()
    if not span.is_recording():
        return None
    found = span.get_span_context()
    state = found.trace_state.to_header() if found.trace_state else ""
    return TraceContext(found.trace_id, found.span_id, int(found.trace_flags), state)


def attach(context: TraceContext) -> None:
    """Make a context the current one of OpenTelemetry, which the program has (`has_sdk`)."""
    from opentelemetry import context as contexts
    from opentelemetry import trace

    span = trace.NonRecordingSpan(
        trace.SpanContext(
            context.trace,
            context.span,
            is_remote=True,
            trace_flags=trace.TraceFlags(context.flags),
            trace_state=trace.TraceState.from_header([context.state]) if context.state else None,
        )
    )
    contexts.attach(trace.set_span_in_context(span))
