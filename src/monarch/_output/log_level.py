"""The level of Python's logging in a proc.

A proc starts like a proc of the reference: without handlers, and with the root logger at INFO. So a
handler that the program adds shows INFO. Without one, Python's handler of last resort writes
messages of WARNING and above to stderr. `ProcMesh.logging_option` sets its level on the root logger
and on the handler of last resort, so the level applies with and without handlers. (In the reference
INFO stays invisible without a handler, whatever the level.)

The request comes from the host agent. The answer goes to the process that called `logging_option`,
over the link to that process.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch._spi import Proc

__all__ = ["serve", "set_level"]


def serve(proc: Proc) -> None:
    """Handle requests for the level, and set the level with which a proc starts."""
    proc.notices["log_level"] = functools.partial(set_level, proc)
    if not proc.client:
        logging.getLogger().setLevel(logging.INFO)


def set_level(proc: Proc, message: dict[str, Any]) -> None:
    """Set the level of this process, then answer at the port in `message`; does not block."""

    def run() -> None:
        level = message["level"]
        logging.getLogger().setLevel(level)
        if logging.lastResort is not None:
            logging.lastResort.setLevel(level)
        proc.reactor.call_soon(answer)

    def answer() -> None:
        link = proc.link_to(message["from"])
        proc.post(link, message["port"], message["rank"], message["captured"])

    # Not on the reactor: logging takes a lock that user code may hold for any time.
    threading.Thread(target=run, name="monarch-log-level", daemon=True).start()
