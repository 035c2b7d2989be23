"""The format of messages on a connection of the data plane.

The initiator sends requests; the owner replies in whatever order it is ready. A request has 64
bytes, all little-endian. The bytes to be written follow the request if it is a WRITE::

    0   4  id         of the request; its replies repeat it
    4   2  operation
    6   2  -
    8   8  number     of the registration
   16  16  token      of the registration
   32   8  offset     within the registered memory
   40   8  length     bytes to read or to write
   48   8  first      operand of an atomic operation
   56   8  second     operand

READ, WRITE, ADD and SWAP are those of `transfer.Op`. The other operations manage connections:

* HELLO comes first: `token` is the identity of the owner that the initiator expects, `number` the
  ticket that it follows (0: none), `offset` the magic number, `length` the version.
* INVITE requests a connect ticket for a direct connection. The reply is JSON.
* RECALL requests that connection `number` be closed, if it is open. After the reply no byte that
  was sent on that connection is written, and its unanswered requests may be sent again.

A reply has 16 bytes, and `length` bytes that follow::

    0   4  id
    4   2  kind
    6   2  status     0: success; otherwise the text of the END has the reason
    8   8  length

* DATA: requested bytes follow. They are valid only if the END that comes later reports success.
* VALUE: bytes follow, they are valid, and the request is complete.
* END: the request is complete. A text follows. An END with id 0 concerns the connection, which the
  owner then closes.

The reply to a READ is one DATA of the requested length and an END; or a VALUE; or only an END, with
the reason for the failure.
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
GONE = 4  # RdmaOwnerLost: the process is not the owner that the initiator expects

CHUNK_LIMIT = 64 << 20
"""The most bytes that one request may ask for, or carry."""

TEXT_LIMIT = 4096
"""The most bytes in the text of an END, and of a ticket."""


def hello(identity: bytes, number: int = 0) -> bytes:
    """Return the HELLO, which is the first request on a connection."""
    return REQUEST.pack(0, HELLO, 0, number, identity, MAGIC, VERSION, 0, 0)


class Landing(Protocol):
    """The destination of the bytes that follow a header."""

    left: int
    """The number of bytes that are yet to arrive."""

    def put(self, data: memoryview) -> None:
        """Take these bytes, which are at most `left`."""
        ...

    def fill(self, receive: Callable[[memoryview], int]) -> int:
        """Have `receive` put at most `left` bytes in their place; return how many it received."""
        ...

    def done(self) -> None:
        """Note that all bytes have arrived."""
        ...


class Reader:
    """Splits a stream into messages, whatever the sizes of the pieces in which it arrives.

    Args:
        header: the header of every message.
        begin: called with the fields of each header. It returns the destination of the bytes that
            follow, or None if none follow. Raises ValueError for an invalid header.

    A receiver passes what is in its scratch buffer to `feed`. When `landing` is set, it may instead
    receive the next bytes directly into their destination: by `landing.fill`, then `filled`.
    """

    __slots__ = ("_begin", "_header", "_partial", "landing")

    def __init__(self, header: struct.Struct, begin: Callable[..., Landing | None]) -> None:
        self._header = header
        self._begin = begin
        self._partial = bytearray()
        self.landing: Landing | None = None

    def feed(self, data: memoryview) -> None:
        """Process all of `data`."""
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
        """Note that `landing.fill` was called."""
        landing = self.landing
        if landing is not None and not landing.left:
            self.landing = None
            landing.done()
