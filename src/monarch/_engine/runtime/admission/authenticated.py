"""A socket whose bytes are authenticated by the session key of the handshake.

The records are those of `protocol.session.records`. No byte is handed out before its record was
checked. So altered bytes reach neither a parser nor a program's memory.

A payload is sent from where it is. A record is received into a buffer of this socket, and copied
from there after its check, while it is in the processor's cache. (Rejected: to receive a big
payload to where it belongs, and to report it after its check. That saves a tenth of what the check
costs, and puts unchecked bytes into memory that a program has registered.)
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from monarch._engine.protocol.session.records import HEADER_SIZE, MOST, TAG_SIZE, Opener, Sealer
from monarch._engine.transport.outbox import Outbox

__all__ = ["AuthenticSocket", "ProtectedSocket"]

_SMALL = 4 << 10  # bytes that are copied: a copy costs less than a list of buffers
_ROOM = 16 << 10  # bytes received at a time, as long as records are small


class ProtectedSocket:
    """The part of a socket's interface that a reactor needs, over protected data.

    It blocks if `sock` does. One thread may read while another writes.
    """

    secured = False
    """Whether the data is encrypted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.family = sock.family
        self.fileno = sock.fileno
        self.getsockname = sock.getsockname
        self.setblocking = sock.setblocking
        self.setsockopt = sock.setsockopt
        self.settimeout = sock.settimeout
        self.shutdown = sock.shutdown

    def close(self) -> None:
        """Close the socket; drop what it has not taken yet."""
        self._sock.close()

    def send(self, data: bytes | memoryview) -> int:
        """Send what fits. After a BlockingIOError the next call must begin with the same bytes."""
        return self.sendmsg([memoryview(data)])

    def sendall(self, data: bytes) -> None:
        """Send all of `data`; for a blocking socket."""
        left = memoryview(data)
        while left:
            left = left[self.send(left) :]

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send the first of these bytes; return how many.

        After a BlockingIOError the next call must begin with the same bytes.
        """
        raise NotImplementedError


class AuthenticSocket(ProtectedSocket):
    """A socket with authenticated records; see the module.

    Args:
        sock: a connected socket, owned by this object.
        session: the session key of the handshake.
        dialer: whether this is the side that dialed.
    """

    def __init__(self, sock: socket.socket, session: bytes, *, dialer: bool) -> None:
        super().__init__(sock)
        self._sealer = Sealer(session, dialer=dialer)
        self._opener = Opener(session, dialer=dialer)
        self._leaving = Outbox()  # records that the socket has not taken yet
        self._holds = 0  # bytes of data in those records
        self._room = self._front = memoryview(bytearray(_ROOM))
        self._from = self._to = 0  # range of received, unchecked bytes
        self._size = 0  # of the next payload; 0: its header has yet to arrive
        self._at = self._end = 0  # range of checked bytes not handed out

    def close(self) -> None:
        """See `ProtectedSocket`."""
        self._leaving.clear()
        super().close()

    # -- out -------------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> int:
        """See `ProtectedSocket`."""
        size = len(data)
        if self._leaving or not 0 < size <= _SMALL:
            return self.sendmsg([memoryview(data)])
        record = self._sealer.record(data)
        try:
            sent = self._sock.send(record)
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < len(record):
            self._leaving.append(memoryview(record)[sent:])
            self._holds = size
            self._flush()
        return size

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """See `ProtectedSocket`."""
        leaving = self._leaving
        if not leaving:
            if len(buffers) == 1 and 0 < len(buffers[0]) <= _SMALL:
                return self.send(buffers[0])
            room = MOST
            parts: list[memoryview] = []
            for buffer in buffers:
                parts.append(buffer[:room])
                room -= len(parts[-1])
                if not room:
                    break
            self._holds = MOST - room
            if self._holds:
                leaving += map(memoryview, self._sealer.seal(parts))
        self._flush()
        return self._holds

    def _flush(self) -> None:
        while self._leaving:
            self._leaving.write(self._sock)

    # -- in --------------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Whether received data may be readable, for which the socket raises no event."""
        have = self._to - self._from
        return self._at < self._end or have >= HEADER_SIZE + (self._size or 1) + TAG_SIZE

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes; none when the peer has closed the connection."""
        data = bytearray(size)
        with memoryview(data) as view:
            count = self.recv_into(view)
        return bytes(data[:count])

    def recv_into(self, target: memoryview) -> int:
        """Fill `target` as far as there is data; return the size, 0 if the peer has closed.

        Ask `pending` afterwards. Raises AlteredError, an OSError.
        """
        got = self._take(target) if self._at < self._end or self._from < self._to else 0
        while not got:
            if not self._receive():
                return 0
            got = self._take(target)
        return got

    def _take(self, target: memoryview) -> int:
        """Copy out checked bytes, and check complete records; return the size."""
        got, size, room = 0, len(target), self._room
        while got < size:
            at, end = self._at, self._end
            if at == end:
                if self._from == self._to or not self._open():
                    break
                at, end = self._at, self._end
            if end - at > size - got:
                end = at + size - got
            count = end - at
            target[got : got + count] = room[at:end]
            self._at = end
            got += count
        return got

    def _open(self) -> bool:
        """Check the next record; return False if it is incomplete."""
        at = self._from
        if not self._size:
            if self._to - at < HEADER_SIZE:
                return False
            self._size = self._opener.size(self._room, at)
        begin = at + HEADER_SIZE
        end = begin + self._size
        if self._to < end + TAG_SIZE:
            return False
        self._opener.open(self._room[begin:end], self._room[end : end + TAG_SIZE])
        self._at, self._end = begin, end
        self._from = end + TAG_SIZE
        self._size = 0
        return True

    def _receive(self) -> int:
        """Receive more, when no checked bytes are left; return the size, 0 at the end."""
        have = self._to - self._from
        if not (have or self._size):  # the usual case: small records
            self._at = self._end = self._from = self._to = 0
            self._to = count = self._sock.recv_into(self._front)
            return count
        # Receive the rest of a big record and the next header only: then little has to be moved.
        needed = HEADER_SIZE + self._size + TAG_SIZE + HEADER_SIZE
        if len(self._room) < needed:
            room = memoryview(bytearray(HEADER_SIZE + MOST + TAG_SIZE + HEADER_SIZE))
            room[:have] = self._room[self._from : self._to]
            self._room = room
            self._front = room[:_ROOM]
        elif self._from:
            self._room[:have] = self._room[self._from : self._to]
        self._at = self._end = self._from = 0
        self._to = have
        count = self._sock.recv_into(self._room[have : max(needed, _ROOM)])
        self._to += count
        return count
