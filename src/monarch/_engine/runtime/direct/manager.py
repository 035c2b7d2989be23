"""Direct connections of this process: when a link gets one, how it is made, how it ends.

`runtime.direct.link` explains what a direct connection is for, and what it carries. After `_ENOUGH`
messages on a link to another host the sender asks the peer, through the link, for a ticket
(`runtime.direct.ticket`). So only the link can lead to a connection::

    ASK        from the side that sends much
    INVITE     from the other side: connect to this address, with this key
    REFUSED    instead of INVITE, with the reason
    (the handshake, on a thread of its own)
    READY      from the inviting side, which is connected and uses the connection; the asking side
               does so too when it is connected and has this frame

If both sides ask at once, the request of the one with the greater uid is answered. After a refusal
or a failure the next attempt follows ever more messages, and after `_TRIES` attempts there is none.
A connection that broke counts as a failed attempt unless it has carried `_WORTH` bytes. Where hosts
use TLS the procs do, too; a proc that has no certificate refuses.

When a process exits, the agents report it, but its last messages may still be in flight on the
direct connection. The report is held until the connection reaches EOF, which the kernel of the
other host sends at once if it still runs. If there is no EOF, the report is held until the
connection has been idle for `_LAST_WORDS` seconds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.errors import ProtocolError
from monarch._engine.base.settings import settings
from monarch._engine.runtime.direct.link import BROKEN, REST, Direct, DirectLink, count
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.reactor import WRITE, Timer
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.transport.link import Link
from monarch._engine.transport.loan import alone_with
from monarch._engine.wire.frame import DIRECT, Frame, pack

if TYPE_CHECKING:
    from monarch._engine.runtime.admission.handshake_io import Wire
    from monarch._engine.runtime.direct.ticket import Door
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["Directs"]

# Flags of DIRECT frames, in addition to those of `runtime.direct.link`. The field `dest` holds the
# number of the connection.
ASK = 16
INVITE = 17
REFUSED = 18
READY = 19

_ENOUGH = 64  # messages that justify a connection
_LESS = 16  # factor for that number after each failed attempt
_TRIES = 4
_WORTH = 1 << 20  # bytes; a connection that carried them before it broke has paid
_MOST = 256  # connections per process
_DIAL = 3.0  # seconds for a dial
_PATIENCE = 15.0  # seconds from asking to a connection in use
_LAST_WORDS = 0.25  # seconds of silence after which a peer that exited has nothing in flight


class _Try:
    """An attempt to get a connection that this side has asked for."""

    __slots__ = ("invited", "number", "ready", "sock", "timer")

    def __init__(self, number: int, timer: Timer) -> None:
        self.number = number
        self.timer = timer
        self.invited = False
        self.sock: Wire | None = None
        self.ready = False


class Directs:
    """The direct connections of a process. Only `count` may be called from any thread."""

    def __init__(self, proc: Proc) -> None:
        self._proc = proc
        self._count = itertools.count(1)
        self._tries: dict[FrameLink, _Try] = {}
        self._failed: dict[int, int] = {}  # by peer: number of failed attempts
        self._open: dict[FrameLink, DirectLink] = {}
        self._doors: dict[tuple[str, bool], Door] = {}  # by address, and whether it has TLS
        self._asked: dict[int, list[tuple[Link, int]]] = {}  # waiting requests, by peer
        self._last_words: dict[FrameLink, Callable[[], None]] = {}
        proc.notices["way"] = self._on_way

    def count(self, link: FrameLink) -> None:
        """Count messages on this link to another host, from now on. Callable from any thread."""
        if settings.direct_connections and isinstance(link, Link):
            failed = self._failed.get(link.uid, 0)
            if failed < _TRIES:
                count(link, _ENOUGH * _LESS**failed, self._wish)

    def _wish(self, link: Link) -> None:
        self._proc.reactor.call_soon(self._ask, link)

    # -- asking ----------------------------------------------------------------------------------

    def _ask(self, link: Link) -> None:
        if link in self._tries or link in self._open or len(self._open) >= _MOST:
            return
        if link.uid in self._asked:  # the peer has asked first
            return
        number = 2 * next(self._count) + (self._proc.uid > link.uid)
        timer = self._proc.reactor.call_later(_PATIENCE, lambda: self._fail(link))
        self._tries[link] = _Try(number, timer)
        self._say(link, ASK, number)

    def _fail(self, link: FrameLink) -> None:
        """Drop a failed attempt, and count messages for the next one."""
        tried = self._tries.pop(link, None)
        if tried is None:
            return
        tried.timer.cancel()
        if tried.sock is not None:
            tried.sock.close()
        self._failed[link.uid] = self._failed.get(link.uid, 0) + 1
        if link.lost is None:
            self.count(link)

    def _on_invite(self, link: Link, frame: Frame) -> None:
        tried = self._tries.get(link)
        if tried is None or tried.number != frame.dest:
            return
        from monarch._engine.protocol.session.handshake import HandshakeError
        from monarch._engine.runtime.admission.secret import SecretError
        from monarch._engine.runtime.direct.ticket import Ticket, come  # few processes need it

        said = json.loads(frame.body)
        address, port = str(said["address"]), said["port"]
        if tried.invited or not isinstance(port, int) or not 0 < port < 1 << 16:
            raise ProtocolError(
                f"protocol error from {link.peer}: an invalid or repeated ticket for a direct "
                "connection"
            )
        tried.invited = True
        key, certificate = bytes.fromhex(said["key"]), bytes.fromhex(said["certificate"])
        ticket = Ticket(address, port, key, certificate)

        def dial() -> None:
            sock: Wire | None = None
            try:
                sock = come(ticket, _DIAL)
            except (OSError, HandshakeError, SecretError, UnicodeError):  # bad addresses, too
                sock = None  # the link stays with the tunnel
            self._proc.reactor.call_soon(self._came, link, tried, sock)

        environments.current.start_thread("monarch-dial", dial)

    def _came(self, link: Link, tried: _Try, sock: Wire | None) -> None:
        if self._tries.get(link) is not tried:
            if sock is not None:
                sock.close()
        elif sock is None:
            self._fail(link)
        else:
            tried.sock = sock
            self._meet(link, tried)

    def _on_ready(self, link: Link, frame: Frame) -> None:
        tried = self._tries.get(link)
        if tried is not None and tried.number == frame.dest:
            tried.ready = True
            self._meet(link, tried)

    def _meet(self, link: Link, tried: _Try) -> None:
        """Use the connection once both sides have connected."""
        if tried.ready and tried.sock is not None:
            del self._tries[link]
            tried.timer.cancel()
            self._begin(link, tried.sock, tried.number, first=True)

    # -- being asked -----------------------------------------------------------------------------

    def _on_ask(self, link: Link, frame: Frame) -> None:
        number = frame.dest
        if not settings.direct_connections:
            self._say(link, REFUSED, number, b"switched off by the setting direct_connections")
        elif link in self._open or len(self._open) >= _MOST:
            self._say(link, REFUSED, number, b"a direct connection is open, or too many are")
        elif link in self._tries and self._proc.uid > link.uid:
            self._say(link, REFUSED, number, b"the request of the other side comes first")
        else:
            asked = self._asked.setdefault(link.uid, [])
            asked.append((link, number))
            if len(asked) == 1:
                self._proc.tell_agent({"op": "way", "to": link.uid})

    def _on_way(self, message: dict[str, Any]) -> None:
        """Answer waiting peers: the agent has sent the address that connects the two hosts."""
        address, secured = message["here"], message["tls"]
        for link, number in self._asked.pop(message["to"], ()):
            if not address:
                self._say(link, REFUSED, number, b"the hosts are not connected by IP")
            else:
                self._invite(link, number, address, secured)

    def _invite(self, link: Link, number: int, address: str, tls: bool) -> None:
        from monarch._engine.runtime.admission.secret import SecretError
        from monarch._engine.runtime.direct.ticket import Door

        door = self._doors.get((address, tls))
        if door is None:
            door = Door(self._proc.reactor, address, tls, self._report)
            self._doors[address, tls] = door

        def arrived(sock: Wire) -> None:
            if link.lost is not None or link in self._open:
                sock.close()
            else:
                self._begin(link, sock, number, first=False)
                self._say(link, READY, number)

        try:
            _, port, key, certificate = door.invite(arrived)
        except (OSError, SecretError) as error:
            self._say(link, REFUSED, number, str(error).encode())
            return
        said = {
            "address": address,
            "port": port,
            "key": key.hex(),
            "certificate": certificate.hex(),
        }
        self._say(link, INVITE, number, json.dumps(said).encode())

    def _report(self, peer: str, certificate: str, refused: str) -> None:
        told = {"peer": peer, "certificate": certificate, "refused": refused}
        self._proc.tell_agent({"op": "data_connection", **told})

    # -- the connection --------------------------------------------------------------------------

    def _begin(self, link: Link, sock: Wire, number: int, *, first: bool) -> None:
        if link.lost is not None or link in self._open:
            sock.close()  # the other side sees that it is closed
            return
        reactor = self._proc.reactor

        def watch(fd: int, reads: bool, writes: bool) -> None:
            reactor.watch(fd, reads=reads, writes=writes)
            if reads and direct.pending():
                reactor.call_soon(self._read, owner, direct)

        direct = Direct(link, sock, number, settings.host_timeout / 2, watch)
        with alone_with(link.loan):
            owner = self._open[link] = DirectLink.of(link, direct, first=first)

        def ready(mask: int) -> None:
            if mask & WRITE:
                owner.flush_direct()
            if mask & ~WRITE:
                self._read(owner, direct)

        reactor.register(direct.fileno, ready)
        if direct.pending():
            reactor.call_soon(self._read, owner, direct)

    def _read(self, link: DirectLink, direct: Direct) -> None:
        if direct.broken:
            return
        try:
            frames = direct.receive(self._proc.reactor.scratch)
            if frames:
                self._proc.handle(link, frames)
            if direct.reader.refused is not None:
                raise direct.reader.refused
        except ProtocolError as error:
            self._end(link, direct)
            self._proc.lose(link, str(error))
            return
        if frames is None:
            self._end(link, direct)
        elif direct.pending():  # buffered data raises no event
            self._proc.reactor.call_soon(self._read, link, direct)

    def _end(self, link: DirectLink, direct: Direct) -> None:
        """Handle the end of the connection: EOF, or an error."""
        if not direct.broken:
            self._proc.reactor.unregister(direct.fileno)
            link.broke()
        then = self._last_words.pop(link, None)
        if then is not None:  # not now: it reads, and frames may be half handled
            self._proc.reactor.call_soon(then)

    def _on_broken(self, link: Link, frame: Frame) -> None:
        number = frame.dest
        if not isinstance(link, DirectLink) or link.direct.number != number:
            # This side never used that connection: nothing has to be repeated, nothing follows.
            tried = self._tries.get(link)
            if tried is not None and tried.number == number:
                self._fail(link)
            link.send(pack(DIRECT, number, 0, 0, b"", b"", BROKEN))
            link.send(pack(DIRECT, number, 0, 0, b"", b"", REST))
            return
        self._end(link, link.direct)
        link.rest_for(frame.port)
        self._leave(link)

    def _on_rest(self, link: Link, frame: Frame) -> None:
        if isinstance(link, DirectLink) and link.direct.number == frame.dest:
            self._proc.handle(link, link.rest_of(frame.body, frame.port))
            self._leave(link)

    def _leave(self, link: DirectLink) -> None:
        if link in self._open and link.direct.told and link.direct.heard:
            direct = link.direct
            link.leave()
            del self._open[link]
            if direct.position + direct.unconfirmed.end > _WORTH:
                self._failed.pop(link.uid, None)
            else:
                self._failed[link.uid] = self._failed.get(link.uid, 0) + 1
            self.count(link)

    # -- the end of the link ---------------------------------------------------------------------

    def last_words(self, link: FrameLink, then: Callable[[], None]) -> bool:
        """Whether messages from an exited peer may still be in transit.

        If so `then()` is called when they have arrived. A repeated call for the same link returns
        True as well, but its `then` is not called.
        """
        if link in self._last_words:
            return True
        owner = self._open.get(link)
        if owner is None or owner.direct.broken:
            return False
        self._last_words[link] = then
        self._await_silence(owner, owner.direct)
        return True

    def _await_silence(self, link: DirectLink, direct: Direct) -> None:
        heard = direct.received

        def look() -> None:
            if direct.broken or direct.received == heard:
                self._end(link, direct)
            else:  # much data is in transit, or this process was busy
                self._await_silence(link, direct)

        self._proc.reactor.call_later(_LAST_WORDS, look)

    def lost(self, link: FrameLink) -> None:
        """Forget a lost link after a pause: messages of a peer that exited may be in transit."""
        if link in self._open:
            self._proc.reactor.call_later(_LAST_WORDS, lambda: self.forget(link))

    def forget(self, link: FrameLink) -> None:
        """Drop everything about a link that is lost for good."""
        self._fail(link)
        self._failed.pop(link.uid, None)
        owner = self._open.pop(link, None)
        if owner is not None and not owner.direct.broken:
            self._proc.reactor.unregister(owner.direct.fileno)
            owner.direct.close()

    def close_in_child(self) -> None:
        """In a forked child, close the sockets: they belong to the parent."""
        for door in self._doors.values():
            door.close_in_child()
        for tried in self._tries.values():
            if tried.sock is not None:
                tried.sock.close()
        for owner in self._open.values():
            owner.direct.sock.close()

    # -- frames ----------------------------------------------------------------------------------

    def _say(self, link: Link, what: int, number: int, body: bytes = b"") -> None:
        link.send(pack(DIRECT, number, 0, 0, b"", body, what))

    def on_direct(self, link: FrameLink, frame: Frame) -> None:
        """Handle a frame about a direct connection."""
        handler = self._HANDLERS.get(frame.flags)
        if handler is None or not isinstance(link, Link):
            raise ProtocolError(
                f"protocol error from {link.peer}: unknown message {frame.flags} about a direct "
                "connection"
            )
        handler(self, link, frame)

    def _on_refused(self, link: Link, frame: Frame) -> None:
        tried = self._tries.get(link)
        if tried is not None and tried.number == frame.dest:
            self._fail(link)

    def on_turn(self, link: FrameLink, frame: Frame) -> None:
        """Follow the peer, which changes between tunnel and connection."""
        if not isinstance(link, DirectLink):
            raise ProtocolError(
                f"protocol error from {link.peer}: it switched to a direct connection that does "
                "not exist"
            )
        link.turned(frame.dest)

    _HANDLERS = {  # noqa: RUF012 - a table
        ASK: _on_ask,
        INVITE: _on_invite,
        REFUSED: _on_refused,
        READY: _on_ready,
        BROKEN: _on_broken,
        REST: _on_rest,
    }
