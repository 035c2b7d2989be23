"""A neighbour: the agent of another host of the same job, and the tunnels that lead there.

Lane 0 of the host link carries what the agents tell each other (`protocol.federation`), as JSON.
Every other lane is a tunnel; the side that opens it picks the number, the one with the smaller name
odd ones, the other even ones, so that both may open at once.

Two workers may want to talk to each other at the same time, and dial. Then the connection of the
one with the smaller name is used.

Two orders have to be kept together. A proc's last words travel in a tunnel, the news of its end on
the control lane, which is faster; so such a notice waits until the tunnels between the two are
closed, which the other agent does when the proc's sockets closed, but no longer than `_LAST_WORDS`
seconds: a child that the proc forked may hold them open.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.errors import ProtocolError
from monarch._engine.protocol.channel import Channel, Terms
from monarch._engine.protocol.lanes import CONTROL
from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.cast_relay import CastRelay
from monarch._engine.runtime.greeting import Wire
from monarch._engine.runtime.host_link import HostLink, Receiver
from monarch._engine.runtime.reactor import Reactor
from monarch._engine.runtime.seam import CASTS
from monarch._engine.runtime.sentinel import Sentinel
from monarch._engine.runtime.stream_tunnel import StreamTunnel
from monarch._engine.runtime.tunnel import Tunnel
from monarch._engine.transport.segment import SegmentPool, Windows

if TYPE_CHECKING:
    from monarch._engine.runtime.greeting import Wire
    from monarch._engine.wire.packet import Buffer

__all__ = ["Neighbour", "Neighbourhood"]

_LAST_WORDS = 1.0
_TRIES = 4  # to replace a silent connection, before its host is given up
_DIALS = 6  # at the same time: one that leads to nothing takes as long as four tries


class Neighbourhood(Protocol):
    """What a neighbour needs of its agent."""

    reactor: Reactor
    segments: SegmentPool
    windows: Windows
    sentinel: Sentinel
    casts: CastRelay

    @property
    def name(self) -> str:
        """Of this host."""
        ...

    def next_number(self) -> int:
        """How many neighbours there have been: tells a later session from an earlier one."""
        ...

    def from_neighbour(self, neighbour: Neighbour, message: dict[str, Any]) -> None: ...
    def tunnel_opened(
        self,
        neighbour: Neighbour,
        tunnel: Tunnel | StreamTunnel,
        *,
        first: bool,
        stream: str,
    ) -> None: ...
    def connection_altered(self, neighbour: Neighbour) -> None: ...
    def neighbour_up(self, neighbour: Neighbour) -> None: ...
    def neighbour_lost(self, neighbour: Neighbour, reason: str) -> None: ...


class Neighbour(Receiver):
    """See the module.

    Args:
        agent: this side.
        name: of the other host.
        dial: opens a connection (on whatever thread) and ends with `dialed` or `dial_failed`
            on the reactor thread; None if the other side dials.
        session: a random number, not 0.
        first_patience: seconds that the first connection may take.
        patience: seconds that a break may take before the host counts as unreachable.
        frame_limit: the largest frame of a proc, bytes.
    """

    def __init__(
        self,
        agent: Neighbourhood,
        name: str,
        dial: Callable[[Neighbour], None] | None,
        session: int,
        first_patience: float,
        patience: float,
        frame_limit: int,
    ) -> None:
        self.name = name
        self.number = agent.next_number()
        self._agent = agent
        self._dial = dial
        self._patience = patience
        self._frame_limit = frame_limit
        self.tunnels: dict[int, Tunnel | StreamTunnel] = {}
        self._lanes = itertools.count(1 if agent.name < name else 2, 2)
        self._held: list[dict[str, Any]] = []  # notices that wait for tunnels to close
        self.problem = ""  # why the last dial led to nothing
        self._dials = 0  # under way
        self._suspected = False  # nothing was heard for longer than usual
        self._deaf_until = 0.0  # until then it is taken not to hear us
        self._fresh_until = 0.0  # a connection that a try has led to gets this long
        self.channel = Channel(
            session,
            dials=dial is not None,
            now=drivers.current.now(),
            peer=f"host {name or 'of the client'}",
            terms=Terms(patience=first_patience, message_limit=frame_limit + (1 << 20)),
            allocate=self._allocate,
        )
        peer = f"host {name or 'of the client'}"
        self.link = HostLink(agent.reactor, peer, self, self.channel)
        self.way = agent.casts.way(name, self)
        self.link.start()

    # -- out -------------------------------------------------------------------------------------

    def say(self, message: dict[str, Any]) -> None:
        """Send a message to the agent there."""
        self.link.send(CONTROL, [json.dumps(message, separators=(",", ":")).encode()])

    def leave(self, done: Callable[[], None], *, shutdown: bool) -> None:
        """Have the agent there end, and with `shutdown` its worker loop.

        `done()` once it has the order, or there is no way to it: it has ended, or ends by itself.
        """
        message = json.dumps({"op": "leave", "shutdown": shutdown}).encode()
        if shutdown or self.channel.met:
            self.link.send(CONTROL, [message], done)
        else:  # there is no agent of ours yet that would have to know
            self.link.send(CONTROL, [message])
            done()

    @property
    def sessions(self) -> tuple[int, int]:
        """See `HostPeer`."""
        return self.channel.sessions

    def cast(self, lane: int, buffers: Sequence[Buffer]) -> bool:
        """See `HostPeer`."""
        return self.link.send(lane, buffers)

    def hold(self, lane: int, *, on: bool) -> None:
        """See `HostPeer`."""
        (self.link.pause if on else self.link.resume)(lane)

    def open(
        self, near: int, far: int, sock: socket.socket, *, first: bool, stream: str = ""
    ) -> None:
        """Carry what passes through `sock`, whose other end `near` has, to `far` there.

        That is a link; or a stream of bytes for the purpose `stream`.
        """
        lane = next(self._lanes) % CASTS
        while lane == CONTROL or lane in self.tunnels:
            lane = next(self._lanes) % CASTS
        tunnel = self._tunnel(lane, near, far, stream, ours=True)
        message = {"op": "open", "lane": lane, "near": near, "far": far, "first": first}
        self.say({**message, "for": stream} if stream else message)
        tunnel.attach(sock)

    def _tunnel(
        self, lane: int, near: int, far: int, stream: str, *, ours: bool
    ) -> Tunnel | StreamTunnel:
        agent = self._agent
        tunnel: Tunnel | StreamTunnel
        if stream:
            tunnel = StreamTunnel(agent.reactor, self.link, lane, near, far, self._tunnel_closed)
        else:
            tunnel = Tunnel(
                agent.casts,
                self.way,
                agent.reactor,
                self.link,
                lane,
                near,
                far,
                agent.segments,
                agent.windows,
                self._frame_limit,
                self._tunnel_closed,
                ours=ours,
            )
        self.tunnels[lane] = tunnel
        return tunnel

    # -- in (see Receiver) -----------------------------------------------------------------------

    def delivered(self, lane: int, data: bytes | bytearray | memoryview) -> None:
        if lane != CONTROL:
            tunnel = self.tunnels.get(lane)
            if tunnel is not None:
                tunnel.deliver(data)
            elif lane >= CASTS:
                self._agent.casts.received(self.way, lane, data)
            return
        message = json.loads(bytes(data))
        if message["op"] == "open":
            lane = message["lane"]
            if lane in self.tunnels or not 0 < lane < CASTS:
                raise ProtocolError(f"lane {lane} is open already")
            # (Seen from here, near and far change places.)
            stream = message.get("for", "")
            tunnel = self._tunnel(lane, message["far"], message["near"], stream, ours=False)
            self._agent.tunnel_opened(self, tunnel, first=message["first"], stream=stream)
        elif message["op"] == "notice" and (self._held or self._awaits(message)):
            if not self._held:
                self._agent.reactor.call_later(_LAST_WORDS, self._release_all)
            self._held.append(message)
        else:
            self._agent.from_neighbour(self, message)

    def _allocate(self, lane: int, size: int) -> bytearray | memoryview:
        """Where a message of several pieces belongs: what is big may be for a proc as it is."""
        if isinstance(self.tunnels.get(lane), Tunnel):
            return self._agent.segments.reserve(size)
        return bytearray(size)

    def _awaits(self, message: dict[str, Any]) -> bool:
        """Whether the last words of who is said to be gone are still under way."""
        notice = message["notice"]
        if notice["op"] != "gone":
            return False
        gone = {uid for uid, *_ in notice["procs"]}
        return any(
            tunnel.near == message["to"] and tunnel.far in gone for tunnel in self.tunnels.values()
        )

    def _tunnel_closed(self, tunnel: Tunnel | StreamTunnel) -> None:
        self.tunnels.pop(tunnel.lane, None)
        while self._held and not self._awaits(self._held[0]):
            self._agent.from_neighbour(self, self._held.pop(0))

    def _release_all(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._agent.from_neighbour(self, message)

    def room(self, lane: int) -> None:
        tunnel = self.tunnels.get(lane)
        if tunnel is not None:
            tunnel.room()
        elif lane >= CASTS:
            self._agent.casts.room(self.way, lane)

    def be_patient(self, patience: float) -> None:
        """From the next break on, another one than it was made with."""
        self._patience = patience
        if self.channel.met:
            self.channel.be_patient(patience)

    def connected(self, *, again: bool) -> None:
        self.problem = ""
        if not again:
            self.channel.be_patient(self._patience)
            self._agent.sentinel.watch(self)
            self._agent.casts.met(self.way)
            self._agent.neighbour_up(self)

    def dial(self) -> None:
        if not self._dials:  # else there is a try under way that will do
            self._start_dial()

    def _start_dial(self) -> None:
        assert self._dial is not None
        self._dials += 1
        self._dial(self)

    def dialed(self, sock: Wire) -> None:
        """A dial has led to a connection."""
        self._dials -= 1
        if self._dial is None:
            sock.close()  # the other side's is used
            return
        if self.link.connected:
            now = drivers.current.now()
            doubted = self._suspected or now < self._deaf_until
            if not doubted or now < self._fresh_until:
                sock.close()  # the one that is there is good, or has yet to show that it is
                return
            self._fresh_until = now + self._patience / _TRIES
        self.link.adopt(sock)

    def dial_failed(self, problem: str, *, for_good: bool) -> None:
        """A dial led to nothing; `for_good`: the next would not either, if they have never met.

        (If they have, somebody may have altered what was said. The next may get through.)
        """
        self._dials -= 1
        if self._dial is None:
            return
        if self.link.connected or self._dials:  # it was a try, or there is another
            return
        self.problem = problem
        if for_good and not self.channel.met:
            self.link.end(problem)
        else:
            self.link.failed()

    def answer(self, sock: Wire) -> None:
        """The other side has dialed."""
        if self._dial is not None:
            if self._agent.name < self.name or self.channel.met:
                sock.close()  # it will get ours; or it has begun anew, which we have yet to see
                return
            self._dial = None
            self.channel.answer()
        self.link.adopt(sock)

    # -- silence (see Watched) -------------------------------------------------------------------

    def heard(self) -> None:
        self._suspected = False
        self._agent.sentinel.heard(self)

    def altered(self) -> None:
        self._agent.connection_altered(self)

    def heartbeat(self, payload: bytes) -> None:
        self._agent.sentinel.on_heartbeat(self, payload)

    def send_heartbeat(self, payload: bytes) -> None:
        self.link.heartbeat(payload)

    def suspect(self) -> None:
        self._suspected = True
        self._try()

    def suspect_deaf(self) -> None:
        # (It knows no better than to wait, if we are the one who dials.)
        self._deaf_until = drivers.current.now() + self._patience / _TRIES
        self._try_once()

    def _try(self) -> None:
        """Another connection may get through, now: TCP asks again after ever longer pauses."""
        if self._suspected:
            self._try_once()
            self._agent.reactor.call_later(self._patience / (3 * _TRIES), self._try)

    def _try_once(self) -> None:
        if self._dial is not None and self.link.connected and self._dials < _DIALS:
            self._start_dial()

    def give_up(self, reason: str) -> None:
        self.link.end(reason)

    def ended(self, reason: str) -> None:
        self._suspected = False
        self._agent.sentinel.forget(self)
        for tunnel in list(self.tunnels.values()):
            tunnel.close(reason)
        self._agent.casts.way_over(self.way, self.problem or reason)
        self._release_all()
        with contextlib.suppress(KeyError):
            self._agent.neighbour_lost(self, self.problem or reason)
