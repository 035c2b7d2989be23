"""The membership of a child: it joins the program of its parent, and ends with its parent.

The child is a process of the program like those that `spawn_procs` starts: it calls, its actors are
called, it spawns. Its host agent counts it as a child of its parent, and kills it when its parent
is an actor's process that exits. It also watches its parent itself: the parent may be the script,
with which the agent ends, too. When the script has merely shut the runtime down, the child goes on,
and its calls fail.

In a forked child the objects of the parent's runtime are there, and become the child's (see
`Proc.begin_anew`). In another child all is made anew.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from monarch._children.door import end_of, invitation
from monarch._spi import FAILED, INFRASTRUCTURE, Verdict, child_proc, new_uid, peer_of, settings

if TYPE_CHECKING:
    from monarch._spi import Proc

__all__ = ["join"]

_PATIENCE = 30.0  # seconds for a parent with a thousand children that join at once
_ENDED = (
    "the program of this process, a child of process {pid}, has ended: its script has exited or "
    "has shut the runtime down"
)


def join(forked: Proc | None) -> Proc | None:
    """Return the proc of this process as a child of its parent's; None if it was handed nothing.

    Args:
        forked: the proc of a forked child. It is returned without an agent if the parent is not
            reached; a child that is not forked becomes a program of its own then.
    """
    found = invitation()
    if found is None:
        return forked
    uid = new_uid() if forked is None else forked.uid
    try:
        sock, parent = _knock(found.door, uid)
    except OSError:
        return forked
    if forked is None:
        settings.install_client_values(found.config)
    proc = child_proc(uid, found.spec) if forked is None else forked
    ended = Verdict(FAILED, _ENDED.format(pid=parent), INFRASTRUCTURE)
    proc.agent_lost = lambda reason: proc.bury_everyone(ended)
    proc.adopt_agent(sock)
    _end_with(proc, parent)
    return proc


def _knock(name: str, uid: int) -> tuple[socket.socket, int]:
    """Return a connection to the parent's door, and the pid of the parent. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(end_of(uid))
        sock.settimeout(_PATIENCE)
        sock.connect(name)
        pid, user = peer_of(sock)
        if user != os.geteuid():
            raise PermissionError("the door of the parent belongs to another user")
    except BaseException:
        sock.close()
        raise
    return sock, pid


def _end_with(proc: Proc, parent: int) -> None:
    """Exit when the parent has exited."""

    def exited(_mask: int) -> None:
        os._exit(1)

    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # an old kernel: the agent still kills the children of an actor's process
        return
    proc.reactor.register(handle, exited)
