"""A direct connection of two procs on different hosts, beside the tunnel that is their link.

The tunnel passes two agents on its way, which is two wake-ups more in each direction than a socket
between the procs needs. So a link that is used much for small messages (`count`) gets such a socket
(`runtime.directs` makes it) and is a `DirectLink` from then on. By the tunnel go, as ever: payloads
in shared segments, which the agents carry from memory to memory; casts, which the agents
distribute, and what answers them; and probes for deadlocks, which must not overtake answers that
agents still gather. A change of the way is one short frame (`protocol.turns`). After one that was
forced the link stays with the tunnel for some messages, and so does its peer: a program that mixes
both would else change twice for each.

What comes by the connection while the tunnel still carries big payloads from before waits for its
turn. It is not to pile up: above `_EARLY` nothing is read, and the sender waits, too.

The tunnel is the link, the connection a convenience. When it breaks, what was lost with it follows
through the tunnel, and nobody notices; when the tunnel ends, the link is lost.

All of this happens under the link's lock, except receiving, which is the reactor's.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from monarch._engine.base.errors import ProtocolError
from monarch._engine.protocol.turns import CONNECTION, TUNNEL, Turns, Unconfirmed
from monarch._engine.transport.link import CastLink, Link
from monarch._engine.wire.frame import (
    DIRECT,
    HEADER,
    PROBE,
    RELEASE,
    TURN,
    Frame,
    FrameReader,
    pack,
)

if TYPE_CHECKING:
    from monarch._engine.runtime.greeting import Wire

__all__ = ["BROKEN", "REST", "Direct", "DirectLink", "count"]

# Flags of DIRECT frames; `dest` names the connection.
CONFIRMED = 1  # on the connection itself: as much as `port` says has arrived
BROKEN = 2  # it is; whole frames have arrived up to position `port`
REST = 3  # what was lost with it

_OUT_OF_TURN = (DIRECT, RELEASE)  # by the tunnel, whatever was sent before
_BY_TUNNEL = (*_OUT_OF_TURN, PROBE)
_CONFIRM = 256 << 10  # bytes after which they are confirmed
_EARLY = 4 << 20  # bytes that may come before their turn
_PIECE = 32 << 10  # bytes of what was lost, in a frame
_AFTER_TURN = 32  # messages that stay with the tunnel after one that had to go there
_NEVER = 1 << 62
_MOST_BUFFERS = 64  # given to the socket at a time
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)


def count(link: Link, enough: int, wish: Callable[[Link], None]) -> None:
    """Call `wish(link)`, under its lock, with the last of `enough` messages that are sent on it.

    For a link to another host. Does nothing while that is counted already.
    """
    with link._holding():
        if isinstance(link, FarLink | DirectLink) or link.lost is not None:
            return
        link.credit = enough
        link.wish = wish
        itself: Any = link._join_casts()
        itself.__class__ = FarLink


class FarLink(CastLink):
    """A link to a proc of another host, whose messages are counted."""

    __slots__ = ()

    def _send(self, data: bytes, fds: list[int] | None) -> bool:
        self.credit -= 1
        if not self.credit:
            itself: Any = self
            itself.__class__ = CastLink
            self.wish(self)
        return CastLink._send(self, data, fds)


class DirectLink(CastLink):
    """A link with a direct connection. The next `credit` messages go by the tunnel all the same."""

    __slots__ = ()

    direct: Direct

    @classmethod
    def of(cls, link: Link, direct: Direct, *, first: bool) -> DirectLink:
        """This link, from now on; `first`: the one who turns to the connection before its peer."""
        with link._holding():
            link.direct = direct
            link.credit = 0 if first else _NEVER
            itself: Any = link._join_casts()
            itself.__class__ = cls
            return itself  # type: ignore[no-any-return]

    # -- sending ---------------------------------------------------------------------------------

    def _send(self, data: bytes, fds: list[int] | None) -> bool:
        if self.lost is not None:
            return False
        direct = self.direct
        if fds or data[4] in _BY_TUNNEL:
            if data[4] in _OUT_OF_TURN:
                return Link._send(self, data, fds)
            self._turn_back()
        elif direct.speaks:
            direct.send(data)
            return True
        elif self.credit:
            self.credit -= 1
        else:
            super()._send(pack(TURN, CONNECTION, 0, 0, b"", b""), None)
            direct.speaks = True
            direct.send(data)
            return True
        return super()._send(data, fds)

    def _turn_back(self) -> None:
        direct = self.direct
        if direct.speaks:
            direct.send(pack(TURN, TUNNEL, 0, 0, b"", b""))
            direct.speaks = False
            self.credit = max(self.credit, _AFTER_TURN)

    def flush_direct(self) -> None:
        """`flush` for the connection."""
        with self._holding():
            self.direct.flush()
            self._wake_waiters()

    # -- receiving, on the reactor thread --------------------------------------------------------

    def receive(self, scratch: memoryview) -> list[Frame]:
        direct = self.direct
        frames = direct.turns.came(TUNNEL, super().receive(scratch))
        if direct.held:
            direct.pace()
        return frames

    def turned(self, way: int) -> None:
        """The peer has turned to `way`, and so does this side: it may have to answer a cast."""
        if way == TUNNEL:
            self.turn_back()
        else:
            with self._holding():
                if not self.direct.broken:
                    self.credit = 0

    # -- the end of the connection, on the reactor thread ----------------------------------------

    def broke(self) -> None:
        """It is broken: say so, and where."""
        with self._holding():
            direct = self.direct
            if not direct.broken:
                direct.close()
                self._wake_waiters()
                position = direct.position
                Link._send(self, pack(DIRECT, direct.number, position, 0, b"", b"", BROKEN), None)

    def rest_for(self, position: int) -> None:
        """The peer has whole frames up to `position`: it gets the rest, and then the tunnel alone.

        Raises ProtocolError for a position that cannot be.
        """
        with self._holding():
            direct = self.direct
            if direct.told:
                raise ProtocolError(f"protocol error from {self.peer}: it broke before")
            self._turn_back()
            self.credit = _NEVER
            rest = direct.unconfirmed.rest(position)
            direct.discard()  # what waited is in there
            size = min(_PIECE, self.reader.limit)
            for at in range(0, len(rest) or 1, size):
                piece = rest[at : at + size]
                more = len(rest) - at - len(piece)
                Link._send(self, pack(DIRECT, direct.number, more, 0, b"", piece, REST), None)
            direct.told = True
            self._wake_waiters()

    def rest_of(self, data: bytes | bytearray, more: int) -> list[Frame]:
        """What the peer has sent on the connection and did not arrive: the frames whose turn it is.

        `more`: how many bytes of it follow, in other pieces. Raises ProtocolError if the last one
        is not the end.
        """
        direct = self.direct
        direct.rest += data
        if more and not direct.heard:
            return []
        reader = FrameReader(self.reader.limit, self.peer)
        frames = reader.feed(memoryview(direct.rest))
        frames = direct.turns.came(CONNECTION, frames)
        whole = reader.idle and reader.refused is None and direct.turns.idle
        if direct.heard or not whole or any(frame.kind == DIRECT for frame in frames):
            raise ProtocolError(f"protocol error from {self.peer}: not what was lost")
        direct.heard = True
        return frames

    def leave(self) -> None:
        """The connection is over: the link is one like others to other hosts."""
        with self._holding():
            self.direct.close()
            itself: Any = self
            itself.__class__ = CastLink
            itself.direct = None

    def _lose(self, reason: str) -> None:
        self.direct.discard()
        super()._lose(reason)


class Direct:
    """The connection.

    Args:
        link: it belongs to; it is told how many bytes wait, as senders look there.
        sock: a connected stream socket, authenticated or by TLS; this owns it.
        number: names it to both sides.
        patience: seconds after which what the other side does not acknowledge breaks it.
        watch: called with the descriptor, and whether to read and to write as soon as that can be.
    """

    __slots__ = (
        "_ahead",
        "_confirmed",
        "_confirms",
        "_link",
        "_queue",
        "_queued",
        "_watch",
        "broken",
        "fileno",
        "heard",
        "held",
        "number",
        "reader",
        "received",
        "rest",
        "sock",
        "speaks",
        "told",
        "turns",
        "unconfirmed",
    )

    def __init__(
        self,
        link: Link,
        sock: Wire,
        number: int,
        patience: float,
        watch: Callable[[int, bool, bool], None],
    ) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _USER_TIMEOUT is not None:
                sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, max(1, round(patience * 1000)))
        self.sock = sock
        self._ahead = None if isinstance(sock, socket.socket) else sock
        self.fileno = sock.fileno()
        self.number = number
        self.held = False
        """Whether nothing is read, since too much that was waits for its turn."""
        self.speaks = False
        """Whether this side sends on it now."""
        self.broken = False
        """Whether the socket is closed."""
        self.told = False
        """Whether the peer was sent the rest of what was sent on it, after a break."""
        self.heard = False
        """Whether the peer's rest has come."""
        self.rest = bytearray()
        """What has come of it."""
        self.turns = Turns()
        self.unconfirmed = Unconfirmed()
        self._link = link
        self._watch = watch
        self.reader = FrameReader(link.reader.limit, link.peer)
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self.received = 0
        """Bytes."""
        self._confirmed = 0  # of them
        self._confirms = 0  # bytes of the confirmations among them, which are not counted

    # -- under the link's lock -------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send whole frames, or keep them for the other way if it is broken. Does not wait."""
        self.unconfirmed.add(data)
        if self.broken:
            self._count(len(data))
        else:
            self._put(data)

    def _put(self, data: bytes) -> None:
        sent = 0
        if not self._queue:
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._give_up()
                return
            if sent == len(data):
                return
            self._watch(self.fileno, not self.held, True)
        self._queue.append(memoryview(data)[sent:])
        self._count(len(data) - sent)

    def _count(self, more: int) -> None:
        self._queued += more
        self._link.queued += more

    def flush(self) -> None:
        """Write what waits for the socket, as far as it takes it: many messages in one record."""
        queue = self._queue
        while queue and not self.broken:
            try:
                sent = self.sock.sendmsg([*islice(queue, _MOST_BUFFERS)])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._give_up()
                return
            self._count(-sent)
            self._link._taken += sent
            while queue and sent >= len(queue[0]):
                sent -= len(queue.popleft())
            if sent:
                queue[0] = queue[0][sent:]
        if not self.broken:
            self._watch(self.fileno, not self.held, False)

    def _give_up(self) -> None:
        """It failed once: nothing may follow. The reactor finds it broken."""
        self.discard()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def discard(self) -> None:
        """Nothing that waits is sent any more."""
        self._queue.clear()
        self._count(-self._queued)

    def close(self) -> None:
        """Close the socket, which no reactor watches any more."""
        self.broken = True
        self.discard()
        self.sock.close()

    # -- on the reactor thread -------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Up to where whole frames have arrived."""
        return self.received - self._confirms - self.reader.kept

    def pending(self) -> bool:
        """Whether there is something to receive that makes no event."""
        return self._ahead is not None and not (self.broken or self.held) and self._ahead.pending()

    def receive(self, scratch: memoryview) -> list[Frame] | None:
        """Read what is there, once; the frames whose turn it is. None: it is at its end.

        Raises ProtocolError when the peer sends something else than frames; after some, it is in
        `reader.refused`.
        """
        reader = self.reader
        target = reader.target()
        try:
            count = self.sock.recv_into(scratch if target is None else target)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        finally:
            if target is not None:
                target.release()
        if not count:
            return None
        self.received += count
        frames = reader.feed(scratch[:count]) if target is None else reader.filled(count)
        ready: list[Frame] = []
        for frame in self.turns.came(CONNECTION, frames):
            if frame.kind == DIRECT:
                self._confirms += HEADER.size
                with self._link._holding():
                    self.unconfirmed.confirmed(frame.port)
            else:
                ready.append(frame)
        if self.received - self._confirmed >= _CONFIRM:
            self._confirm()
        self.pace()
        return ready

    def pace(self) -> None:
        """Read on, or do not: so whoever sends what is too early has to wait."""
        held = self.turns.early[CONNECTION] > _EARLY
        if held != self.held:
            with self._link._holding():
                self.held = held
                if not self.broken:
                    self._watch(self.fileno, not held, bool(self._queue))

    def _confirm(self) -> None:
        self._confirmed = self.received
        with self._link._holding():
            if not self.broken and self._link.lost is None:
                self._put(pack(DIRECT, self.number, self.position, 0, b"", b"", CONFIRMED))
