"""The fence before a restarted actor: what was sent to its predecessor does not reach it.

The successor of a failed actor in a process that lives on has the same address, on the same links.
A peer that has not heard of the failure may have sent messages to the predecessor that are still
on their way. So every link that is open at the restart is asked for an echo, which its peer's
reactor answers in line; a message that comes before the echo was sent to the predecessor, and is
answered with what ended that one. What comes after, or over a link made later, is for the
successor. The owner's link needs no echo: the request to restart came over it. Nobody else has to
know anything, and a message costs nothing more once the echoes are back.

(The successor of a process needs no fence: old messages die with the old process's sockets.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch._engine.base.failure import Failure
from monarch._engine.runtime.ends import Verdict
from monarch._engine.wire.frame import CALL, QUERY, Frame

if TYPE_CHECKING:
    from monarch._engine.runtime.cell import Cell

__all__ = ["Fence"]


class Fence:
    """Stands before `cell` until the echoes are back; a sink of the port they come to.

    Args:
        cell: the successor, which nobody can reach yet.
        owner_link: where the request to restart came from.
        grave: what ended the predecessor.
    """

    def __init__(self, cell: Cell, owner_link: Any, grave: Failure) -> None:
        proc = cell.proc
        self._cell = cell
        self._grave = grave
        known = list(proc.links.values())
        self._silent = {
            link for link in known if link not in (proc.local, owner_link) and link.lost is None
        }
        if not self._silent:
            return
        self._enqueue, cell.put = cell.put, self._put
        self._port = proc.open_port(self)
        for link in list(self._silent):
            if not proc.say(link, QUERY, 0, self._port, 0):
                self._heard(link)

    def _put(self, link: Any, frame: Frame) -> None:
        if frame.kind == CALL and link in self._silent:
            self._cell.proc.give_back(link, frame, self._grave)
        else:
            self._enqueue(link, frame)

    def _heard(self, link: Any) -> None:
        self._silent.discard(link)
        if not self._silent:
            self._cell.put = self._enqueue
            self._cell.proc.close_port(self._port)

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        self._heard(link)

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        self._heard(link)
