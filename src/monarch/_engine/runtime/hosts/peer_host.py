"""A peer host: the session with the agent of another host of the job, and the tunnels in it.

Lane 0 of the host link carries the messages between the agents (`protocol.directory`), as JSON.
Every other lane is a tunnel. The side that opens a tunnel picks its number: the side with the
smaller name takes odd ones, the other side even ones, so that both may open tunnels at once.

Two workers may dial each other at the same time. Then the connection of the one with the smaller
name is used.

Two orders have to be kept together. The last messages of a proc travel in a tunnel; the report of
its exit travels on the control lane, which is faster. So the report waits until the tunnels between
the two procs are closed, which the other agent does once the exited proc's sockets are closed. The
report waits at most `_LAST_WORDS` seconds, since a child that the proc forked may hold the sockets
open.

An order to start procs that goes down the tree of hosts opens the tunnels to these procs, too, and
`protocol.spawn_orders` keeps its place among the messages on lane 0.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.errors import ProtocolError
from monarch._engine.protocol import agent_messages
from monarch._engine.protocol.session.channel import Channel, Terms
from monarch._engine.protocol.session.lanes import CONTROL
from monarch._engine.protocol.spawn_orders import Arrivals, Orders, Place
from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.cast.tunnel_end import CASTS, SpawnShare
from monarch._engine.runtime.hosts.host_link import HostLink, Receiver
from monarch._engine.runtime.hosts.stream_tunnel import StreamTunnel
from monarch._engine.runtime.hosts.tunnel import Tunnel
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.heartbeats import HeartbeatMonitor
from monarch._engine.runtime.io.reactor import Reactor
from monarch._engine.transport.segment import SegmentPool, Windows
from monarch._engine.wire import json_message

if TYPE_CHECKING:
    from monarch._engine.protocol.agent_messages import AgentMessage, Leave, Notice, Open, Spawn
    from monarch._engine.runtime.admission.handshake_io import Wire
    from monarch._engine.wire.packet import Buffer

__all__ = ["Neighbourhood", "PeerHost"]

_LAST_WORDS = 1.0  # seconds
# A part of the time after which a silent host is given up. A new connection is judged after one
# part; a silent one is dialed again three times in each.
_PARTS = 4
_DIALS = 6  # at the same time; one without result takes as long as four attempts


class Neighbourhood(Protocol):
    """The interface to its agent that a peer host needs."""

    reactor: Reactor
    segments: SegmentPool
    windows: Windows
    monitor: HeartbeatMonitor

    @property
    def casts(self) -> CastRelay:
        """The casts at this host."""
        ...

    @property
    def name(self) -> str:
        """The name of this host."""
        ...

    def next_number(self) -> int:
        """Return a number that grows, and so tells a later session from an earlier one."""
        ...

    def from_peer_host(self, peer_host: PeerHost, message: AgentMessage) -> None: ...
    def tunnel_opened(
        self,
        peer_host: PeerHost,
        tunnel: Tunnel | StreamTunnel,
        *,
        first: bool,
        stream: str,
    ) -> None: ...
    def connection_altered(self, peer_host: PeerHost) -> None: ...
    def peer_host_up(self, peer_host: PeerHost) -> None: ...
    def peer_host_lost(self, peer_host: PeerHost, reason: str, *, farewell: bool) -> None: ...


class PeerHost(Receiver):
    """The session with the agent of another host; see the module.

    Args:
        agent: the agent of this host.
        name: the name of the other host.
        dial: opens a connection (on whatever thread) and ends with `dialed` or `dial_failed`
            on the reactor thread; None if the other side dials.
        session: a random number, not 0.
        first_patience: seconds that the first connection may take.
        patience: seconds that an interruption may take before the host counts as unreachable.
        frame_limit: the largest frame of a proc, in bytes.
    """

    def __init__(
        self,
        agent: Neighbourhood,
        name: str,
        dial: Callable[[PeerHost], None] | None,
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
        self._orders: Orders[Spawn] = Orders()
        self._arrivals: Arrivals[Spawn] = Arrivals()
        self._held: list[Notice] = []  # notices that wait for tunnels to close
        self.problem = ""  # why the last dial failed
        self._dials = 0  # in progress
        self._suspected = False  # whether the peer has been silent for longer than usual
        self._deaf_until = 0.0  # until this time, the peer is assumed not to receive our packets
        self._fresh_until = 0.0  # until this time, no dial replaces the connection
        self.channel = Channel(
            session,
            dials=dial is not None,
            now=environments.current.now(),
            peer=f"host {name or 'of the client'}",
            terms=Terms(patience=first_patience, message_limit=frame_limit + (1 << 20)),
            allocate=self._allocate,
        )
        peer = f"host {name or 'of the client'}"
        self.link = HostLink(agent.reactor, peer, self, self.channel)
        self.way = agent.casts.way(name, self)
        self.link.start()

    # -- out -------------------------------------------------------------------------------------

    def say(self, message: AgentMessage) -> None:
        """Send a message to the agent of the other host."""
        self._say(message)

    def _say(self, message: AgentMessage, done: Callable[[], None] | None = None) -> None:
        self._send_orders(self._orders.say(ordered=message["op"] != "addresses"))
        self.link.send(CONTROL, [json_message.encode(message)], done)

    def _send_orders(self, orders: Sequence[tuple[int, Spawn]]) -> None:
        for _, order in orders:
            self.link.send(CONTROL, [json_message.encode(order)])

    def leave(self, done: Callable[[], None], *, shutdown: bool) -> None:
        """Make the other agent exit, and with `shutdown` its worker loop, too.

        Calls `done()` once the agent has the order or cannot be reached: then it has exited, or
        exits by itself.
        """
        message: Leave = {"op": "leave", "shutdown": shutdown}
        if shutdown or self.channel.met:
            self._say(message, done)
        else:  # no agent of this job runs there yet, so none has to be informed
            self.say(message)
            done()

    @property
    def dials(self) -> bool:
        """Whether this side opens the connections."""
        return self._dial is not None

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
        """Carry what passes through `sock`, whose other end `near` has, to `far` on that host.

        That is a link, or a stream of bytes if `stream` names its purpose.
        """
        lane = self._free_lane()
        tunnel = self._tunnel(lane, near, far, stream, ours=True)
        message: Open = {"op": "open", "lane": lane, "near": near, "far": far, "first": first}
        if stream:
            message["for"] = stream
        self.say(message)
        tunnel.attach(sock)

    def _free_lane(self) -> int:
        lane = next(self._lanes) % CASTS
        while lane == CONTROL or lane in self.tunnels:
            lane = next(self._lanes) % CASTS
        return lane

    def order(self, order: Spawn, socks: Sequence[socket.socket]) -> SpawnShare:
        """Open tunnels for the procs of `order`, which the other side does when it has the order.

        Their parent here has the other ends of `socks`. The order goes down the tree.
        """
        near, procs = order["parent"], order["procs"]
        tunnels = [
            self._tunnel(self._free_lane(), near, proc["uid"], "", ours=True) for proc in procs
        ]
        lanes = [tunnel.lane for tunnel in tunnels]
        order = {**order, "lanes": lanes}
        place = self._orders.send(order)
        order["number"] = place.number
        for tunnel, sock in zip(tunnels, socks, strict=True):
            assert isinstance(tunnel, Tunnel)
            tunnel.before = self.insist
            tunnel.attach(sock)
        return SpawnShare(*place, lanes, procs)

    def confirmed(self, number: int) -> None:
        """See `HostPeer`."""
        self._orders.confirm(number)

    def insist(self) -> None:
        """See `HostPeer`."""
        self._send_orders(self._orders.copies())

    def ordered(self, share: SpawnShare, order: dict[str, Any]) -> None:
        """See `HostPeer`."""
        place = Place(share.number, share.said)
        spawn: Any = {**order, "lanes": share.lanes}
        # Later, so that an error does not concern the host that passed the order on.
        self._agent.reactor.call_soon(self._carry_out_by_tree, place, spawn)

    def _carry_out_by_tree(self, place: Place, order: Spawn) -> None:
        if self.channel.ended is None:
            self._carry_out(self._arrivals.by_tree(place, order))

    def _carry_out(self, orders: Sequence[Spawn]) -> None:
        rest = iter(orders)
        for order in rest:
            try:
                for lane, proc in zip(order.get("lanes", ()), order["procs"], strict=True):
                    self._opened(lane, proc["uid"], order["parent"], first=True)
                self._agent.from_peer_host(self, order)
            except Exception:
                self._carry_out(list(rest))  # they do not come again
                raise

    def _opened(self, lane: int, near: int, far: int, *, first: bool, stream: str = "") -> None:
        """Open this end of a tunnel that the other side has opened."""
        if lane in self.tunnels or not 0 < lane < CASTS:
            raise ProtocolError(f"lane {lane} is open already")
        tunnel = self._tunnel(lane, near, far, stream, ours=False)
        self._agent.tunnel_opened(self, tunnel, first=first, stream=stream)

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
        try:
            self._handle(agent_messages.decode(data))
        finally:  # a message that fails has its place in the order, too
            self._carry_out(self._arrivals.heard())

    def _handle(self, message: AgentMessage) -> None:
        if message["op"] == "open":
            lane, stream = message["lane"], message.get("for", "")
            # The sender's near and far are this side's far and near.
            near, far = message["far"], message["near"]
            self._opened(lane, near, far, first=message["first"], stream=stream)
        elif message["op"] == "spawn" and "number" in message:
            self._carry_out(self._arrivals.by_copy(message["number"], message))
        elif message["op"] == "notice" and (self._held or self._awaits(message)):
            if not self._held:
                self._agent.reactor.call_later(_LAST_WORDS, self._release_all)
            self._held.append(message)
        else:
            self._agent.from_peer_host(self, message)

    def _allocate(self, lane: int, size: int) -> bytearray | memoryview:
        """Return memory for a message of several pieces; a proc may get it without a copy."""
        if isinstance(self.tunnels.get(lane), Tunnel):
            return self._agent.segments.reserve(size)
        return bytearray(size)

    def _awaits(self, message: Notice) -> bool:
        """Whether a notice reports an exit while the proc's last messages may be in transit."""
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
            self._agent.from_peer_host(self, self._held.pop(0))

    def _release_all(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._agent.from_peer_host(self, message)

    def room(self, lane: int) -> None:
        tunnel = self.tunnels.get(lane)
        if tunnel is not None:
            tunnel.room()
        elif lane >= CASTS:
            self._agent.casts.room(self.way, lane)

    def be_patient(self, patience: float) -> None:
        """Change `patience`; takes effect with the next interruption."""
        self._patience = patience
        if self.channel.met:
            self.channel.be_patient(patience)

    def connected(self, *, again: bool) -> None:
        self.problem = ""
        if not again:
            self.channel.be_patient(self._patience)
            self._agent.monitor.watch(self)
            self._agent.casts.met(self.way)
            self._agent.peer_host_up(self)

    def dial(self) -> None:
        if not self._dials:  # otherwise a dial in progress will do
            self._start_dial()

    def _start_dial(self) -> None:
        assert self._dial is not None
        self._dials += 1
        self._dial(self)

    def dialed(self, sock: Wire) -> None:
        """Use the connection that a dial has opened, unless it is no longer needed."""
        self._dials -= 1
        if self._dial is None:
            sock.close()  # the other side's connection is used
            return
        if self.link.connected:
            now = environments.current.now()
            doubted = self._suspected or now < self._deaf_until
            if not doubted or now < self._fresh_until:
                sock.close()  # the present one works, or is too new to be judged
                return
            self._fresh_until = now + self._patience / _PARTS
        self.link.adopt(sock)

    def dial_failed(self, problem: str, *, for_good: bool) -> None:
        """Handle a failed dial; `for_good`: another would fail, too, before the first session.

        After the first session another dial may succeed even so: the failure may mean that bytes
        were altered in transit.
        """
        self._dials -= 1
        if self._dial is None:
            return
        if self.link.connected or self._dials:  # it was one of several attempts
            return
        self.problem = problem
        if for_good and not self.channel.met:
            self.link.end(problem)
        else:
            self.link.failed()

    def answer(self, sock: Wire) -> None:
        """Use a connection that the other side has dialed, unless ours has precedence."""
        if self._dial is not None:
            if self._agent.name < self.name or self.channel.met:
                sock.close()  # it gets ours; or it has a new session, and ours is about to end
                return
            self._dial = None
            self.channel.answer()
        self.link.offer(sock)

    # -- heartbeat and silence (see Watched) -----------------------------------------------------

    def heard(self) -> None:
        self._suspected = False
        self._agent.monitor.heard(self)

    def altered(self) -> None:
        self._agent.connection_altered(self)

    def heartbeat(self, payload: bytes) -> None:
        self._agent.monitor.on_heartbeat(self, payload)

    def send_heartbeat(self, payload: bytes) -> None:
        self.link.heartbeat(payload)

    def suspect(self) -> None:
        self._suspected = True
        self._try()

    def suspect_deaf(self) -> None:
        # Only the dialing side can replace the connection; the peer has to wait.
        self._deaf_until = environments.current.now() + self._patience / _PARTS
        self._try_once()

    def _try(self) -> None:
        """Try other connections, as one may get through now: TCP retries after growing pauses."""
        if self._suspected:
            self._try_once()
            self._agent.reactor.call_later(self._patience / (3 * _PARTS), self._try)

    def _try_once(self) -> None:
        if self._dial is not None and self.link.connected and self._dials < _DIALS:
            self._start_dial()

    def give_up(self, reason: str) -> None:
        self.link.end(reason)

    def ended(self, reason: str, *, farewell: bool) -> None:
        self._suspected = False
        self._agent.monitor.forget(self)
        for tunnel in list(self.tunnels.values()):
            tunnel.close(reason)
        self._agent.casts.way_over(self.way, self.problem or reason)
        self._release_all()
        with contextlib.suppress(KeyError):
            self._agent.peer_host_lost(self, self.problem or reason, farewell=farewell)
