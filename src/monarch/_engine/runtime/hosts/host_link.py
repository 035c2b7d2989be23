"""The link to the agent of another host: a channel, over a sequence of connections.

The channel (`protocol.session.channel`) decides what is sent next, what is repeated after a break,
when to dial, and when to give up. The host link moves bytes between the channel and a socket, on
the agent's reactor. It gathers packets when the socket takes some, a little at a time, so that
urgent packets overtake queued ones. Payloads are written from where they are, and read to where
they belong.

Which side dials is decided when the hosts are introduced. A dial, with its handshake, blocks a
thread of its own, and ends with `adopt` or `failed`. The side that is dialed does not give up a
connection for another one before the dialer sends on the latter (`offer`): a dialer that has tried
several connections uses one and closes the others, in any order.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from monarch._engine.protocol.session.channel import (
    Acknowledged,
    Channel,
    Connected,
    Deliver,
    Dial,
    Effect,
    Ended,
    Heartbeat,
    Room,
)
from monarch._engine.protocol.session.records import AlteredError
from monarch._engine.protocol.session.stream import PacketStream
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.alarm import Alarm
from monarch._engine.runtime.io.reactor import WRITE, Reactor
from monarch._engine.transport.outbox import Outbox
from monarch._engine.wire.packet import HEADER_SIZE

if TYPE_CHECKING:
    from monarch._engine.runtime.admission.handshake_io import Wire
    from monarch._engine.wire.packet import Buffer

__all__ = ["HostLink", "Receiver"]

_GATHER = 512 << 10  # bytes handed to the socket at a time
_SMALL = 16 << 10
_TURN = 1 << 20  # bytes after which other events of the reactor get their turn
_UNSENT = 512 << 10  # bytes that may wait in the kernel to be sent: nothing overtakes them
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_JITTER = 1 << 20
_T = TypeVar("_T")


def _few(buffers: list[Buffer]) -> list[memoryview]:
    """Return these bytes in few buffers: joining small ones costs less than a list of them."""
    if len(buffers) > 1 and sum(map(len, buffers)) <= _SMALL:
        return [memoryview(b"".join(buffers))]
    return [memoryview(buffer) for buffer in buffers if len(buffer)]


class Receiver:
    """Callbacks of a host link for its owner. They are called on the reactor thread."""

    def delivered(self, lane: int, data: bytes | bytearray | memoryview) -> None:
        """Handle a message that arrived on a lane."""
        raise NotImplementedError

    def room(self, lane: int) -> None:
        """Resume sending: a lane that was full takes messages again."""
        raise NotImplementedError

    def connected(self, *, again: bool) -> None:
        """React to a connection that the peer has answered on: the first one, or `again`."""

    def heard(self) -> None:
        """Note that bytes arrived, of any kind."""

    def altered(self) -> None:
        """Note that the connection is closed because bytes were altered in transit."""

    def heartbeat(self, payload: bytes) -> None:
        """Handle a heartbeat of the peer."""

    def dial(self) -> None:
        """Open a connection. Ends with `HostLink.adopt` or `HostLink.failed`."""

    def ended(self, reason: str, *, farewell: bool) -> None:
        """React to the end of the session; `farewell`: see `Channel.end`."""


class HostLink:
    """The link to another host's agent; see the module.

    Args:
        reactor: the agent's reactor; everything here happens on its thread.
        peer: the name of the other side in errors.
        receiver: gets what arrives, and the events of the link.
        channel: the session.
    """

    def __init__(self, reactor: Reactor, peer: str, receiver: Receiver, channel: Channel) -> None:
        self._reactor = reactor
        self._peer = peer
        self._receiver = receiver
        self._channel = channel
        self._stream: PacketStream | None = None
        self._sock: Wire | None = None
        self._fd = -1
        self._offered: dict[int, Wire] = {}  # by descriptor: connections that may be used next
        self._out = Outbox()  # gathered, but not taken by the socket yet
        self._waits = False  # whether writing has to wait for the socket
        self._watches = False  # whether the reactor watches for that, beyond one write
        self._alarm = Alarm(reactor.call_at, self._tick)
        self._flushing = False

    # -- for the owner ---------------------------------------------------------------------------

    def send(
        self, lane: int, buffers: Sequence[Buffer], token: Callable[[], None] | None = None
    ) -> bool:
        """Queue a message; return False when its lane is now full.

        `token()` is called once the message is acknowledged. After the end of the session, which
        `Receiver.ended` reports, messages are dropped.
        """
        if self._channel.ended is not None:
            return True
        room = self._channel.send(lane, buffers, token)
        self._soon()
        return room

    def heartbeat(self, payload: bytes) -> None:
        """Send a heartbeat ahead of everything that is queued."""
        self._channel.heartbeat(payload)
        self._pump()

    def pause(self, lane: int) -> None:
        """Ask the peer to hold back messages of this lane."""
        if self._channel.ended is None:
            self._channel.pause(lane)
            self._soon()

    def resume(self, lane: int) -> None:
        """Ask the peer to send the messages of this lane again."""
        if self._channel.ended is None:
            self._channel.resume(lane)
            self._soon()

    def end(self, reason: str, *, farewell: bool = False) -> None:
        """End the session, and send the reason to the peer; see `Channel.end`."""
        effects = self._channel.end(reason, farewell=farewell)
        self._pump()
        self._perform(effects)

    @property
    def up(self) -> bool:
        """Whether there is a connection that the peer has answered on."""
        return self._channel.up

    @property
    def connected(self) -> bool:
        """Whether there is a connection at all."""
        return self._sock is not None

    @property
    def here(self) -> tuple[str, bool]:
        """The IP address of this side of the connection, and whether the connection uses TLS.

        The address is empty if there is no connection, or one within a machine, without IP.
        """
        sock = self._sock
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return "", False
        address: str = sock.getsockname()[0]
        secured = not isinstance(sock, socket.socket) and sock.secured
        return address.removeprefix("::ffff:"), secured

    def start(self) -> None:
        """Start the channel, which may ask for a dial at once."""
        self._perform(self._channel.tick(environments.current.now()))
        self._alarm.set(self._channel.deadline)

    # -- connections -----------------------------------------------------------------------------

    def adopt(self, sock: Wire, begun: bytes = b"") -> None:
        """Use this authenticated connection from now on; `begun`: what was received on it."""
        if self._channel.ended is not None:
            sock.close()
            return
        self._close()
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _NOTSENT_LOWAT is not None:
                sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT)
        self._sock = sock
        self._fd = sock.fileno()
        self._stream = PacketStream(self._channel, self._peer)
        self._channel.opened(environments.current.now())
        self._reactor.register(self._fd, self._ready)
        if begun:
            self._take(self._stream.feed, memoryview(begun))
        self._pump()
        if not isinstance(sock, socket.socket):
            self._reactor.call_soon(self._read_on, sock)

    def offer(self, sock: Wire) -> None:
        """Use this authenticated connection of the dialer, as soon as the dialer sends on it."""
        if self._sock is None or self._channel.ended is not None:
            self.adopt(sock)
            return
        sock.setblocking(False)
        fd = sock.fileno()
        self._offered[fd] = sock
        self._reactor.register(fd, functools.partial(self._consider, sock))
        if not isinstance(sock, socket.socket):
            self._reactor.call_soon(self._consider, sock)

    def _consider(self, sock: Wire, _mask: int = 0) -> None:
        if self._offered.get(sock.fileno()) is not sock:
            return
        scratch = self._reactor.scratch
        try:
            count = sock.recv_into(scratch[:HEADER_SIZE])
        except (BlockingIOError, InterruptedError):
            return
        except AlteredError:
            self._receiver.altered()
            count = 0
        except OSError:
            count = 0
        self._withdraw(sock)
        if count:
            self.adopt(sock, bytes(scratch[:count]))
        else:
            sock.close()

    def _withdraw(self, sock: Wire) -> None:
        fd = sock.fileno()
        self._reactor.unregister(fd)
        del self._offered[fd]

    def failed(self) -> None:
        """Handle a failed dial."""
        self._lost()

    def _lost(self) -> None:
        self._close()
        jitter = environments.current.chance(_JITTER) / _JITTER
        self._channel.lost(environments.current.now(), jitter)
        self._alarm.set(self._channel.deadline)

    def _close(self) -> None:
        if self._sock is not None:
            self._reactor.unregister(self._fd)
            self._sock.close()
            self._sock = None
            self._stream = None
            self._out.clear()
            self._waits = self._watches = False

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._waits = False
            self._pump()
            if not self._waits and self._sock is not None:
                self._watch(False)
        if mask & ~WRITE and self._sock is not None:
            self._read()

    def _read(self) -> None:
        sock, stream = self._sock, self._stream
        assert sock is not None
        assert stream is not None
        target = stream.target()
        scratch = self._reactor.scratch
        try:
            count = sock.recv_into(scratch[: stream.wanted] if target is None else target)
        except (BlockingIOError, InterruptedError):
            return
        except AlteredError:
            self._receiver.altered()
            count = 0
        except OSError:
            count = 0
        if not count:
            self._lost()
            return
        if target is None:
            self._take(stream.feed, scratch[:count])
        else:
            target.release()
            self._take(stream.filled, count)
        self._pump()
        if self._sock is sock and not isinstance(sock, socket.socket) and sock.pending():
            self._reactor.call_soon(self._read_on, sock)

    def _take(self, accept: Callable[[_T, float], list[Effect]], received: _T) -> None:
        self._receiver.heard()
        self._perform(accept(received, environments.current.now()))

    def _read_on(self, sock: Wire) -> None:
        """Read what has been received already, which raises no event."""
        if self._sock is sock:
            self._read()

    # -- bytes out -------------------------------------------------------------------------------

    def _soon(self) -> None:
        """Write after the present event is handled, so that its packets share one write."""
        if not self._flushing:
            self._flushing = True
            self._reactor.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._pump()

    def _pump(self) -> None:
        """Write what is queued, until the socket is full or other events need their turn."""
        now = environments.current.now()
        out = self._out
        left = _TURN
        while self._sock is not None and self._stream is not None and not self._waits:
            if not out:
                out += _few(self._stream.gather(now, _GATHER))
                if not out:
                    break
            try:
                sent = out.write(self._sock)
            except (BlockingIOError, InterruptedError):
                self._waits = True
                self._watch(True)
                break
            except OSError:
                self._lost()
                break
            if not out and self._stream.dry:
                break
            left -= sent
            if left <= 0:  # a peer that takes bytes as fast as they come would keep this loop going
                self._waits = True
                self._watch(True)
        self._alarm.set(self._channel.deadline)

    def _watch(self, on: bool) -> None:
        if on is not self._watches:
            self._watches = on
            self._reactor.watch_writes(self._fd, on)

    # -- what the channel decides ----------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        rest = iter(effects)
        for effect in rest:
            try:
                if isinstance(effect, Deliver):
                    self._receiver.delivered(effect.lane, effect.data)
                elif isinstance(effect, Acknowledged):
                    for token in effect.tokens:
                        done: Any = token
                        done()
                elif isinstance(effect, Room):
                    self._receiver.room(effect.lane)
                elif isinstance(effect, Heartbeat):
                    self._receiver.heartbeat(effect.payload)
                elif isinstance(effect, Dial):
                    self._receiver.dial()
                elif isinstance(effect, Connected):
                    self._receiver.connected(again=effect.again)
                else:
                    assert isinstance(effect, Ended)
                    self._over(effect)
            except Exception:
                self._perform(list(rest))  # the channel does not repeat them
                raise

    def _over(self, end: Ended) -> None:
        self._pump()  # sends the channel's last packet
        self._close()
        for sock in list(self._offered.values()):
            self._withdraw(sock)
            sock.close()
        for token in end.lost:
            done: Any = token
            done()
        self._receiver.ended(end.reason, farewell=end.farewell)

    def _tick(self) -> None:
        self._perform(self._channel.tick(environments.current.now()))
        self._pump()
