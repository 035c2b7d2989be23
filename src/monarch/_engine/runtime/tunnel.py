"""A tunnel: the link between two procs of different hosts, carried by their agents.

Each end is an ordinary socket pair with a proc at the other side, which does not know that its peer
is far away. Frames read here travel on a lane of the host link, many small ones in one message, and
are written to the socket there. An empty message says that a proc closed its end.

Big payloads come as shared segments, which end at the host: the agent maps the segment and sends
the table and the bytes from where they are; the other agent puts them into a segment of its own and
passes that on. Both hosts release as within a host, each for itself.

Nothing piles up: a socket that does not take what arrives pauses its lane, a lane that is full
stops the reading of its socket, and whoever writes to that waits.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

from monarch._engine.base.errors import ProtocolError
from monarch._engine.runtime.reactor import READ, WRITE, Reactor
from monarch._engine.transport.link import Link
from monarch._engine.transport.segment import SegmentPool
from monarch._engine.wire.codec import Payload
from monarch._engine.wire.frame import HEADER, RELEASE, SEGMENT, Frame, pack

if TYPE_CHECKING:
    from monarch._engine.runtime.host_link import HostLink

__all__ = ["Tunnel"]

_TABLE_HEAD = struct.Struct("<QQI")
_PART = struct.Struct("<QQB")
_QUEUE_LIMIT = 4 << 20  # bytes waiting for a socket before the lane is paused


class Tunnel:
    """One end. `near` is the proc at this end's socket, `far` the one on the other host."""

    def __init__(
        self,
        reactor: Reactor,
        host_link: HostLink,
        lane: int,
        near: int,
        far: int,
        segments: SegmentPool,
        frame_limit: int,
        closed: Any,
    ) -> None:
        self._reactor = reactor
        self._host_link = host_link
        self.lane = lane
        self.near = near
        self.far = far
        self._segments = segments
        self._frame_limit = frame_limit
        self._closed = closed  # called with this once both ends are done
        self._link: Link | None = None
        self._paused = False  # the lane, since the socket does not keep up
        self._stalled = False  # the socket, since the lane is full
        self._writes = False  # bytes wait for the socket
        self._said_end = False
        self._heard_end = False

    def attach(self, sock: socket.socket) -> None:
        """Serve this socket; a proc has its other end."""
        link = self._link = Link(
            sock, f"proc {self.near:x}", self._want_write, self._frame_limit, 1 << 40
        )
        link.uid = self.near
        self._reactor.register(link.fileno, self._ready)

    # -- from the proc to the lane ---------------------------------------------------------------

    def _want_write(self, link: Link, on: bool) -> None:
        self._writes = on
        self._watch()

    def _watch(self) -> None:
        if self._link is not None and self._link.fileno >= 0:
            reads = not self._stalled
            self._reactor.watch(self._link.fileno, reads=reads, writes=self._writes)

    def _ready(self, mask: int) -> None:
        link = self._link
        assert link is not None
        if mask & WRITE:
            link.flush()
            if self._paused and link.queued < _QUEUE_LIMIT // 2:
                self._paused = False
                self._host_link.resume(self.lane)
        # A proc that hung up has no more to say than what is there: it is read, full or not.
        if mask & (~WRITE if not self._stalled else ~(WRITE | READ)):
            self._read(link)

    def _read(self, link: Link) -> None:
        try:
            frames = link.receive(self._reactor.scratch)
            if link.reader.refused is not None:
                raise link.reader.refused
            self._forward(link, frames)
        except (ProtocolError, ValueError) as error:
            link.lose(str(error))
        if link.lost is not None:
            self._end()

    def _forward(self, link: Link, frames: list[Frame]) -> None:
        batch: list[bytes] = []
        for frame in frames:
            if frame.kind == RELEASE:
                for at in range(0, len(frame.body) - 7, 8):
                    ident = int.from_bytes(frame.body[at : at + 8], "little")
                    self._segments.release(self, ident)
            elif frame.flags & SEGMENT:
                if batch:
                    self._send([b"".join(batch)])
                    batch = []
                self._forward_segment(link, frame)
            else:
                kind, flags, dest, port, rank, _, meta, body = frame
                batch.append(pack(kind, dest, port, rank, meta, bytes(body), flags))
        if batch:
            self._send([b"".join(batch)])

    def _forward_segment(self, link: Link, frame: Frame) -> None:
        (fd,) = link.take_fds(1)
        try:
            ident, used, _ = _TABLE_HEAD.unpack_from(frame.body)
            if used > os.fstat(fd).st_size:
                raise ValueError("a segment table points outside its segment")
            mapping = mmap.mmap(fd, used, prot=mmap.PROT_READ)
        except struct.error as error:
            raise ValueError(f"a segment table: {error}") from None
        finally:
            os.close(fd)
        kind, flags, dest, port, rank, _, meta, table = frame
        head = pack(kind, dest, port, rank, meta, bytes(table), flags)
        view = memoryview(mapping)

        def sent() -> None:
            view.release()
            mapping.close()
            link.send(pack(RELEASE, 0, 0, 0, b"", ident.to_bytes(8, "little")))

        self._send([head, view], sent)

    def _send(self, buffers: list[Any], token: Any = None) -> None:
        if not self._host_link.send(self.lane, buffers, token) and not self._stalled:
            self._stalled = True
            self._watch()

    def room(self) -> None:
        """The lane takes messages again."""
        if self._stalled:
            self._stalled = False
            self._watch()

    # -- from the lane to the proc ---------------------------------------------------------------

    def deliver(self, data: bytes | bytearray | memoryview) -> None:
        """A message of the lane."""
        if not len(data):
            self._heard_end = True
            self._close_when_flushed()
            return
        link = self._link
        if link is None or link.lost is not None:
            return  # the proc is gone; the other end hears of it
        flags = data[5]
        if flags & SEGMENT:
            self._deliver_segment(link, memoryview(data))
        else:
            link.send(bytes(data))
        if link.queued > _QUEUE_LIMIT and not self._paused:
            self._paused = True
            self._host_link.pause(self.lane)

    def _deliver_segment(self, link: Link, data: memoryview) -> None:
        size, kind, flags, meta_len, dest, port, rank, _, _ = HEADER.unpack_from(data)
        start = HEADER.size + meta_len
        meta = bytes(data[HEADER.size : start])
        table = data[start : HEADER.size + size]
        content = data[HEADER.size + size :]
        _, used, count = _TABLE_HEAD.unpack_from(table)
        parts = list(_PART.iter_unpack(table[_TABLE_HEAD.size :]))
        if used != len(content) or len(parts) != count:
            raise ProtocolError("a segment that does not fit its table")
        segment = self._segments.store(Payload([content], [], 0))
        # The parts are where they were: only the segment's id is another.
        renamed = _TABLE_HEAD.pack(segment.id, used, count) + bytes(table[_TABLE_HEAD.size :])
        self._segments.hold(self, segment)
        self._segments.release(None, segment.id)
        frame = pack(kind, dest, port, rank, meta, renamed, flags, 1)
        if not link.send(frame, [segment.fd]):
            self._segments.release(self, segment.id)

    # -- the end ---------------------------------------------------------------------------------

    def _close_when_flushed(self) -> None:
        link = self._link
        if link is None or link.lost is not None or not link.queued:
            self.close("the other proc closed its end")
        else:  # the last that it said is to arrive
            self._reactor.call_later(0.01, self._close_when_flushed)

    def _end(self) -> None:
        """The proc closed its end of the socket."""
        link = self._link
        if link is not None and link.fileno >= 0:
            self._reactor.unregister(link.fileno)
            link.close(link.lost or "closed")
            link.fileno = -1
        self._segments.drop_holder(self)
        if not self._said_end:
            self._said_end = True
            self._host_link.send(self.lane, [b""])
        self._done()

    def close(self, reason: str) -> None:
        """There is no other end any more: the proc sees that its peer is gone."""
        self._heard_end = True
        link = self._link
        if link is not None and link.lost is None:
            link.lose(reason)
        self._end()

    def _done(self) -> None:
        if self._said_end and self._heard_end and self._closed is not None:
            closed, self._closed = self._closed, None
            closed(self)
