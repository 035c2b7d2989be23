"""What is said on a connection of the data plane, byte by byte.

The initiator asks, the owner answers, in whatever order it is ready. A request has 64 bytes, all
little-endian, and is followed by the bytes to be written if it is a WRITE::

    0   4  id         of the request; answers repeat it
    4   2  operation
    6   2  -
    8   8  number     of the registration
    16  16 token      of the registration
    32  8  offset     in it
    40  8  length     bytes to read or to write
    48  8  first      operand of an atomic operation
    56  8  second     operand

READ, WRITE, ADD and SWAP are those of `transfer.Op`. The others are about the connection:

* HELLO comes first: `token` is the identity of the owner that the initiator looks for, `number` the
  invitation that it follows (0: none), `offset` the magic number, `length` the version.
* INVITE asks for an invitation to a direct connection. The answer is JSON.
* RECALL asks to close the connection `number`, if it is open: what was asked for on it, and not
  answered, may be asked again, and nothing that it has yet to bring will be written.

An answer has 16 bytes and `length` more::

    0   4  id
    4   2  kind
    6   2  status     0: it is done; else END says in its text why not
    8   8  length

* DATA: bytes that were asked for follow. Whether they can be relied upon says the END that follows.
* VALUE: bytes follow, and that was all: they can be relied upon.
* END: it is over. What follows is text. An END with id 0 is about the connection, which ends.

A READ is one DATA, of the length asked for, and an END; or a VALUE; or an END that says why not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from monarch.rdma.transfer import ADD, READ, SWAP, WRITE

__all__ = [
    "ADD",
    "CHUNK_LIMIT",
    "DATA",
    "END",
    "FAILED",
    "FORBIDDEN",
    "GONE",
    "HELLO",
    "INVITE",
    "MAGIC",
    "NOT_FOUND",
    "OK",
    "READ",
    "RECALL",
    "REPLY",
    "REQUEST",
    "SWAP",
    "TEXT_LIMIT",
    "VALUE",
    "VERSION",
    "WRITE",
    "Landing",
    "Reader",
    "hello",
]

MAGIC = int.from_bytes(b"mrdma\0\0\1", "big")
VERSION = 1

REQUEST = struct.Struct("<IHHQ16sQQQQ")
REPLY = struct.Struct("<IHHQ")

HELLO = 16
INVITE = 17
RECALL = 18

DATA = 1
VALUE = 2
END = 3

OK = 0
NOT_FOUND = 1  # RdmaBufferDropped
FORBIDDEN = 2  # RdmaPermissionError
FAILED = 3  # RdmaError
GONE = 4  # RdmaOwnerLost: the owner is another process than the one that was looked for

CHUNK_LIMIT = 64 << 20
"""Bytes that one request may ask for, or bring."""

TEXT_LIMIT = 4096
"""Bytes of the text of an END, and of an invitation."""


def hello(identity: bytes, number: int = 0) -> bytes:
    """The first request."""
    return REQUEST.pack(0, HELLO, 0, number, identity, MAGIC, VERSION, 0, 0)


class Landing(Protocol):
    """Where bytes that follow a header are put."""

    left: int
    """Bytes that are still to come."""

    def put(self, data: memoryview) -> None:
        """Take these; at most `left`."""
        ...

    def fill(self, receive: Callable[[memoryview], int]) -> int:
        """Have `receive` put bytes where they belong; how many. At most `left`."""
        ...

    def done(self) -> None:
        """All are there."""
        ...


class Reader:
    """Takes a stream apart, wherever it is cut.

    Args:
        header: what every message begins with.
        begin: is called with the fields of each header; where the bytes go that follow it, or None
            if none do. Raises ValueError for what cannot be.

    What is in the scratch buffer of whoever receives is given to `feed`. When `landing` is set,
    what comes next can be received directly into it: call its `fill`, then `filled`.
    """

    __slots__ = ("_begin", "_header", "_partial", "landing")

    def __init__(self, header: struct.Struct, begin: Callable[..., Landing | None]) -> None:
        self._header = header
        self._begin = begin
        self._partial = bytearray()
        self.landing: Landing | None = None

    def feed(self, data: memoryview) -> None:
        """Take all of `data`."""
        at, end, size = 0, len(data), self._header.size
        partial = self._partial
        while True:
            landing = self.landing
            if landing is not None:
                count = min(landing.left, end - at)
                if count:
                    landing.put(data[at : at + count])
                    at += count
                if landing.left:
                    return
                self.landing = None
                landing.done()
            if at == end:
                return
            if not partial and end - at >= size:
                fields = self._header.unpack_from(data, at)
                at += size
            else:
                count = min(size - len(partial), end - at)
                partial += data[at : at + count]
                at += count
                if len(partial) < size:
                    return
                fields = self._header.unpack(partial)
                partial.clear()
            self.landing = self._begin(*fields)

    def filled(self) -> None:
        """`landing.fill` was called."""
        landing = self.landing
        if landing is not None and not landing.left:
            self.landing = None
            landing.done()
