"""The agent's control links: to the client or the worker, to each proc, and to each launcher.

A frame goes to the handler that the agent installs. A peer that sends an invalid frame or message
is disconnected, with a report on stderr, since its link cannot be used any further.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from monarch._engine.base.errors import ProtocolError
from monarch._engine.runtime.agent import control
from monarch._engine.runtime.io.reactor import Reactor
from monarch._engine.transport.link import Link
from monarch._engine.wire.frame import Frame

__all__ = ["ControlLinks"]

_FRAME_LIMIT = 64 << 20
_QUEUE_LIMIT = 1 << 40  # control messages are small and few; sending never blocks the agent


class ControlLinks:
    """The control links of an agent; see the module. All methods run on the reactor's thread.

    Args:
        reactor: reads and writes the links.
        handle: handles a frame; what it raises of ProtocolError, ValueError, TypeError and
            LookupError disconnects the sender.
        rejected: called with a link that is disconnected for an invalid message, before `lost`.
        lost: called with a link that is closed, once.
    """

    def __init__(
        self,
        reactor: Reactor,
        handle: Callable[[Link, Frame], None],
        rejected: Callable[[Link], None],
        lost: Callable[[Link], None],
    ) -> None:
        self._reactor = reactor
        self._handle = handle
        self._rejected = rejected
        self._lost = lost

    def connect(self, sock: socket.socket, peer: str) -> Link:
        """Return a control link over `sock`; `peer` names the other side in reports."""
        link = Link(sock, peer, None, _FRAME_LIMIT, _QUEUE_LIMIT)
        link.serve(self._reactor, self._read)
        return link

    def drain(self, link: Link) -> None:
        """Handle all that has arrived from a process that has exited.

        The link may stay open: a child that user code forked holds the other end, too.
        """
        while link.fileno >= 0 and self._read(link):
            pass

    def close(self, link: Link) -> None:
        """Close a link, unless it is closed; `lost` is not called."""
        if link.fileno >= 0:
            self._reactor.unregister(link.fileno)
            link.close(link.lost or "the process ended")
            link.fileno = -1

    def tell(self, link: Link, message: Mapping[str, Any], fds: list[int] | None = None) -> None:
        """Send a control message, with descriptors, which stay the caller's."""
        link.send(control.encode(message, len(fds or ())), fds)

    def _read(self, link: Link) -> bool:
        """Handle what has arrived; return False if that was nothing or the link is lost.

        Less than a frame is something, too: a big frame takes several reads.
        """
        frames: list[Frame] = []
        kept = link.reader.kept
        try:
            frames = link.receive(self._reactor.scratch)
            for frame in frames:
                self._handle(link, frame)
            if link.reader.refused is not None:
                raise link.reader.refused
        except (ProtocolError, ValueError, TypeError, LookupError) as error:
            text = f"monarch: {link.peer} sent an invalid message and was disconnected: {error}"
            print(text, file=sys.stderr)
            link.lose(str(error))
            self._rejected(link)
        if link.lost is None:
            return bool(frames) or link.reader.kept != kept
        if link.fileno >= 0:
            self.close(link)
            self._lost(link)
        return False
