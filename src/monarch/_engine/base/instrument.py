"""Instrument points: one slot for a sink of spans, measurements and events; None while it is off.

An emission point reads the slot, and does nothing more when it is None:

    sink = instrument.sink
    if sink is not None:
        sink.count("frames.sent", 1, None)

So instrumentation that is off costs one attribute load; formatting, allocation and timing are
avoided. Read the module attribute each time (never ``from ... import sink``): it is set when a
program turns telemetry on, which can be long after the emitter was made.

The engine emits one span per call of an endpoint (`runtime.actor.spans`); features emit for user
code.

A sink is called on the thread that emits, possibly on several at once, and must be quick: it counts
or appends, and leaves clocks, files and networks to a thread of its own. An exception that a sink
raises reaches the emitter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Sink", "install", "sink"]


class Sink(Protocol):
    """The receiver of spans, measurements and events, as they happen."""

    def begin_span(self, name: str) -> object:
        """Record that ``name`` begins on this thread; the result is passed to `end_span`."""

    def end_span(self, token: object, error: BaseException | None) -> None:
        """Record that a span ended, by ``error`` if that is not None."""

    def count(self, name: str, amount: int, attributes: Mapping[str, object] | None) -> None:
        """Add ``amount``, which may be negative, to the sum ``name``."""

    def measure(self, name: str, value: float, attributes: Mapping[str, object] | None) -> None:
        """Record one value of the distribution ``name``."""

    def event(self, name: str, attributes: Mapping[str, object] | None) -> None:
        """Record that an event of that name happened."""


sink: Sink | None = None


def install(new: Sink | None) -> Sink | None:
    """Make ``new`` the sink (None turns instrumentation off) and return the one it replaces."""
    global sink
    sink, replaced = new, sink
    return replaced
