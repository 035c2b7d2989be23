"""The actor prefix in Python logs.

Once a process has a context, every handler of the root logger, and every handler added later, gets
a filter that puts ``[actor=<chain>] `` before the message and the chain into
``record.actor_prefix``. Programs switch it off for their process by assigning
``monarch.actor.config.prefix_python_logs_with_actor = False`` (this module).
"""

from __future__ import annotations

import functools
import logging

from monarch._engine.mesh.context import context
from monarch._engine.runtime.client import when_ready
from monarch._engine.runtime.proc import Proc

__all__ = ["prefix_python_logs_with_actor"]

prefix_python_logs_with_actor = True


class _ActorPrefix(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        # Empty messages are left alone: torch logs them and looks at the result.
        fields = vars(record)
        if prefix_python_logs_with_actor and record.msg and "actor_prefix" not in fields:
            prefix = fields["actor_prefix"] = f"[actor={context().actor_instance}] "
            record.msg = f"{prefix}{record.msg}"
        return True


def _install(_proc: Proc) -> None:
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


when_ready(_install)
