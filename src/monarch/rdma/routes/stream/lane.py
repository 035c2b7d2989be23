"""A lane: a connection to an owner, with the requests on it that are unanswered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch import _spi
from monarch.rdma.errors import RdmaBufferDropped, RdmaError, RdmaPermissionError
from monarch.rdma.routes.stream.chunk import Chunk
from monarch.rdma.routes.stream.connection import Connection, Item
from monarch.rdma.routes.stream.driver import data_reactor
from monarch.rdma.routes.stream.landing import Text
from monarch.rdma.routes.stream.message import (
    DATA,
    END,
    FORBIDDEN,
    NOT_FOUND,
    OK,
    REPLY,
    REQUEST,
    TEXT_LIMIT,
    VALUE,
    Landing,
    Reader,
    hello,
)

if TYPE_CHECKING:
    from monarch.rdma.routes.stream.peer import Peer

__all__ = ["Lane"]

_ERRORS: dict[int, type[RdmaError]] = {NOT_FOUND: RdmaBufferDropped, FORBIDDEN: RdmaPermissionError}
_IDS = (1 << 32) - 1


class Lane:
    """A connection to an owner, with the requests on it that are unanswered.

    Args:
        peer: is notified of replies, and provides further requests.
        wire: the socket.
        number: of the ticket that led to it; 0 for a side stream.
        ended: called with the lane when the connection has closed, after `reason` is set.
    """

    def __init__(
        self, peer: Peer, wire: _spi.Wire, number: int, ended: Callable[[Lane], None]
    ) -> None:
        self.number = number
        self.chunks: dict[int, Chunk] = {}
        """The unanswered chunks by number."""
        self.load = 0
        """The number of bytes of the unanswered chunks."""
        self.heard = time.monotonic()
        """The time when the peer last sent something, or when its silence began to count."""
        self.farewell: tuple[int, str] | None = None
        """The code and text that the owner sent when it ended the connection."""
        self.reason = ""
        self._peer = peer
        self._ended = ended
        self._asked: dict[int, Callable[[bytes], None]] = {}
        self._last_id = 0
        self.connection = Connection(
            data_reactor(), wire, Reader(REPLY, self._begin), self._lost, self._refill
        )
        self.connection.queue((hello(peer.identity, number),))

    def _lost(self, reason: str) -> None:
        self.reason = reason
        self._ended(self)

    def _next_id(self) -> int:
        self._last_id = ident = self._last_id % _IDS + 1
        return ident

    def ask(self, operation: int, number: int, answered: Callable[[bytes], None]) -> None:
        """Send a request that concerns connections; `answered` is called with the reply."""
        ident = self._next_id()
        self._asked[ident] = answered
        self.connection.send(REQUEST.pack(ident, operation, 0, number, bytes(16), 0, 0, 0, 0))

    def request(self, chunk: Chunk) -> list[bytes | memoryview]:
        """Return the bytes that request a chunk; from now on its reply is expected."""
        ident = chunk.ident = self._next_id()
        if not self.chunks:
            self.heard = time.monotonic()  # the peer's silence counts from here
        self.chunks[ident] = chunk
        self.load += chunk.count
        return chunk.asked(ident)

    def _refill(self) -> list[Item]:
        return self._peer.more_for(self)

    def _begin(self, ident: int, kind: int, status: int, length: int) -> Landing | None:
        """Process the header of a reply; see `message`."""
        self.heard = time.monotonic()
        chunk = self.chunks.get(ident)
        if chunk is not None and kind in (DATA, VALUE):
            if length != chunk.count:
                raise ValueError(f"{length} bytes where {chunk.count} were asked for")
            then = (lambda: self.answered(chunk, None)) if kind == VALUE else None
            return chunk.expect(then)
        if length > TEXT_LIMIT:
            raise ValueError(f"a text of {length} bytes")
        if chunk is not None and kind == END:
            if status == OK:
                self.answered(chunk, None)
                return None
            return Text(length, lambda text: self._refused(chunk, status, text))
        answer = self._asked.pop(ident, None)
        if answer is not None:
            return Text(length, answer)
        if not ident and kind == END:
            return Text(length, lambda text: self._on_farewell(status, text))
        raise ValueError("an answer to nothing")

    def _on_farewell(self, status: int, text: bytes) -> None:
        self.farewell = (status, text.decode(errors="replace"))
        self.connection.close(self.farewell[1])

    def _refused(self, chunk: Chunk, status: int, text: bytes) -> None:
        kind = _ERRORS.get(status, RdmaError)
        self.answered(chunk, kind(text.decode(errors="replace")))

    def answered(self, chunk: Chunk, error: RdmaError | None) -> None:
        """Note that a chunk is complete, or refused with `error`."""
        self._peer.answered(self, chunk, error)
