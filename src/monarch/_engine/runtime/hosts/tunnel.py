"""A tunnel: the link between two procs of different hosts, carried by their agents.

Each end is an ordinary socket pair with a proc at the other side, which does not know that its peer
is on another host. Frames read here travel on a lane of the host link, many small ones in one
message, and are written to the socket at the other end. An empty message reports that a proc has
closed its end.

Big payloads arrive in shared segments, which cannot leave their host. So the agent sends the
segment's table, and the bytes directly from the segment. The other agent receives both into a
segment of its own, and passes that on with a table that locates the parts in it. Both hosts
release their segment as for a message within a host, independently of each other.

Back-pressure bounds all queues. A socket that does not take what arrives pauses its lane; a full
lane stops the reading of its socket; then the proc that writes to the socket has to wait.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.errors import ProtocolError
from monarch._engine.runtime.cast.tunnel_end import Cast, TunnelEnd, ranked
from monarch._engine.runtime.io.reactor import READ, WRITE, Reactor
from monarch._engine.transport.link import Link
from monarch._engine.transport.segment import SegmentPool, Windows
from monarch._engine.wire.codec import Payload
from monarch._engine.wire.frame import (
    HEADER,
    MARK,
    POST,
    PROBE,
    RELEASE,
    SEGMENT,
    Frame,
    pack,
)

if TYPE_CHECKING:
    from monarch._engine.runtime.cast.relay import CastRelay
    from monarch._engine.runtime.cast.tunnel_end import Way
    from monarch._engine.runtime.hosts.host_link import HostLink

__all__ = ["Tunnel", "map_segment"]

_TABLE_HEAD = struct.Struct("<QQI")
_PART = struct.Struct("<QQB")
_ALIGNMENT = 64  # of the parts in a segment, here as at the origin: vector loads want it
_QUEUE_LIMIT = 4 << 20  # bytes waiting for a socket before the lane is paused


class Tunnel(TunnelEnd):
    """One end of a tunnel. `near` is the proc at this end, `far` the one on the other host."""

    def __init__(
        self,
        relay: CastRelay,
        way: Way,
        reactor: Reactor,
        host_link: HostLink,
        lane: int,
        near: int,
        far: int,
        segments: SegmentPool,
        windows: Windows,
        frame_limit: int,
        closed: Any,
        *,
        ours: bool,
    ) -> None:
        super().__init__(relay, way, near, far, ours=ours)
        self._reactor = reactor
        self._host_link = host_link
        self.lane = lane
        self._segments = segments
        self._windows = windows
        self._frame_limit = frame_limit
        self._closed = closed  # called with this object when both ends are closed
        self._link: Link | None = None
        self._paused = False  # whether the socket is too slow for the lane
        self._lane_paused = False  # the actual state: paused for that reason, or for a cast
        self.clogged = False  # whether the socket is too slow for casts
        self._stalled = False  # whether reading from the socket is stopped, as the lane is full
        self._writes = False  # whether bytes wait for the socket
        self._said_end = False
        self._heard_end = False
        self.before: Callable[[], None] | None = None  # called before the first message is sent
        relay.opened(self)

    def attach(self, sock: socket.socket) -> None:
        """Serve this socket, whose other end a proc has."""
        link = self._link = Link(
            sock, f"proc {self.near:x}", self._want_write, self._frame_limit, 1 << 40
        )
        link.uid = self.near
        self._reactor.register(link.fileno, self._ready)
        self.relay.attached(self)

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
            if link.queued < _QUEUE_LIMIT // 2:
                if self._paused:
                    self._paused = False
                    self._flow()
                if self.clogged:
                    self.clogged = False
                    self.relay.drained(self)
        # After a hang-up the remaining data is bounded, so read it even if the lane is full.
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
            if self.expected:
                if frame.kind == POST and self.relay.answer(self, frame):
                    continue
                if frame.kind == PROBE:
                    batch += self.relay.repeated(self)
            if frame.kind == RELEASE:
                for at in range(0, len(frame.body) - 7, 8):
                    ident = int.from_bytes(frame.body[at : at + 8], "little")
                    self._segments.release(self, ident)
            elif frame.flags & SEGMENT:
                if batch:
                    self._send([b"".join(batch)])
                    batch = []
                self._forward_segment(link, frame)
            elif frame.kind == MARK:
                if batch:
                    self._send([b"".join(batch)])
                    batch = []
                self._send([pack(MARK, frame.dest, 0, 0, b"", b"")])
            else:
                kind, flags, dest, port, rank, _, meta, body = frame
                batch.append(pack(kind, dest, port, rank, meta, bytes(body), flags))
        if batch:
            self._send([b"".join(batch)])

    def _forward_segment(self, link: Link, frame: Frame) -> None:
        (fd,) = link.take_fds(1)
        try:
            ident, used, _ = _TABLE_HEAD.unpack_from(frame.body)
            view = self._windows.open(self, fd, used)
        except struct.error as error:
            raise ValueError(f"a segment table: {error}") from None
        finally:
            os.close(fd)
        kind, flags, dest, port, rank, _, meta, table = frame
        head = pack(kind, dest, port, rank, meta, bytes(table), flags)
        head += bytes(-len(head) % _ALIGNMENT)

        def sent() -> None:
            view.release()
            link.send(pack(RELEASE, 0, 0, 0, b"", ident.to_bytes(8, "little")))

        self._send([head, view], sent)

    def _send(self, buffers: list[Any], token: Any = None) -> None:
        if self.before is not None:
            before, self.before = self.before, None
            before()
        if not self._host_link.send(self.lane, buffers, token) and not self._stalled:
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
        if self.merge is not None or (len(data) and data[4] == MARK):
            self.relay.arrived(self, data)
        else:
            self.write(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not len(data):
            self._heard_end = True
            self._close_when_flushed()
            return
        link = self._link
        if link is None or link.lost is not None:
            return  # the proc has closed its end, which the other end learns
        flags = data[5]
        if flags & SEGMENT:
            self._deliver_segment(link, memoryview(data))
        else:
            link.send(bytes(data))
        if link.queued > _QUEUE_LIMIT and not self._paused:
            self._paused = True
            self._flow()

    def write_cast(self, cast: Cast, rank: int) -> bool:
        link = self._link
        if link is None or link.lost is not None:
            return True
        if cast.content is None:
            link.send(ranked(cast.frame, rank))
        else:
            if cast.frame_here is None:
                segment, cast.frame_here = self._stored(cast.frame, cast.content)
                # The cast holds the segment while more procs may get it; then only receivers do.
                ident = segment.id
                cast.segment = segment
                weakref.finalize(cast, self._segments.release, None, ident)
            self._pass_on(link, ranked(cast.frame_here, rank), cast.segment)
        if link.queued > _QUEUE_LIMIT:
            self.clogged = True  # until the proc has read half of that
            return False
        return True

    def hold(self, *, on: bool) -> None:
        self._flow()

    def _flow(self) -> None:
        """Pause or resume the lane. There are two reasons to pause it; one is enough."""
        paused = self._paused or self.held
        if paused != self._lane_paused:
            self._lane_paused = paused
            (self._host_link.pause if paused else self._host_link.resume)(self.lane)

    def _deliver_segment(self, link: Link, data: memoryview) -> None:
        frame_end = HEADER.size + HEADER.unpack_from(data)[0]
        segment = self._segments.reserved(data)
        if segment is not None:
            frame = _reframed(bytes(data[:frame_end]), segment.id, len(data))
            self._pass_on(link, frame, segment)
            return
        segment, frame = self._stored(bytes(data[:frame_end]), data)
        self._pass_on(link, frame, segment)
        self._segments.release(None, segment.id)

    def _stored(self, frame: bytes, content: memoryview) -> tuple[Any, bytes]:
        """Store `content` in a segment of this host; return it, and the frame that refers to it."""
        segment = self._segments.store(Payload([content], [], 0))
        return segment, _reframed(frame, segment.id, len(content))

    def _pass_on(self, link: Link, frame: bytes, segment: Any) -> None:
        self._segments.hold(self, segment)
        if not link.send(frame, [segment.fd]):
            self._segments.release(self, segment.id)

    # -- closing ---------------------------------------------------------------------------------

    def _close_when_flushed(self) -> None:
        link = self._link
        if link is None or link.lost is not None or not link.queued:
            self.close("the other proc closed its end")
        else:  # wait until the remaining output has been flushed
            self._reactor.call_later(0.01, self._close_when_flushed)

    def _end(self) -> None:
        """Close the socket of this end, and report that to the other end once."""
        link = self._link
        if link is not None and link.fileno >= 0:
            self._reactor.unregister(link.fileno)
            link.close(link.lost or "closed")
            link.fileno = -1
        self._segments.drop_holder(self)
        self._windows.drop(self)
        if not self._said_end:
            self._said_end = True
            for answer in self.relay.repeated(self):  # answers must arrive before the report
                self._send([answer])
            self._send([b""])
            self.relay.closed(self)
        self._done()

    def close(self, reason: str) -> None:
        """Close the tunnel, as the other end is closed: the proc sees that its peer is lost."""
        self._heard_end = True
        link = self._link
        if link is not None and link.lost is None:
            link.lose(reason)
        self._end()

    def _done(self) -> None:
        if self._said_end and self._heard_end and self._closed is not None:
            closed, self._closed = self._closed, None
            closed(self)


def map_segment(link: Link, table: bytes | bytearray) -> tuple[int, mmap.mmap]:
    """Map the segment of a frame on `link`; return its id and a read-only mapping.

    Raises ValueError for a table that does not fit the segment.
    """
    (fd,) = link.take_fds(1)
    try:
        ident, used, _ = _TABLE_HEAD.unpack_from(table)
        if used > os.fstat(fd).st_size:
            raise ValueError("a segment table points outside its segment")
        return ident, mmap.mmap(fd, used, prot=mmap.PROT_READ)
    except struct.error as error:
        raise ValueError(f"a segment table: {error}") from None
    finally:
        os.close(fd)


def _reframed(frame: bytes, ident: int, size: int) -> bytes:
    """Return a frame of another host, rewritten to refer to a segment of this host.

    The segment's content is the last `used` bytes of the segment, whose size is `size`. Raises
    ProtocolError for a table that does not fit.
    """
    _, kind, flags, meta_len, dest, port, rank, _, _ = HEADER.unpack_from(frame)
    start = HEADER.size + meta_len
    meta, table = frame[HEADER.size : start], frame[start:]
    _, used, count = _TABLE_HEAD.unpack_from(table)
    parts = list(_PART.iter_unpack(table[_TABLE_HEAD.size :]))
    at = size - used
    if not 0 <= at < len(frame) + _ALIGNMENT or len(parts) != count:
        raise ProtocolError("a segment that does not fit its table")
    moved = _TABLE_HEAD.pack(ident, size, count) + b"".join(
        _PART.pack(at + offset, length, bulk) for offset, length, bulk in parts
    )
    return pack(kind, dest, port, rank, meta, moved, flags, 1)
