"""``breakpoint()`` in actors, and the debugger that a person attaches to them.

In a worker, ``breakpoint()`` stops the endpoint that runs it, not the process: other actors
continue, and messages to the stopped actor wait. A person connects to the client process with
``monarch debug``, or any other program for lines of text such as nc, lists the stopped ranks, and
uses the pdb of one rank or of many:

    $ monarch debug
    monarch_dbg> list
    monarch_dbg> cast trainer ranks(gpus=0:4) p loss
    monarch_dbg> attach trainer 3
    (Pdb) next

In the client process ``breakpoint()`` is Python's own.

With ``configure(postmortem=True)`` an endpoint that raises stops as well, in the frame that raised,
before its caller gets the error.

The path of a line: `console` reads the line from the connection (`io`) and gives it to a session
(`sessions`). The rank's pdb (`remote_pdb`) waits for lines in a request (`link`) to the client
process (`service`), where an actor keeps the sessions (`controller`). `commands` is the language of
the prompt. `hook` is the function that the engine calls in a worker. `pauses` keeps time limits
from passing meanwhile, `door` lets ``monarch debug`` in without a port, and `editor` lets VS Code
attach to a process.

**Security.** A debugger runs any code that is typed into it, and a line-based connection has no
password. The server listens on ``localhost`` only, from the first breakpoint (or the first
`debug_controller`) to the end of the program. It serves only the user of the program, and root;
`peer` explains how it identifies them. ``MONARCH_DEBUG_SERVER_HOST`` and
``MONARCH_DEBUG_SERVER_PORT`` (default 27000, or a free one) change the address. An address that
other machines can reach brings a warning, since every peer is served there. From another machine,
use an ssh tunnel.

On systems that do not report which user has connected (all but Linux), the server does not start,
unless ``MONARCH_DEBUG_SERVER_ANY_USER=1`` makes it serve all users of the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._lazy import lazily

if TYPE_CHECKING:
    from monarch._debug.commands import (
        Attach,
        Cast,
        Continue,
        DebugCommand,
        Help,
        ListCommand,
        Quit,
    )
    from monarch._debug.controller import DebugController, debug_controller
    from monarch._debug.io import DebugCliIO, DebugIO, DebugIOError, DebugStdIO
    from monarch._debug.sessions import DebugSession, DebugSessionInfo, DebugSessions

__all__ = [
    "Attach",
    "Cast",
    "Continue",
    "DebugCliIO",
    "DebugCommand",
    "DebugController",
    "DebugIO",
    "DebugIOError",
    "DebugSession",
    "DebugSessionInfo",
    "DebugSessions",
    "DebugStdIO",
    "Help",
    "ListCommand",
    "Quit",
    "debug_controller",
]

_NAMES = {
    "commands": "Attach Cast Continue DebugCommand Help ListCommand Quit",
    "controller": "DebugController debug_controller",
    "io": "DebugCliIO DebugIO DebugIOError DebugStdIO",
    "sessions": "DebugSession DebugSessionInfo DebugSessions",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__getattr__, __dir__ = lazily(__name__, _HOMES)
