"""Which records of Python's logging a proc shows.

A proc starts as one of the reference does: no handlers, and the root logger at INFO. So a handler
that the program adds shows INFO, and without one Python's handler of last resort writes messages of
WARNING and above to stderr. `ProcMesh.logging_option` names a level, and then that is the level one
sees, handlers or not: it is set on the root logger and on the handler of last resort. (In the
reference INFO stays invisible without a handler, whatever the level.)

The request comes from the host agent; the answer goes to whoever asked, over a link of its own.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from monarch._engine.runtime.client import when_ready
from monarch._engine.runtime.proc import Proc

__all__ = ["set_level"]


def set_level(proc: Proc, message: dict[str, Any]) -> None:
    """Set the level of this process and answer at the asker's port, in the background."""

    def run() -> None:
        level = message["level"]
        logging.getLogger().setLevel(level)
        if logging.lastResort is not None:
            logging.lastResort.setLevel(level)
        proc.reactor.call_soon(answer)

    def answer() -> None:
        link = proc.link_to(message["from"])
        proc.post(link, message["port"], message["rank"], message["captured"])

    # Not on the reactor: logging takes a lock that user code holds, for as long as it likes.
    threading.Thread(target=run, name="monarch-log-level", daemon=True).start()


def _install(proc: Proc) -> None:
    proc.notices["log_level"] = lambda message: set_level(proc, message)
    if not proc.client:
        logging.getLogger().setLevel(logging.INFO)


when_ready(_install)
