"""``breakpoint()`` in actors, and the debugger that a person attaches to them.

In a worker, ``breakpoint()`` stops the endpoint it is in, not the process: other actors go on,
messages to the stopped one wait. A person connects to the client with any client for lines of
text, sees who has stopped where, and talks to the pdb of one rank or of many:

    $ nc localhost 27000
    monarch_dbg> list
    monarch_dbg> cast trainer ranks(gpus=0:4) p loss
    monarch_dbg> attach trainer 3
    (Pdb) next

In the client process ``breakpoint()`` is Python's own.

The way of a line: `console` reads it from the connection (`io`) and gives it to a session
(`sessions`); the rank's pdb (`remote_pdb`) has been waiting for it in a call to the actor in the
client that keeps the sessions (`controller`). `commands` is the language of the prompt; `hook` is
what the engine calls in a worker.

**Security.** A debugger runs any code that is typed into it, and a line-based connection has no
password. The server listens on ``localhost`` only, from the first breakpoint (or the first
`debug_controller`) to the end of the program, and serves the user of the program, and root (`peer`
has how it knows). ``MONARCH_DEBUG_SERVER_HOST`` and ``MONARCH_DEBUG_SERVER_PORT`` (default 27000)
change where; an address that other machines can reach brings a warning: there anybody is served.
From another machine, use an ssh tunnel. Where the system does not say which user has connected
(all but Linux), the server stays closed, unless ``MONARCH_DEBUG_SERVER_ANY_USER=1`` has it serve
all users of the machine.
"""

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
from monarch._debug.hook import stop_at
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
    "stop_at",
]
