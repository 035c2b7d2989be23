"""The link to the agent of another host: a channel, over one connection after the other.

The decisions are the channel's (`protocol.channel`): what goes next, what is sent again after a
break, when to dial, when to give up. This moves bytes between it and a socket, on the agent's
reactor: packets are gathered when the socket takes some, a little at a time, so that what is urgent
overtakes what is queued; payloads are written from where they are and read to where they belong.

Who dials is decided when the hosts are introduced; a dial, with its handshake, is a blocking
affair on a thread of its own, which ends with `adopt` or `failed`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch._engine.protocol.channel import (
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
from monarch._engine.protocol.records import AlteredError
from monarch._engine.protocol.stream import PacketStream
from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.reactor import WRITE, Reactor, Timer

if TYPE_CHECKING:
    from monarch._engine.runtime.greeting import Wire
    from monarch._engine.wire.packet import Buffer

__all__ = ["HostLink", "Receiver"]

_GATHER = 512 << 10  # bytes handed to the socket at a time
_MOST_BUFFERS = 512
_SMALL = 16 << 10
_TURN = 1 << 20  # bytes after which whatever else has happened gets its turn
_UNSENT = 512 << 10  # bytes that wait in the kernel to be sent: nothing overtakes them
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_JITTER = 1 << 20


def _few(buffers: list[Buffer]) -> list[memoryview]:
    """These bytes in few buffers: small ones are joined, which costs less than a list of them."""
    if len(buffers) > 1 and sum(map(len, buffers)) <= _SMALL:
        return [memoryview(b"".join(buffers))]
    return [memoryview(buffer) for buffer in buffers if len(buffer)]


class Receiver:
    """What happens on a host link, for whoever drives one. Called on the reactor thread."""

    def delivered(self, lane: int, data: bytes | bytearray | memoryview) -> None:
        """A message arrived."""
        raise NotImplementedError

    def room(self, lane: int) -> None:
        """A lane that was full takes messages again."""
        raise NotImplementedError

    def connected(self, *, again: bool) -> None:
        """The session is up: for the first time, or again."""

    def heard(self) -> None:
        """Bytes arrived, of whatever."""

    def altered(self) -> None:
        """The connection is given up, since bytes were altered on it."""

    def heartbeat(self, payload: bytes) -> None:
        """The peer sent a heartbeat."""

    def dial(self) -> None:
        """Open a connection; it ends with `HostLink.adopt` or `HostLink.failed`."""

    def ended(self, reason: str) -> None:
        """The session is over."""


class HostLink:
    """See the module.

    Args:
        reactor: of the agent; everything here happens on its thread.
        peer: what errors call the other side.
        receiver: is told what happens.
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
        self._out: list[memoryview] = []  # gathered, and not taken by the socket yet
        self._waits = False  # for the socket to take more
        self._watches = False  # for that, for longer: a busy socket is full again at once
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._flushing = False

    # -- for whoever has something to say --------------------------------------------------------

    def send(
        self, lane: int, buffers: Sequence[Buffer], token: Callable[[], None] | None = None
    ) -> bool:
        """Queue a message; False when its lane is full now. `token()` once it is acknowledged.

        Nothing happens when the session is over: `Receiver.ended` has said so.
        """
        if self._channel.ended is not None:
            return True
        room = self._channel.send(lane, buffers, token)
        self._soon()
        return room

    def heartbeat(self, payload: bytes) -> None:
        """Send a heartbeat before all else."""
        self._channel.heartbeat(payload)
        self._pump()

    def pause(self, lane: int) -> None:
        """Ask the peer to hold back messages of this lane."""
        if self._channel.ended is None:
            self._channel.pause(lane)
            self._soon()

    def resume(self, lane: int) -> None:
        """The opposite of `pause`."""
        if self._channel.ended is None:
            self._channel.resume(lane)
            self._soon()

    def end(self, reason: str) -> None:
        """End the session, and tell the peer why."""
        effects = self._channel.end(reason)
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
        """The IP address that the connection has on this side, and whether it is by TLS.

        No address if there is no connection, or one within a machine that has none.
        """
        sock = self._sock
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return "", False
        address: str = sock.getsockname()[0]
        secured = not isinstance(sock, socket.socket) and sock.secured
        return address.removeprefix("::ffff:"), secured

    def start(self) -> None:
        """Begin: a channel that dials says so."""
        self._perform(self._channel.tick(drivers.current.now()))
        self._set_timer()

    # -- connections -----------------------------------------------------------------------------

    def adopt(self, sock: Wire) -> None:
        """Use this authenticated connection from now on."""
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
        self._channel.opened(drivers.current.now())
        self._reactor.register(self._fd, self._ready)
        self._pump()
        if not isinstance(sock, socket.socket):
            self._reactor.call_soon(self._read_on, sock)

    def failed(self) -> None:
        """A dial led to nothing."""
        self._lost()

    def _lost(self) -> None:
        self._close()
        jitter = drivers.current.chance(_JITTER) / _JITTER
        self._channel.lost(drivers.current.now(), jitter)
        self._set_timer()

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
        self._receiver.heard()
        now = drivers.current.now()
        if target is None:
            effects = stream.feed(scratch[:count], now)
        else:
            target.release()
            effects = stream.filled(count, now)
        self._perform(effects)
        self._pump()
        if self._sock is sock and not isinstance(sock, socket.socket) and sock.pending():
            self._reactor.call_soon(self._read_on, sock)

    def _read_on(self, sock: Wire) -> None:
        """Read on: bytes that have been received already make no event."""
        if self._sock is sock:
            self._read()

    # -- bytes out -------------------------------------------------------------------------------

    def _soon(self) -> None:
        """Write once what is handled now is handled: one packet after the other in one go."""
        if not self._flushing:
            self._flushing = True
            self._reactor.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._pump()

    def _pump(self) -> None:
        """Write while the socket takes it and there is something to write, but others wait, too."""
        now = drivers.current.now()
        out = self._out
        left = _TURN
        while self._sock is not None and self._stream is not None and not self._waits:
            if not out:
                out += _few(self._stream.gather(now, _GATHER))
                if not out:
                    break
            try:
                sent = self._sock.sendmsg(out[:_MOST_BUFFERS])
            except (BlockingIOError, InterruptedError):
                self._waits = True
                self._watch(True)
                break
            except OSError:
                self._lost()
                break
            self._advance(sent)
            if not out and self._stream.dry:
                break
            left -= sent
            if left <= 0:  # whoever takes as fast as we give would keep us here
                self._waits = True
                self._watch(True)
        self._set_timer()

    def _watch(self, on: bool) -> None:
        if on is not self._watches:
            self._watches = on
            self._reactor.watch_writes(self._fd, on)

    def _advance(self, sent: int) -> None:
        out = self._out
        done = 0
        for buffer in out:
            if sent < len(buffer):
                break
            sent -= len(buffer)
            done += 1
        del out[:done]
        if sent:
            out[0] = out[0][sent:]

    # -- what the channel decides ----------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
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

    def _over(self, end: Ended) -> None:
        self._pump()  # the farewell
        self._close()
        for token in end.lost:
            done: Any = token
            done()
        self._receiver.ended(end.reason)

    def _set_timer(self) -> None:
        deadline = self._channel.deadline
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        delay = max(0.0, deadline - drivers.current.now())
        self._timer = self._reactor.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._channel.tick(drivers.current.now()))
        self._pump()
