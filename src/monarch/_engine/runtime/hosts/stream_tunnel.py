"""A tunnel for a side stream: bytes between two procs of different hosts, carried by their agents.

Works as `tunnel`, but without frames: bytes that are read at one end are written at the other. An
empty message reports that an end is closed. A socket that does not take what arrives pauses the
lane; a full lane stops the reading of its socket. So the data in transit is bounded by what the
sockets, the lane and `_QUEUE_LIMIT` hold.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.runtime.io.reactor import READ, WRITE, Reactor
from monarch._engine.transport.outbox import Outbox

if TYPE_CHECKING:
    from monarch._engine.runtime.hosts.host_link import HostLink

__all__ = ["StreamTunnel"]

_QUEUE_LIMIT = 4 << 20  # bytes waiting for the socket before the lane is paused


class StreamTunnel:
    """One end of the tunnel. `near` is the proc at this end, `far` the one on the other host."""

    def __init__(
        self,
        reactor: Reactor,
        host_link: HostLink,
        lane: int,
        near: int,
        far: int,
        closed: Callable[[Any], None],
    ) -> None:
        self._reactor = reactor
        self._host_link = host_link
        self.lane = lane
        self.near = near
        self.far = far
        self._closed: Callable[[Any], None] | None = closed  # called when both ends are closed
        self._sock: socket.socket | None = None
        self._queue = Outbox()
        self._queued = 0
        self._paused = False  # whether the socket is too slow for the lane
        self._stalled = False  # whether reading is stopped, as the lane is full
        self._said_end = False
        self._heard_end = False

    def attach(self, sock: socket.socket) -> None:
        """Serve this socket, whose other end a proc has."""
        sock.setblocking(False)
        self._sock = sock
        self._reactor.register(sock.fileno(), self._ready)

    def _watch(self) -> None:
        if self._sock is not None:
            reads, writes = not self._stalled, bool(self._queue)
            self._reactor.watch(self._sock.fileno(), reads=reads, writes=writes)

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush()
        # After a hang-up the remaining data is bounded, so read it even if the lane is full.
        if mask & (~WRITE if not self._stalled else ~(WRITE | READ)) and self._sock is not None:
            self._read(self._sock)

    # -- from the proc to the lane ---------------------------------------------------------------

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(len(self._reactor.scratch))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._end()
        elif not self._host_link.send(self.lane, [data]):
            self._stalled = True
            self._watch()

    def room(self) -> None:
        """Resume reading from the socket: the lane takes messages again."""
        if self._stalled:
            self._stalled = False
            self._watch()

    # -- from the lane to the proc ---------------------------------------------------------------

    def deliver(self, data: bytes | bytearray | memoryview) -> None:
        """Handle a message of the lane."""
        if not len(data):
            self._heard_end = True
            if not self._queue:  # otherwise the remaining output is flushed first
                self.close("the other proc closed its end")
            return
        if self._sock is None:
            return  # the proc has closed its end, which the other end learns
        self._queue.append(memoryview(bytes(data)))
        self._queued += len(data)
        if len(self._queue) == 1:
            self._flush()
        if self._queued > _QUEUE_LIMIT and not self._paused:
            self._paused = True
            self._host_link.pause(self.lane)

    def _flush(self) -> None:
        queue = self._queue
        while queue and self._sock is not None:
            try:
                self._queued -= queue.write(self._sock)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._end()
                return
        if self._paused and self._queued < _QUEUE_LIMIT // 2:
            self._paused = False
            self._host_link.resume(self.lane)
        if self._heard_end and not queue:
            self._end()
        else:
            self._watch()

    # -- closing ---------------------------------------------------------------------------------

    def close(self, _reason: str) -> None:
        """Close the tunnel, as the other end is closed: the proc sees an end of file."""
        self._heard_end = True
        self._end()

    def _end(self) -> None:
        if self._sock is not None:
            self._reactor.unregister(self._sock.fileno())
            self._sock.close()
            self._sock = None
            self._queue.clear()
            self._queued = 0
        if not self._said_end:
            self._said_end = True
            self._host_link.send(self.lane, [b""])
        if self._heard_end and self._closed is not None:
            closed, self._closed = self._closed, None
            closed(self)
