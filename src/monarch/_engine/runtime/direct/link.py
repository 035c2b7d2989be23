"""A direct connection between procs on different hosts, in addition to the tunnel between them.

The tunnel is the link of the two procs. It passes two agents, which costs two more wake-ups in each
direction than a socket between the procs does. So a link that carries many small messages (`count`)
gets such a socket (`runtime.direct.manager` makes it), and is a `DirectLink` from then on.

Some frames always use the tunnel: payloads in shared segments, which the agents copy from memory to
memory; casts, which the agents distribute, and their answers; and probes for deadlocks, which must
not overtake answers that agents still gather. A sender changes between the two with one short frame
(`protocol.path_switch`). After a change that such a frame forced, both sides stay with the tunnel
for some messages. Otherwise a program that mixes both kinds would change twice for each such frame.

The tunnel may still carry earlier big payloads when later frames arrive on the connection. Those
frames wait for their turn. Back-pressure bounds them: above `_EARLY` bytes the receiver stops
reading, so the sender has to wait, too.

When the connection breaks, the bytes that were lost with it are sent again through the tunnel, and
callers notice nothing. When the tunnel closes, the link is lost.

All of this happens under the link's lock, except receiving, which the reactor thread does.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.errors import ProtocolError
from monarch._engine.protocol.path_switch import CONNECTION, TUNNEL, PathSwitch, Unconfirmed
from monarch._engine.transport.link import CastLink, Link
from monarch._engine.transport.outbox import Outbox
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
    from monarch._engine.runtime.admission.handshake_io import Wire

__all__ = ["BROKEN", "REST", "Direct", "DirectLink", "count"]

# Flags of DIRECT frames. The field `dest` holds the number of the connection.
CONFIRMED = 1  # sent on the connection: bytes up to position `port` have arrived
BROKEN = 2  # the connection broke; whole frames have arrived up to position `port`
REST = 3  # bytes that were lost with the connection

_OUT_OF_TURN = (DIRECT, RELEASE)  # sent by the tunnel at any time, in no order with other frames
_BY_TUNNEL = (*_OUT_OF_TURN, PROBE)
_CONFIRM = 256 << 10  # bytes received before they are confirmed
_EARLY = 4 << 20  # bytes that may arrive before their turn
_PIECE = 32 << 10  # bytes of a rest that one frame carries
_AFTER_TURN = 32  # messages that stay with the tunnel after a forced change
_NEVER = 1 << 62
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)


def count(link: Link, enough: int, wish: Callable[[Link], None]) -> None:
    """Call `wish(link)`, under its lock, when the last of `enough` messages is sent on the link.

    For a link to another host. Does nothing if the link is lost, is counted already, or has a
    direct connection.
    """
    with link._holding():
        if isinstance(link, FarLink | DirectLink) or link.lost is not None:
            return
        link.credit = enough
        link.wish = wish
        itself: Any = link._join_casts()
        itself.__class__ = link.far_type


class FarLink(CastLink):
    """A link to a proc of another host that counts messages, see `count`."""

    __slots__ = ()

    def _send(self, data: bytes, fds: list[int] | None) -> bool:
        self.credit -= 1
        if not self.credit:
            itself: Any = self
            itself.__class__ = self.cast_type
            self.wish(self)
        return CastLink._send(self, data, fds)


class DirectLink(CastLink):
    """A link with a direct connection. Its next `credit` messages use the tunnel nevertheless."""

    __slots__ = ()

    direct: Direct

    @staticmethod
    def of(link: Link, direct: Direct, *, first: bool) -> DirectLink:
        """Make `link` a DirectLink. `first`: this side changes to the connection first."""
        with link._holding():
            link.direct = direct
            link.credit = 0 if first else _NEVER
            itself: Any = link._join_casts()
            itself.__class__ = link.direct_type
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
        """Send what waits for the connection's socket; `flush` does so for the tunnel."""
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
        """Follow the peer, which has changed to `way`: this side may have to answer a cast."""
        if way == TUNNEL:
            self.turn_back()
        else:
            with self._holding():
                if not self.direct.broken:
                    self.credit = 0

    # -- closing the connection, on the reactor thread -------------------------------------------

    def broke(self) -> None:
        """Close the broken connection; report up to which position frames have arrived."""
        with self._holding():
            direct = self.direct
            if not direct.broken:
                direct.close()
                self._wake_waiters()
                position = direct.position
                Link._send(self, pack(DIRECT, direct.number, position, 0, b"", b"", BROKEN), None)

    def rest_for(self, position: int) -> None:
        """Send again what follows `position`, up to which the peer has frames; then use the tunnel.

        Raises ProtocolError for an impossible position.
        """
        with self._holding():
            direct = self.direct
            if direct.told:
                raise ProtocolError(
                    f"protocol error from {self.peer}: it reported the loss of one direct "
                    "connection twice"
                )
            self._turn_back()
            self.credit = _NEVER
            rest = direct.unconfirmed.rest(position)
            direct.discard()  # the rest contains what was queued
            size = min(_PIECE, self.reader.limit)
            for at in range(0, len(rest) or 1, size):
                piece = rest[at : at + size]
                more = len(rest) - at - len(piece)
                Link._send(self, pack(DIRECT, direct.number, more, 0, b"", piece, REST), None)
            direct.told = True
            self._wake_waiters()

    def rest_of(self, data: bytes | bytearray, more: int) -> list[Frame]:
        """Return the frames whose turn it is, of bytes that the peer sends again after a break.

        `more`: how many bytes follow in other pieces. Raises ProtocolError if the last piece does
        not end with a whole frame that changes back to the tunnel.
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
            raise ProtocolError(
                f"protocol error from {self.peer}: what it sent again after the loss of a direct "
                "connection is invalid"
            )
        direct.heard = True
        return frames

    def leave(self) -> None:
        """Make this an ordinary link to another host again, after the connection is over."""
        with self._holding():
            self.direct.close()
            itself: Any = self
            itself.__class__ = self.cast_type
            itself.direct = None

    def _lose(self, reason: str) -> None:
        self.direct.discard()
        super()._lose(reason)


Link.far_type = FarLink
Link.direct_type = DirectLink


class Direct:
    """The connection of a `DirectLink`: a socket, and what was sent on it without confirmation.

    Args:
        link: the link. Its count of queued bytes includes those of the connection, since senders
            look there.
        sock: a connected stream socket, authenticated or by TLS; owned by this object.
        number: names the connection on both sides.
        patience: seconds without acknowledgement by the other side that break the connection.
        watch: called with the descriptor, and whether to wait for reading and for writing.
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
        """Whether reading is paused, since too many bytes wait for their turn."""
        self.speaks = False
        """Whether this side sends on the connection now."""
        self.broken = False
        """Whether the socket is closed."""
        self.told = False
        """Whether this side has sent its unconfirmed bytes again, after the connection was lost."""
        self.heard = False
        """Whether all unconfirmed bytes of the peer have arrived again."""
        self.rest = bytearray()
        """The bytes that the peer has sent again so far."""
        self.turns = PathSwitch()
        self.unconfirmed = Unconfirmed()
        self._link = link
        self._watch = watch
        self.reader = FrameReader(link.reader.limit, link.peer)
        self._queue = Outbox()
        self._queued = 0
        self.received = 0
        """The number of bytes received."""
        self._confirmed = 0  # bytes of `received` that were confirmed
        self._confirms = 0  # bytes of confirmations in `received`, which positions do not count

    # -- under the link's lock -------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send whole frames without waiting; if the connection is broken keep them for the rest."""
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
        """Write queued messages as far as the socket takes them, many in one record."""
        queue = self._queue
        while queue and not self.broken:
            try:
                sent = queue.write(self.sock)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._give_up()
                return
            self._count(-sent)
            self._link._taken += sent
        if not self.broken:
            self._watch(self.fileno, not self.held, False)

    def _give_up(self) -> None:
        """Stop sending after the first error. The reactor then finds the connection broken."""
        self.discard()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def discard(self) -> None:
        """Drop what waits for the socket."""
        self._queue.clear()
        self._count(-self._queued)

    def close(self) -> None:
        """Close the socket. The reactor must not watch the socket at this point."""
        self.broken = True
        self.discard()
        self.sock.close()

    # -- on the reactor thread -------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The position up to which whole frames have arrived."""
        return self.received - self._confirms - self.reader.kept

    def pending(self) -> bool:
        """Whether there is buffered data, for which the socket raises no event."""
        return self._ahead is not None and not (self.broken or self.held) and self._ahead.pending()

    def receive(self, scratch: memoryview) -> list[Frame] | None:
        """Read once; return the frames whose turn it is, or None when the connection is over.

        Raises ProtocolError when the peer sends invalid frames. If valid frames precede them, those
        are returned, and the error is in `reader.refused`.
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
        """Stop or resume reading, so that a sender that is too far ahead has to wait."""
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
