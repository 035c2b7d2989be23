"""The actor prefix in Python logs.

Once a process is a client or a proc, every handler of the root logger, and every handler added to
any logger later, gets a filter. The filter puts ``[actor=<chain>] `` before the message, and the
same text into ``record.actor_prefix``. A program disables the prefix in its process by assigning
``monarch.actor.config.prefix_python_logs_with_actor = False`` (that is this module).
"""

from __future__ import annotations

import functools
import logging

from monarch.actor import context

__all__ = ["install", "prefix_python_logs_with_actor"]

prefix_python_logs_with_actor = True


class _ActorPrefix:
    def filter(self, record: logging.LogRecord) -> bool:
        # Empty messages stay unchanged: torch logs them and inspects the result.
        fields = vars(record)
        if prefix_python_logs_with_actor and record.msg and "actor_prefix" not in fields:
            prefix = fields["actor_prefix"] = f"[actor={context().actor_instance}] "
            record.msg = f"{prefix}{record.msg}"
        return True


def install() -> None:
    """Give all handlers of this process the filter, those that exist and those to come."""
    prefix = _ActorPrefix()
    for handler in logging.getLogger().handlers:
        handler.addFilter(prefix)
    add = logging.Logger.addHandler
    if hasattr(add, "__wrapped__"):
        return

    @functools.wraps(add)
    def add_handler(self: logging.Logger, handler: logging.Handler) -> None:
        handler.addFilter(prefix)
        add(self, handler)

    setattr(logging.Logger, "addHandler", add_handler)  # noqa: B010 - it is a patch
