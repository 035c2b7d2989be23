"""The barrier of a restarted actor: keeps messages for its predecessor away from it.

The successor of a failed actor in a process that lives on has the same address, on the same links.
A peer that does not know of the failure yet may have sent messages to the predecessor, which are
still in transit. So each open link is asked for an echo at the restart, which its peer's reactor
answers in order. A message that arrives before the echo was sent to the predecessor, and is
answered with the failure that ended the predecessor. A message that arrives later, or over a link
made later, is for the successor. The owner's link needs no echo, since it carried the request to
restart. No other process takes part, and messages cost nothing more once the echoes have arrived.

The successor of a whole process needs no barrier: messages to the old process are lost with its
sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch._spi import CALL, QUERY

if TYPE_CHECKING:
    from monarch._spi import Cell, Failure, Frame, FrameLink, Verdict

__all__ = ["EpochBarrier"]


class EpochBarrier:
    """Guards `cell` until the echoes have arrived; a sink of the port that receives them.

    Args:
        cell: the successor, which is not reachable yet.
        owner_link: the link that carried the request to restart.
        grave: the failure that ended the predecessor.
    """

    def __init__(self, cell: Cell, owner_link: FrameLink, grave: Failure) -> None:
        proc = cell.proc
        self._cell = cell
        self._grave = grave
        known = proc.every_link()
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

    def _put(self, link: FrameLink, frame: Frame) -> None:
        if frame.kind == CALL and link in self._silent:
            self._cell.proc.give_back(link, frame, self._grave)
        else:
            self._enqueue(link, frame)

    def _heard(self, link: FrameLink) -> None:
        self._silent.discard(link)
        if not self._silent:
            self._cell.put = self._enqueue
            self._cell.proc.close_port(self._port)

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        self._heard(link)

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        self._heard(link)
