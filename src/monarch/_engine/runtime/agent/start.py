"""How a host agent and its first launcher start: as two halves that load side by side.

    client --exec--> agent --fork--> launcher --fork--> proc, proc, ...

The first answer of a program waits for the imports of both processes. Neither needs what the other
loads: the agent never runs user code, and a launcher never reads what the agent handles. So this
module loads only what both need, `agent_main` forks the launcher, and then each process loads its
own part, on a core of its own if there is one. Requests that the agent sends meanwhile wait in the
launcher's socket.

A launch environment other than the agent's gets a launcher that is executed (`launcher_main`).
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import socket
import sys
from typing import NoReturn

from monarch._engine.launch.launcher import Launcher
from monarch._engine.runtime.io.descriptors import raise_descriptor_limit

__all__ = ["agent_main", "launcher_main"]

_BOTH = (
    "monarch._engine.runtime.cast.sender",
    "monarch._engine.runtime.io.environment",
    "monarch._engine.transport.link",
    "monarch._engine.transport.segment",
)


def agent_main(fd: int, client_uid: int, here: str) -> None:
    """Run the host agent's process; `here` is the client's name for this host."""
    gc.disable()  # what is imported stays: a tenth of the time would go into looking at it
    _restore_tunables()
    raise_descriptor_limit()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    first = socket.socket(fileno=fd)
    for name in _BOTH:
        importlib.import_module(name)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        first.close()
        ours.close()
        _launch(theirs)
    theirs.close()
    from monarch._engine.runtime.agent.agent import Agent  # the launcher is to load none of it

    gc.enable()
    Agent(first, client_uid, (ours, pid), here).run()


def launcher_main(fd: int) -> NoReturn:
    """Run a launcher that was executed, for a launch environment other than the agent's."""
    gc.disable()
    raise_descriptor_limit()
    _launch(socket.socket(fileno=fd))


def _launch(sock: socket.socket) -> NoReturn:
    from monarch._engine.runtime.agent.bootstrap import (  # see the module
        prepare,
        proc_main,
        warm_up,
    )

    warm_up()
    gc.enable()
    Launcher(sock, proc_main, prepare).run()


def _restore_tunables() -> None:
    """Restore the user's allocator settings, which the agent's children are to inherit."""
    original = os.environ.pop("MONARCH_AGENT_TUNABLES", None)
    if original is not None:
        del os.environ["GLIBC_TUNABLES"]
        if original:
            os.environ["GLIBC_TUNABLES"] = original
