"""A link: one duplex stream of frames to one peer process, over a socket pair.

Any thread may send. The messages of one thread leave in order, and a send that the socket takes at
once never waits for another thread: the caller writes to the socket itself, under the link's lock.
The bytes that the socket does not take are queued, and the reactor writes them when there is room.
The queue is bounded: a thread that is not the reactor waits in `wait_room` until the peer has
caught up.

Descriptors travel with the first byte of their frame (SCM_RIGHTS). The stream keeps them in order,
so a frame with `nfd` descriptors takes the next `nfd` that arrived.

A link is lost once: `lost` holds the reason, and every later send returns False. A loss is detected
by EOF or by a failed write, never by a timer: on one host the kernel closes the sockets of a
process that exits.
"""

from __future__ import annotations

import array
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, ClassVar, Protocol

from monarch._engine.base.errors import ProtocolError
from monarch._engine.transport.frame_link import Waiting
from monarch._engine.transport.loan import Loan
from monarch._engine.wire.frame import MARK, Frame, FrameReader, pack

__all__ = ["CastLink", "InheritedLink", "Link", "mark"]

_INT = array.array("i").itemsize
_ANCILLARY = socket.CMSG_LEN(253 * _INT)
_MAX_IOV = 512
_MISSING = -1  # after the opened descriptors of a frame, stands for those that could not be opened
_TRUNCATED = int(socket.MSG_CTRUNC)  # an enum's `&` costs as much as a small system call
_WRITE = select.POLLOUT


class Events(Protocol):
    """The part of a reactor that serves links."""

    def register(self, fd: int, callback: Callable[[int], None]) -> None: ...
    def watch_writes(self, fd: int, on: bool) -> None: ...


def _ignore(_link: Link, _on: bool) -> None:
    """Do nothing: the owner flushes the link, or sends little."""


