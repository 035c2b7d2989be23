"""Log records of Python's `logging`, as rows of the table ``events`` and as log records of OTLP.

`LogRecords` is a handler that makes a row of each record: its text, its level and place, and the
actor and rank in whose code it was logged. The fields of ``extra={...}`` come along, so a program
that logs with ``extra={"step": 12}`` finds its rows by step.

A handler at the root logger would change what the program prints: `logging.basicConfig` does
nothing where there is one, and the handler of last resort is then silent. So `install` has the
records passed on before loggers look for their handlers (`logging.Logger.callHandlers`), which also
includes loggers that do not propagate, and sees the text without the prefix that handlers add.
Records below the level of their logger do not come, as everywhere in `logging`.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any

from monarch._spi import current_context
from monarch._telemetry.kinds import json_text

__all__ = ["LogRecords", "install"]

Add = Callable[[tuple[Any, ...]], object]

_TEXT = 8192  # characters of a message, and of a traceback, that are kept
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "actor_prefix",
    "taskName",
}
_LEVELS = ((logging.ERROR, "ERROR"), (logging.WARNING, "WARN"), (logging.INFO, "INFO"))
_QUIET = ("monarch.telemetry",)  # reports of the export itself: they would go round in a circle


class LogRecords(logging.Handler):
    """A handler that makes a row of ``events`` of each record, and passes it to ``add(row)``."""

    def __init__(
        self,
        add: Add,
        span: Callable[[], int] | None = None,
        trace: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        self._add = add
        self._span = span
        self._trace = trace

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle a record without the lock of the handler: an append needs none."""
        if not self.filter(record):
            return False
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Make a row of a record. Errors are handled by `handleError`, as usual."""
        try:
            if not record.name.startswith(_QUIET):
                self._add(self._row(record))
        except Exception:
            self.handleError(record)

    def _row(self, record: logging.LogRecord) -> tuple[Any, ...]:
        fields: dict[str, Any] = {"message": record.getMessage()[:_TEXT], "logger": record.name}
        trace = self._trace() if self._trace is not None else 0
        if trace:
            fields["trace_id"] = f"{trace:032x}"
        here = current_context()
        if here is not None:
            actor = here.actor_instance
            fields["actor"] = str(actor)
            fields["actor_id"] = str(actor.actor_id)
            fields["rank"] = here.actor_instance.rank.rank
        fields |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["exception.type"] = type(error).__name__
            fields["exception.message"] = str(error)[:_TEXT]
            fields["exception.stacktrace"] = "".join(traceback.format_exception(error))[-_TEXT:]
        level = next((name for least, name in _LEVELS if record.levelno >= least), "DEBUG")
        return (
            record.name,
            "log_events",
            level,
            json_text(fields),
            int(record.created * 1e6),
            (self._span() or None) if self._span is not None else None,
            str(record.thread or 0),
            record.threadName or "",
            record.module,
            record.pathname,
            record.lineno,
        )


_handlers: list[logging.Handler] = []


def install(handler: logging.Handler) -> Callable[[], None]:
    """Pass all log records of this process to a handler; return a function that ends that."""
    _handlers.append(handler)
    call = logging.Logger.callHandlers
    if not hasattr(call, "_monarch"):

        @functools.wraps(call)
        def call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
            for each in _handlers:
                if record.levelno >= each.level:
                    each.handle(record)
            call(self, record)

        call_handlers._monarch = True  # type: ignore[attr-defined]
        setattr(logging.Logger, "callHandlers", call_handlers)  # noqa: B010 - it is a patch

    def uninstall() -> None:
        if handler in _handlers:
            _handlers.remove(handler)

    return uninstall
