"""Start a helper process: an interpreter that runs one function of the engine.

The helper and its starter are connected by a socket pair. The helper's end is the function's first
argument, as a descriptor.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from monarch._engine.launch.interpreter import python_command

__all__ = ["AGENT", "LAUNCHER", "start"]

AGENT = "monarch._engine.runtime.agent.start:agent_main"
LAUNCHER = "monarch._engine.runtime.agent.start:launcher_main"


def start(
    function: str,
    *args: object,
    python: str | None = None,
    path: Iterable[str] | None = None,
    **options: Any,
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the starter's end, and the process that runs `function`, a "module:name".

    `args` follow the descriptor; see `python_command` for `path`, and `Popen` for `options`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        module, _, name = function.partition(":")
        fd = theirs.fileno()
        code = f"from {module} import {name}; {name}({', '.join(map(repr, (fd, *args)))})"
        try:
            process: Any = subprocess.Popen(  # its type depends on the options
                python_command(python or sys.executable, code, path),
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                **options,
            )
        except BaseException:
            ours.close()
            raise
    return ours, process
