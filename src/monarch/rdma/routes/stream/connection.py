"""A connection: what one side has to say goes out, what the other says comes in, nobody blocks.

Memory is sent from where it is and received to where it belongs; what is small comes with its
neighbours in one call of the kernel. Any thread may `send` and `flush`: what the socket takes at
once is written by the thread that has it, the rest by the reactor. All else is on the reactor's
thread.

Registered memory is sent under the lock of its registration, slice by slice (`Lent`), so that a
drop has to wait for at most one call that does not block. With TLS such a slice is copied first:
OpenSSL wants to see the same bytes again when it could not send them, and they may be gone by then.
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
_ROUNDS = 16  # receives before others have their turn
_MOST_BUFFERS = 64
_MOST_QUEUED = 4096  # items that wait for a peer that asks and does not listen
_BUFFER = 1 << 20  # of a socket within a host: fewer wake-ups than by default, and in the cache
_SEALED = 256 << 10  # bytes given to TLS at a time


class Lent(Protocol):
    """Memory that may be taken away while it is on its way out."""

    lock: threading.Lock
    left: int

    def view(self) -> memoryview:
        """What is left, or something else that takes its place. Called with `lock` held."""
        ...

    def advance(self, count: int) -> None:
        """So much of it was sent."""
        ...

    def verdict(self) -> bytes:
        """All was sent: what is to be said after it."""
        ...


Item: TypeAlias = "bytes | memoryview | Lent"
_PLAIN = (bytes, memoryview)


class Connection:
    """See the module.

    Args:
        reactor: drives it.
        wire: the socket; the connection owns it.
        reader: is given what arrives.
        lost: called with the reason when the connection is over.
        refill: what to send when nothing waits any more.
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
        self._sealed: bytes | memoryview = b""  # given to TLS, and not taken yet
        self._watched = (True, False)  # what the reactor calls back for
        self._blocked = False  # the socket takes nothing now
        self.over = False

    def start(self) -> None:
        """Begin to listen. On any thread."""
        self._reactor.call_soon(self._start)

    def _start(self) -> None:
        if self.over:
            return
        with self._lock:
            self._reactor.register(self._fd, self._ready)
            self._watched = (True, False)
            self._watch()
        self._read()  # TLS may have decrypted something already

    # -- out -------------------------------------------------------------------------------------

    def queue(self, items: Iterable[Item]) -> None:
        """Have these sent with the next `flush`; on the reactor's thread, one comes by itself."""
        self._queue.extend(items)

    def send(self, *items: Item) -> None:
        """Send these, now if possible; any thread."""
        with self._lock:
            self._queue.extend(items)
            self._flush()

    def flush(self) -> None:
        """Send what there is, as far as the socket takes it; any thread."""
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
                    break  # that was all
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:
            reason = f"protocol error: {error}"
        if reason:
            self.close(reason)
            return
        if not self._blocked:
            self.flush()
        if self._tls is not None and not self.over and self._tls.pending():
            self._reactor.call_soon(self._read_on)

    def _read_on(self) -> None:
        """What TLS has decrypted, and nobody has read, makes no event."""
        if not self.over:
            self._read()

    # -- the end ---------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End it, and say so; on the reactor's thread."""
        with self._lock:
            if self.over:
                return
            self.over = True
            self._queue.clear()
        self._reactor.unregister(self._fd)
        self._wire.close()
        self._lost(reason)

    def _broke(self, reason: str) -> None:
        """Nothing can be sent any more; perhaps the peer has said why."""
        if not self.over:
            self._read()
            self.close(reason)

    def close_in_child(self) -> None:
        """In a forked child: it is the parent's."""
        self.over = True
        self._wire.close()