class Link:
    """One end of a stream of frames.

    Args:
        sock: a connected stream socket; the link owns it.
        peer: the name of the other side in errors.
        want_write: called with the link and whether bytes wait for the socket. It is called from
            any thread, under the link's lock, so calls come in the order of the changes. `serve`
            replaces it.
        frame_limit: largest frame accepted, bytes.
        queue_limit: queued bytes above which senders wait.
    """

    __slots__ = (
        "__weakref__",
        "_fds",
        "_lock",
        "_nested",
        "_owner",
        "_queue",
        "_taken",
        "_waiters",
        "born",
        "casts",
        "credit",
        "direct",
        "fileno",
        "loan",
        "lost",
        "marked",
        "owner",
        "paused",
        "peer",
        "queue_limit",
        "queued",
        "reader",
        "released",
        "sock",
        "uid",
        "used",
        "want_write",
        "wish",
    )

    cast_type: ClassVar[type[Link]]
    """The class of this link once casts reach its peer, too."""
    far_type: ClassVar[type[Link]]
    """The class of this link while messages to another host are counted (`runtime.direct`)."""
    direct_type: ClassVar[type[Link]]
    """The class of this link while it has a direct connection (`runtime.direct`)."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        want_write: Callable[[Link, bool], None] | None,
        frame_limit: int,
        queue_limit: int,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fileno = sock.fileno()
        self.peer = peer
        self.uid = 0
        self.born: tuple[int, bool] | None = None  # the peer it was made for, and whether by us
        self.owner: Any = None
        self.want_write = want_write or _ignore
        self.queue_limit = queue_limit
        self.queued = 0  # bytes waiting for the socket
        self.reader = FrameReader(frame_limit, peer)
        self.lost: str | None = None
        self.loan: Loan | None = None  # made when a thread first asks for one
        self.casts = 0  # the last cast of this process that also goes to the peer
        self.used = True  # whether something was sent since the last mark
        # The next three are for links to other hosts, see runtime.direct.link.
        self.credit = 0
        self.direct: Any = None
        self.wish: Any = None
        self.paused: dict[int, Waiting] = {}  # receivers behind this link that are full
        self.released: deque[int] = deque()  # segments of the peer that are no longer used here
        self._lock = threading.Lock()
        self._owner = 0  # the thread that holds the lock
        self._nested: list[tuple[bytes, list[int]]] = []
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._fds: deque[int] = deque()
        self._taken = 0  # bytes of the queue that the socket took
        self._waiters: list[Any] = []

    def serve(self, reactor: Events, read: Callable[[Link], object]) -> None:
        """Let `reactor` flush the link, and call `read` when bytes have arrived or it is closed."""

        def want_write(link: Link, on: bool) -> None:
            reactor.watch_writes(link.fileno, on)

        def ready(mask: int) -> None:
            if mask & _WRITE:
                self.flush()
            if mask & ~_WRITE:
                loan = self.loan
                (read if loan is None else loan.read)(self)

        self.want_write = want_write
        reactor.register(self.fileno, ready)

    # -- sending ---------------------------------------------------------------------------------

    def send(self, data: bytes, fds: list[int] | None = None) -> bool:
        """Send one or more whole frames; False if the link is lost. Does not wait.

        The kernel duplicates `fds` at the write, so the caller keeps its own. The link keeps
        duplicates while the frame is queued.
        """
        thread = get_ident()
        if self._owner == thread:
            # The garbage collector ran a finaliser that sends, in the middle of a send of this
            # thread.
            self._nested.append((data, [os.dup(fd) for fd in fds or ()]))
            return self.lost is None
        with self._lock:
            self._owner = thread
            try:
                return self._send(data, fds)
            finally:
                if self._nested:
                    self._send_nested()
                self._owner = 0

    def _send(self, data: bytes, fds: list[int] | None) -> bool:
        if self.lost is not None:
            return False
        if self._queue:
            self._enqueue(memoryview(data), fds)
            return True
        try:
            sent = self._write(data, fds) if fds else self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._lose(f"the connection to {self.peer} broke: {error.strerror}")
            return False
        if sent == len(data):
            return True
        self._enqueue(memoryview(data)[sent:], fds if not sent else None)
        self.want_write(self, True)
        return True

    def _send_nested(self) -> None:
        while self._nested:
            nested, self._nested = self._nested, []
            for data, fds in nested:
                self._send(data, fds)
                for fd in fds:
                    os.close(fd)

    def _holding(self) -> _Holding:
        """Return a context manager that holds the lock as `send` does; for rare operations."""
        return _Holding(self)

    def wait_room(self, timeout: float) -> bool:
        """Wait until the queue is below its limit or the link is lost.

        Returns False once the peer has taken no byte for `timeout` seconds; a slow peer is waited
        for. Never call it on the reactor thread, which makes the room.
        """
        taken, deadline = self._taken, time.monotonic() + timeout
        while self.queued > self.queue_limit and self.lost is None:
            waiter = self._new_waiter()
            self._waiters.append(waiter)
            if self.queued <= self.queue_limit or self.lost is not None:
                return True
            if not waiter.acquire(timeout=max(0.0, deadline - time.monotonic())):
                if self._taken == taken:
                    return False
                taken, deadline = self._taken, time.monotonic() + timeout
        return True

    def _new_waiter(self) -> Any:
        """Return a place where one thread waits for room: a lock that is held."""
        waiter = threading.Lock()
        waiter.acquire()
        return waiter

    def flush(self) -> None:
        """Write queued bytes. The reactor calls it when the socket has room."""
        with self._holding():
            while self._queue and self.lost is None:
                try:
                    data, fds = self._queue[0]
                    if fds:
                        sent = self._write(data, fds)
                    elif len(self._queue) == 1:
                        sent = self.sock.send(data)
                    else:
                        sent = self.sock.sendmsg(self._gather())
                except (BlockingIOError, InterruptedError):
                    break
                except OSError as error:
                    self._lose(f"the connection to {self.peer} broke: {error.strerror}")
                    break
                self._advance(sent)
            self._wake_waiters()
            if not self._queue and self.lost is None:
                self.want_write(self, False)

    def _wake_waiters(self) -> None:
        if self.queued <= self.queue_limit // 2 or self.lost is not None:
            while self._waiters:
                self._waiters.pop().release()

    def _gather(self) -> list[memoryview]:
        buffers: list[memoryview] = []
        for data, fds in self._queue:
            if fds or len(buffers) == _MAX_IOV:
                break
            buffers.append(data)
        return buffers

    def _advance(self, sent: int) -> None:
        self.queued -= sent
        self._taken += sent
        while sent:
            data, fds = self._queue[0]
            for fd in fds:  # the kernel sent them with the first byte
                os.close(fd)
            fds.clear()
            if sent < len(data):
                self._queue[0] = (data[sent:], fds)
                return
            sent -= len(data)
            self._queue.popleft()

    def _enqueue(self, data: memoryview, fds: list[int] | None) -> None:
        self._queue.append((data, [os.dup(fd) for fd in fds] if fds else []))
        self.queued += len(data)

    def _write(self, data: bytes | memoryview, fds: list[int]) -> int:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())
        return self.sock.sendmsg([data], [rights])

    # -- receiving, on the reactor thread --------------------------------------------------------

    def receive(self, scratch: memoryview) -> list[Frame]:
        """Read once and return the complete frames. EOF and errors set `lost`.

        Raises ProtocolError when the peer sends anything but frames; the link is lost then.
        """
        target = None if self.reader.big is None else self.reader.target()
        buffer = scratch if target is None else target
        try:
            count, ancillary, flags, _ = self.sock.recvmsg_into([buffer], _ANCILLARY, _RECV_FLAGS)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            self.lose(f"the connection to {self.peer} broke: {error.strerror}")
            return []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % _INT])
                self._fds.extend(fds)
        if flags & _TRUNCATED:  # this process may not open more descriptors
            self._fds.append(_MISSING)
        if not count:
            cut = "" if self.reader.idle else " in the middle of a message"
            self.lose(f"{self.peer} closed the connection{cut}")
            return []
        try:
            if target is None:
                return self.reader.feed(scratch[:count])
            target.release()
            return self.reader.filled(count)
        except ProtocolError as error:
            self.lose(str(error))
            raise

    def take_fds(self, count: int) -> list[int]:
        """Return the next `count` descriptors that came with frames; the caller owns them.

        Raises ProtocolError when fewer arrived than the frame claims.
        """
        taken = self.take_fds_if_any(count)
        if taken is None:
            raise ProtocolError(f"{self.peer} passed more descriptors than this process may open")
        return taken

    def take_fds_if_any(self, count: int) -> list[int] | None:
        """Do the same, or return None if this process could not open the frame's descriptors."""
        if _MISSING in itertools.islice(self._fds, count):
            while (fd := self._fds.popleft()) != _MISSING:
                os.close(fd)
            return None
        if count > len(self._fds):
            raise ProtocolError(
                f"protocol error from {self.peer}: a frame names {count} descriptors, "
                f"{len(self._fds)} arrived"
            )
        return [self._fds.popleft() for _ in range(count)]

    # -- casts -----------------------------------------------------------------------------------

    def mark(self, number: int) -> None:
        """Mark the place of the cast with this number: after everything sent so far.

        See `protocol.order_merge`. From the first call on, the link writes marks where they are
        needed.
        """
        with self._holding():
            self._join_casts()._mark(number)

    def _join_casts(self) -> CastLink:
        """Return this link, ready for casts from now on. Call it with the lock held."""
        itself: Any = self
        if not isinstance(self, CastLink):
            self.await_casts()
            self.used = True
        return itself  # type: ignore[no-any-return]

    def await_casts(self) -> None:
        """Prepare for casts; nothing was sent so far."""
        self.marked = 0
        self.used = False
        itself: Any = self
        itself.__class__ = self.cast_type

    def turn_back(self) -> None:
        """Switch the link to the tunnel before this returns, see `runtime.direct.link`."""
        with self._holding():
            self._turn_back()

    def _turn_back(self) -> None:
        """Do nothing: a link without a direct connection is always on its tunnel."""

    # -- the end ---------------------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """Give the link up: later sends return False. The socket is open until `close`."""
        with self._holding():
            self._lose(reason)

    def abandon(self, reason: str) -> None:
        """Close the link in a forked child, where the thread that held the lock does not exist."""
        self._lock = threading.Lock()
        self._owner = 0
        self._nested.clear()
        self._waiters.clear()
        self._lose(reason)
        self.sock.close()
        self.fileno = -1

    def inherit(self, connect: Callable[[Link], str]) -> None:
        """Forget the parent's connection in a forked child, as `abandon`; the link is not lost.

        Before its first message `connect(link)` is called, under the link's lock. It calls
        `reconnect`, or returns the reason why the link is lost.
        """
        self.abandon("")
        self.lost = None
        self.reader = FrameReader(self.reader.limit, self.peer)
        self.loan = self.direct = self.wish = None
        self.casts = self.credit = 0
        self.used = True
        self.paused.clear()
        self.released.clear()
        self.owner = connect
        itself: Any = self
        itself.__class__ = InheritedLink

    def reconnect(self, sock: socket.socket) -> None:
        """Take a connected socket; for a link that was inherited."""
        sock.setblocking(False)
        self.sock = sock
        self.fileno = sock.fileno()

    def close(self, reason: str) -> None:
        """Give the link up and close the socket; the reactor must no longer watch it."""
        with self._holding():
            self._lose(reason)
            if self.sock.fileno() >= 0:
                self.sock.close()

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()
        self.queued = 0
        while self._fds:
            if (fd := self._fds.popleft()) != _MISSING:
                os.close(fd)
        while self._waiters:
            self._waiters.pop().release()


