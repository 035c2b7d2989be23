"""Frames: the fixed binary envelope of all messages on a link.

A frame is a 32-byte header, `meta_len` bytes of meta, and a body::

    size u32 | kind u8 | flags u8 | meta_len u16 | dest u64 | port u64 | rank u32 | nfd u16
    | check u16

    size    bytes after the header (meta and body)
    dest    in the receiving process: the mesh (CALL, SPAWN, STOP...) or the port (POST)
    port    in the sending process: the port for the answer; 0: no answer is expected
    rank    the receiver's rank in the mesh the caller used (CALL), or the sender's (POST);
            the kind of the message inside (CAST)
    nfd     file descriptors that travel with it
    check   a constant; a stream that is out of step fails here instead of being misread

The header is parsed with `struct`, never with pickle, and nothing in it is trusted beyond its
bounds: sizes are checked against the limit before a byte is allocated. `FrameReader` takes bytes
as they arrive, whole, in pieces or many frames at once, and returns the complete frames. Big bodies
are received straight into their final memory: the reader offers a buffer to fill (`target`), which
grows as bytes arrive, so a header alone allocates no memory. Frames before a bad header are
returned, and `refused` holds the error.

Meta of a CALL is the endpoint's name and the extent of the caller's mesh. It is the same for all
ranks and all calls of one endpoint, so both ends keep it ready: the sender packs it once per
endpoint object, the receiver looks the bytes up in a table.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from monarch._engine.base.errors import ProtocolError

__all__ = [
    "ALONE",
    "ANSWERS",
    "CALL",
    "CAST",
    "CONTROL",
    "DIRECT",
    "ERROR",
    "EVENT",
    "FAILURE",
    "FIRST",
    "FLOW",
    "HEADER",
    "HURRY",
    "MARK",
    "ONCE",
    "POST",
    "PROBE",
    "QUERY",
    "RELEASE",
    "SEGMENT",
    "SERVICE",
    "SPAWN",
    "STOP",
    "TURN",
    "Frame",
    "FrameReader",
    "pack",
]

HEADER = struct.Struct("<IBBHQQIHH")
HEADER_SIZE = HEADER.size
CHECK = 0x6D6F
_FIRST_STEP = 1 << 20

# Kinds.
CALL = 1  # invoke an endpoint of the actor `dest`
POST = 2  # a value, or an error, for the port `dest`
SPAWN = 3  # create the actor `dest`
STOP = 4  # stop the actor `dest`, or with dest 0 the process
EVENT = 5  # to the owner of mesh `dest`: the failure of rank `rank`
FLOW = 6  # the mailbox `dest` is full (flags 1) or has room again (flags 0)
RELEASE = 7  # shared segments the receiver of a payload no longer uses
CONTROL = 8  # a request to, or a notice from, the host agent: JSON
QUERY = 9  # is the actor `dest` there? Answered at `port`
PROBE = 10  # a wait for the actor `dest`; with flags 1, a wait of it: see `monarch._deadlock`
SERVICE = 11  # a request to the service that meta names (mesh.results.service). Answered at `port`
CAST = 12  # to the host agent: a message for many procs of other hosts (runtime.cast.sender)
ANSWERS = 13  # from the host agent: POSTs of many ranks to port `dest`; flags 1: the last
MARK = 14  # all later frames were sent after the sender's cast `dest` (order_merge)
TURN = 15  # all later frames take the other path to the peer, see protocol.path_switch
DIRECT = 16  # about a direct connection between two procs, see runtime.direct.link
_LAST_KIND = DIRECT

# Flags: the kind of body. The low bits are the outcome of a POST; a CALL and a STOP have others.
# The port of this CALL takes one answer of each rank, and a second one raises at its sender. The
# caller needs all of them, so agents hold the answers of a cast for up to 20 ms, to join them.
ONCE = 1
# The port of this CALL takes the first answer of each rank, and drops others. The caller uses each
# as it comes, so agents hold the answers of a cast for 2 ms at most.
FIRST = 2
ALONE = 4  # the sender of this CALL waits for no other answer
ERROR = 1  # the endpoint raised; the body is the exception
FAILURE = 2  # the actor has ended; the body is the failure
HURRY = 1  # a repeated STOP: give the actor up, even in the middle of an endpoint
SEGMENT = 128  # the body is a table of parts of a shared segment


class Frame(NamedTuple):
    """One parsed frame. `meta` and `body` are owned by the receiver."""

    kind: int
    flags: int
    dest: int
    port: int
    rank: int
    nfd: int
    meta: bytes
    body: bytes | bytearray


def pack(
    kind: int,
    dest: int,
    port: int,
    rank: int,
    meta: bytes,
    body: bytes,
    flags: int = 0,
    nfd: int = 0,
) -> bytes:
    """Return the bytes of one frame with a small body.

    >>> len(pack(CALL, 1, 0, 0, b"", b"hello"))
    37
    """
    size = len(meta) + len(body)
    head = HEADER.pack(size, kind, flags, len(meta), dest, port, rank, nfd, CHECK)
    return head + meta + body


class FrameReader:
    """Bytes of one stream in, complete frames out.

    Args:
        limit: the largest `size` accepted, in bytes.
        peer: the name of the sender in errors.

    >>> reader = FrameReader(limit=1 << 20, peer="proc a")
    >>> data = pack(POST, 7, 0, 0, b"", b"ok")
    >>> reader.feed(memoryview(data)[:10])
    []
    >>> reader.feed(memoryview(data)[10:])[0].body
    b'ok'
    """

    __slots__ = ("_filled", "_head", "_tail", "big", "limit", "peer", "refused")

    def __init__(self, limit: int, peer: str) -> None:
        self.limit = limit
        self.peer = peer
        self._tail = b""  # an incomplete frame that still fits into one read
        self.big: bytearray | None = None  # meta and body of a big frame; `target` is a part of it
        self._filled = 0
        self._head: tuple[int, ...] = ()
        self.refused: ProtocolError | None = None

    def target(self) -> memoryview | None:
        """Return the buffer for the next bytes of a big frame, or None without one (use `feed`)."""
        big = self.big
        if big is None:
            return None
        if self._filled == len(big):
            big.extend(bytes(min(len(big), self._head[0] - len(big))))
        return memoryview(big)[self._filled :]

    def filled(self, count: int) -> list[Frame]:
        """Report `count` bytes written into `target`; returns the frame once it is complete."""
        big = self.big
        assert big is not None, "filled() without a target"
        self._filled += count
        if self._filled < self._head[0]:
            return []
        self.big = None
        _, kind, flags, meta_len, dest, port, rank, nfd, _ = self._head
        meta = bytes(big[:meta_len])
        if meta_len:
            del big[:meta_len]
        return [Frame(kind, flags, dest, port, rank, nfd, meta, big)]

    def feed(self, data: memoryview) -> list[Frame]:
        """Take bytes that arrived outside `target`; `data` may be reused after the call."""
        if self._tail:
            data = memoryview(self._tail + data)
            self._tail = b""
        frames: list[Frame] = []
        at = 0
        end = len(data)
        unpack = HEADER.unpack_from
        # A NamedTuple's own constructor costs three times as much. (This one's type is partial.)
        new: Any = tuple.__new__  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        while end - at >= HEADER_SIZE:
            head = unpack(data, at)
            size, kind, flags, meta_len, dest, port, rank, nfd, check = head
            if check != CHECK or not 0 < kind <= _LAST_KIND or meta_len > size or size > self.limit:
                error = self._error(head)
                if not frames:
                    raise error
                self.refused = error
                return frames
            body_at = at + HEADER_SIZE + meta_len
            frame_end = at + HEADER_SIZE + size
            if frame_end > end:
                if size > 65536:
                    self._start_big(head, data[at + HEADER_SIZE :])
                    return frames
                break
            meta = bytes(data[at + HEADER_SIZE : body_at]) if meta_len else b""
            body = bytes(data[body_at:frame_end])
            frames.append(new(Frame, (kind, flags, dest, port, rank, nfd, meta, body)))
            at = frame_end
        if at < end:
            self._tail = bytes(data[at:])
        return frames

    @property
    def idle(self) -> bool:
        """Whether no frame is incomplete."""
        return not self._tail and self.big is None

    @property
    def kept(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._tail) if self.big is None else HEADER_SIZE + self._filled

    def _start_big(self, head: tuple[int, ...], got: memoryview) -> None:
        self._head = head
        self.big = bytearray(min(head[0], max(len(got), _FIRST_STEP)))
        self.big[: len(got)] = got
        self._filled = len(got)

    def _error(self, head: tuple[int, ...]) -> ProtocolError:
        size, kind, _, meta_len, *_, check = head
        if check != CHECK:
            what = "the stream does not contain frames of this protocol"
        elif not 0 < kind <= _LAST_KIND:
            what = f"unknown frame kind {kind}"
        elif meta_len > size:
            what = f"meta of {meta_len} bytes in a frame of {size}"
        else:
            what = (
                f"a frame of {size} bytes, more than the limit of {self.limit} "
                "(configuration key codec_max_frame_length)"
            )
        return ProtocolError(f"protocol error from {self.peer}: {what}")
