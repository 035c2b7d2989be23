"""Events: what happened at one moment, in the span of user code that it happened in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._spi import instrument
from monarch._telemetry import spans

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["instant_event", "report"]


def report(name: str, attributes: Mapping[str, object]) -> None:
    """Report an event to the instrument slot and, with OpenTelemetry, to the current span."""
    sink = instrument.sink
    if sink is not None:
        sink.event(name, attributes)
    if spans._trace is not None:
        spans._trace.get_current_span().add_event(name, attributes)


def instant_event(message: str) -> None:
    """Report that something happened now, as an event of that name.

    Does nothing while telemetry is off. Old programs call it in their `unhandled_fault_hook`.

    >>> instant_event("the data loader was restarted")
    """
    report(message, {"level": "INFO"})