class CastLink(Link):
    """A link to a proc that also receives casts of this process."""

    __slots__ = ()

    marked: int  # the last cast whose mark was sent

    def _send(self, data: bytes, fds: list[int] | None) -> bool:
        casts = self.casts
        if self.marked != casts:
            self.marked = casts
            data = mark(casts) + data
        self.used = True
        return super()._send(data, fds)

    def _mark(self, number: int) -> None:
        self._turn_back()
        if self.marked != number:  # otherwise another thread has just sent the mark
            self.marked = number
            self.used = False
            Link._send(self, mark(number), None)


Link.cast_type = CastLink


class InheritedLink(Link):
    """A link of the parent in its forked child: it gets a connection of its own at its first use.

    What holds the link, such as the handles of the parent, goes on with it.
    """

    __slots__ = ()

    def _send(self, data: bytes, fds: list[int] | None) -> bool:
        return self._connected()._send(data, fds)

    def _join_casts(self) -> CastLink:
        return self._connected()._join_casts()

    def receive(self, scratch: memoryview) -> list[Frame]:
        """Return no frames: no peer has this link yet."""
        return []

    def _connected(self) -> Link:
        itself: Any = self
        itself.__class__ = Link
        connect, self.owner = self.owner, None
        if self.lost is None and (reason := connect(itself)):
            self._lose(reason)
        return itself  # type: ignore[no-any-return]


class _Holding:
    """Hold the lock of a link; finalisers of the thread that holds it may send meanwhile."""

    __slots__ = ("_link",)

    def __init__(self, link: Link) -> None:
        self._link = link

    def __enter__(self) -> None:
        self._link._lock.acquire()
        self._link._owner = get_ident()

    def __exit__(self, *_: object) -> None:
        link = self._link
        try:
            if link._nested:
                link._send_nested()
        finally:
            link._owner = 0
            link._lock.release()


def mark(number: int) -> bytes:
    """Return the frame that marks the place of the cast with this number."""
    return pack(MARK, number, 0, 0, b"", b"")


_RECV_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
