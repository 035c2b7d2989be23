"""A connection of the data plane: sends and receives messages without blocking.

Bytes of large transfers are sent from, and received into, the memory of users. Small messages are
gathered into one system call. Any thread may call `start`, `send` and `flush`. The sending thread
writes what the socket accepts at once, and the reactor writes the rest. All other methods run on
the reactor's thread.

Registered memory is sent under the lock of its registration, slice by slice (`Lent`), so that a
drop waits for at most one system call, which does not block. With TLS such a slice is first copied:
OpenSSL demands the same bytes again after a partial write, and by then the memory may be released.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from monarch import _spi
from monarch.rdma.routes.stream.message import Reader

__all__ = ["Connection", "Item", "Lent"]

_HEADS = 64 << 10  # bytes received at a time where headers are expected
_ROUNDS = 16  # receives before other connections have their turn
_MOST_BUFFERS = 64
_MOST_QUEUED = 4096  # items queued for a peer that does not read; then its requests wait
_BUFFER = 1 << 20  # of a socket within a host: saves wake-ups, and still fits the cache
_SEALED = 256 << 10  # bytes passed to TLS at a time


class Lent(Protocol):
    """Registered memory that is being sent, and may be revoked meanwhile."""

    lock: threading.Lock
    left: int

    def view(self) -> memoryview:
        """Return the bytes left to send, or zeros in their place. Called with `lock` held."""
        ...

    def advance(self, count: int) -> None:
        """Note that `count` bytes of it were sent."""
        ...

    def verdict(self) -> bytes:
        """Return the message that follows when all bytes were sent: whether they are valid."""
        ...


Item: TypeAlias = "bytes | memoryview | Lent"
_PLAIN = (bytes, memoryview)


class Connection:
    """A connection to one peer, see the module.

    Args:
        reactor: drives the connection.
        wire: the socket; the connection owns it.
        reader: processes what arrives.
        lost: called with the reason when the connection has closed.
        refill: returns what to send when the queue is empty.
    """

    def __init__(
        self,
        reactor: _spi.Reactor,
        wire: _spi.Wire,
        reader: Reader,
        lost: Callable[[str], None],
        refill: Callable[[], list[Item]] | None = None,
    ) -> None:
        wire.setblocking(False)
        if wire.family in (socket.AF_INET, socket.AF_INET6):
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._reactor = reactor
        self._wire = wire
        self._fd = wire.fileno()
        self._plain = wire if isinstance(wire, socket.socket) else None
        self._tls = None if isinstance(wire, socket.socket) else wire
        self._reader = reader
        self._lost = lost
        self._refill = refill
        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._sealed: bytes | memoryview = b""  # passed to TLS, and not accepted yet
        self._watched = (True, False)  # events registered with the reactor: (reads, writes)
        self._blocked = False  # whether the socket accepts no more at present
        self.over = False

    def start(self) -> None:
        """Begin to receive. Callable on any thread."""
        self._reactor.call_soon(self._start)

    def _start(self) -> None:
        if self.over:
            return
        with self._lock:
            self._reactor.register(self._fd, self._ready)
            self._watched = (True, False)
            self._watch()
        self._read()  # TLS may have decrypted bytes already

    # -- out -------------------------------------------------------------------------------------

    def queue(self, items: Iterable[Item]) -> None:
        """Queue items for the next `flush`, which on the reactor's thread is automatic."""
        self._queue.extend(items)

    def send(self, *items: Item) -> None:
        """Send items, at once as far as the socket accepts them; callable on any thread."""
        with self._lock:
            self._queue.extend(items)
            self._flush()

    def flush(self) -> None:
        """Send what is queued, as far as the socket accepts it; callable on any thread."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        queue = self._queue
        while not (self.over or self._blocked):
            if not queue and not self._sealed:
                more = self._refill() if self._refill is not None else None
                if not more:
                    break
                queue.extend(more)
            try:
                if self._plain is not None:
                    self._send_some(self._plain)
                elif self._tls is not None:
                    self._seal_some(self._tls.send)
            except (BlockingIOError, InterruptedError):
                self._blocked = True
            except OSError as error:
                self._blocked = True
                self._reactor.call_soon(self._broke, error.strerror or str(error))
                return
        self._watch()

    def _send_some(self, sock: socket.socket) -> None:
        buffers: list[bytes | memoryview] = []
        lent: Lent | None = None
        for item in self._queue:
            if not isinstance(item, _PLAIN):
                lent = item
                break
            buffers.append(item)
            if len(buffers) == _MOST_BUFFERS:
                break
        if lent is None:
            sent = sock.sendmsg(buffers)
        else:
            with lent.lock:
                buffers.append(lent.view())
                sent = sock.sendmsg(buffers)
        self._advance(sent)

    def _advance(self, sent: int) -> None:
        queue = self._queue
        while sent:
            item = queue[0]
            if isinstance(item, _PLAIN):
                if sent < len(item):
                    queue[0] = memoryview(item)[sent:]
                    return
                sent -= len(item)
                queue.popleft()
            else:
                count = min(sent, item.left)
                item.advance(count)
                sent -= count
                if not item.left:
                    queue[0] = item.verdict()

    def _seal_some(self, send: Callable[[bytes | memoryview], int]) -> None:
        if not self._sealed:
            parts: list[bytes] = []
            room = _SEALED
            while self._queue and room:
                item = self._queue[0]
                if isinstance(item, _PLAIN):
                    parts.append(bytes(item[:room]))
                else:
                    with item.lock:
                        parts.append(bytes(item.view()[:room]))
                room -= len(parts[-1])
                self._advance(len(parts[-1]))
            self._sealed = b"".join(parts)
        sent = send(self._sealed)
        self._sealed = memoryview(self._sealed)[sent:] if sent < len(self._sealed) else b""

    def _watch(self) -> None:
        wanted = (len(self._queue) < _MOST_QUEUED, self._blocked)
        if wanted != self._watched and not self.over:
            self._watched = wanted
            self._reactor.watch(self._fd, reads=wanted[0], writes=wanted[1])

    # -- in --------------------------------------------------------------------------------------

    def _ready(self, mask: int) -> None:
        if mask & _spi.WRITE:
            self._blocked = False
            self.flush()
        if mask & ~_spi.WRITE and not self.over:
            self._read()

    def _read(self) -> None:
        wire, reader = self._wire, self._reader
        scratch = self._reactor.scratch[:_HEADS]
        reason = ""
        try:
            for _ in range(_ROUNDS):
                landing = reader.landing
                if landing is not None:
                    asked = landing.left
                    count = landing.fill(wire.recv_into)
                    reader.filled()
                else:
                    asked = _HEADS
                    count = wire.recv_into(scratch)
                    reader.feed(scratch[:count])
                if not count:
                    reason = "it was closed"
                    break
                if count < asked and self._plain is not None:
                    break  # the socket is empty
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:
            reason = f"protocol error: {error}"
        if reason:
            self.close(reason)
            return
        self.flush()  # even if blocked: too many replies in the queue stop the receiving
        if self._tls is not None and not self.over and self._tls.pending():
            self._reactor.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Read what TLS has decrypted already: the socket reports no event for it."""
        if not self.over:
            self._read()

    # -- closing ---------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Close the connection and report the reason to `lost`; on the reactor's thread."""
        with self._lock:
            if self.over:
                return
            self.over = True
            self._queue.clear()
        self._reactor.unregister(self._fd)
        self._wire.close()
        self._lost(reason)

    def _broke(self, reason: str) -> None:
        """Close after a failed write, but first read the reason that the peer may have sent."""
        if not self.over:
            self._read()
            self.close(reason)

    def close_in_child(self) -> None:
        """Close the socket in a forked child: the connection is the parent's."""
        self.over = True
        self._wire.close()
