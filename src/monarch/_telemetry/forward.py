"""Python log records as events of the span they were logged in."""

from __future__ import annotations

import logging

from monarch._telemetry.events import report

__all__ = ["TracingForwarder"]


class TracingForwarder(logging.Handler):
    """A `logging.Handler` that reports each record as an event.

    The event goes to the instrument slot and, with OpenTelemetry, to the current span. Its name
    is the message.

    >>> logging.getLogger("trainer").addHandler(TracingForwarder(level=logging.INFO))
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Report one record; errors are handled by `logging.Handler.handleError`, as usual."""
        try:
            message = record.getMessage()
            attributes = {
                "logger": record.name,
                "level": record.levelname,
                "file": record.pathname,
                "line": record.lineno,
            }
            report(message, attributes)
        except Exception:
            self.handleError(record)
