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

import threading
from typing import Any

from monarch._engine.runtime.agent.client import when_ready
from monarch._engine.runtime.proc.proc import Proc

__all__ = ["set_level"]


def set_level(proc: Proc, message: dict[str, Any]) -> None:
    """Set the level of this process, then answer at the port in `message`; does not block."""

    def run() -> None:
        import logging  # loaded late, as in `_install`

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


def _install(proc: Proc) -> None:
    proc.notices["log_level"] = lambda message: set_level(proc, message)
    if not proc.client:
        import logging  # the import of `monarch.actor` is faster without it

        logging.getLogger().setLevel(logging.INFO)


when_ready(_install)
