"""The simulated network: packets between hosts, which it delays, drops, duplicates and reorders.

Between two hosts there is one `Channel` of the real protocol, monitored by the real failure
detector. Simulated is the effect of a network on their packets. Without faults the packets of one
direction stay in order, as on a TCP connection. A packet belongs to the connection on which it was
sent; packets of earlier connections are dropped once a new one is established.

A channel carries messages between agents on its control lane, and *tunnels*: the bytes of one link
between two processes, each on a lane of its own. An empty message on a lane closes the tunnel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch._engine.base.home import HOME
from monarch._engine.protocol.session.channel import (
    Channel,
    Connected,
    Deliver,
    Dial,
    Effect,
    Ended,
    Heartbeat,
    Room,
    Terms,
)
from monarch._engine.runtime.cast.tunnel_end import CASTS, Cast, TunnelEnd, ranked
from monarch._engine.wire.frame import MARK, POST, PROBE, pack
from monarch._engine.wire.packet import Buffer
from monarch.testing.faults import Delay, Drop, Duplicate, NetworkFault, Partition, Reorder
from monarch.testing.link import SimLink
from monarch.testing.scheduler import Entry

if TYPE_CHECKING:
    from monarch.testing.host import SimHost
    from monarch.testing.world import World

__all__ = ["Network", "SimPeer", "SimTunnel"]

_CONTROL = 0
_DIAL_TIMEOUT = 1.0
_UNREAD = 1 << 20
"""How many bytes an agent queues for a process that does not read, before it reports that."""


class Network:
    """The network of one simulation.

    Args:
        world: has the hosts that the network connects.
        latency: the least and the most seconds that a packet takes.
    """

    def __init__(self, world: World, latency: tuple[float, float]) -> None:
        self._world = world
        self._scheduler = world.scheduler
        self._least, self._most = latency
        self.terms = Terms(rto=max(0.1, 5 * self._most))
        self._faults: list[NetworkFault] = []
        self._latest: dict[tuple[int, int], float] = {}  # arrival of the last packet, by direction
        self.packets = 0

    def add(self, fault: NetworkFault) -> None:
        """Put `fault` in force for its duration."""
        self._faults.append(fault)
        until = self._scheduler.now + fault.seconds
        self._scheduler.at(until, None, self._faults.remove, fault)

    def send(self, sender: SimHost, receiver: SimHost, arrive: Any, *args: Any) -> None:
        """Call ``arrive(*args)`` at `receiver` when the packet arrives, unless it is lost."""
        self.packets += 1
        chance = self._scheduler.random.random
        delay = self._least + chance() * (self._most - self._least)
        copies = 1
        in_order = True
        for fault in self._faults:
            if not _concerns(fault, sender.ident, receiver.ident):
                continue
            if isinstance(fault, Partition):
                return
            if isinstance(fault, Drop):
                if chance() < fault.probability:
                    return
            elif isinstance(fault, Duplicate):
                copies += chance() < fault.probability
            elif isinstance(fault, Delay):
                delay += fault.by
            elif isinstance(fault, Reorder):
                delay += chance() * fault.by
                in_order = False
        when = self._scheduler.now + delay
        if in_order:
            direction = (sender.ident, receiver.ident)
            when = max(when, self._latest.get(direction, 0.0))
            self._latest[direction] = when
        for _ in range(copies):
            self._scheduler.aside(when, receiver.place, arrive, *args)
            when += chance() * (self._most - self._least)


def _concerns(fault: NetworkFault, sender: int, receiver: int) -> bool:
    def matches(a: int, b: int) -> bool:
        return fault.a in (None, a) and fault.b in (None, b)

    return matches(sender, receiver) or (not fault.one_way and matches(receiver, sender))


class SimTunnel(TunnelEnd):
    """One end of a tunnel: `end` is this agent's end of the link to the process."""

    def __init__(
        self, peer: SimPeer, lane: int, end: SimLink, near: int, far: int, *, ours: bool
    ) -> None:
        super().__init__(peer.host.core.casts, peer.way, near, far, ours=ours)
        self._peer = peer
        self._full = False  # whether the process lets its data queue up
        self._paused = False  # whether the lane is paused
        self.lane = lane
        self.end = end
        self.clogged = False
        self.relay.opened(self)

    def start(self) -> None:
        """Begin to carry data."""
        self.end.on_room = self._room
        self.end.attach(self._peer.host.place, "a process", self.read, 1 << 60, 1 << 60)

    def read(self, end: SimLink) -> None:
        """Forward what the process has sent."""
        channel = self._peer.channel
        if self.lane in self._peer.full or channel.ended is not None:
            return
        data: list[bytes] = []
        for frame in end.receive(None):
            if self.expected:
                if frame.kind == POST and self.relay.answer(self, frame):
                    continue
                if frame.kind == PROBE:
                    data += self.relay.repeated(self)
            kind, flags, dest, port, rank, _, meta, body = frame
            packed = pack(kind, dest, port, rank, meta, bytes(body), flags)
            if kind == MARK:
                self._send(data)
                self._send([packed])
                data = []
            else:
                data.append(packed)
        self._send(data)
        if end.lost is not None:
            self._peer.close(self.lane, tell=True)
        self._peer.pump()

    def _send(self, data: list[bytes]) -> None:
        if data and not self._peer.channel.send(self.lane, [b"".join(data)]):
            self._peer.full.add(self.lane)

    def arrived(self, data: bytes) -> None:
        """Process a message of the lane."""
        if self.merge is not None or (data and data[4] == MARK):
            self.relay.arrived(self, data)
        else:
            self.write(data)

    def write(self, data: Any) -> None:
        """See `TunnelEnd`."""
        if not data:
            self._peer.close(self.lane, tell=False)
        elif not self.end.send(data):
            self._peer.close(self.lane, tell=True)
        else:
            self._full = self.end.queued > _UNREAD
            self._flow()

    def write_cast(self, cast: Cast, rank: int) -> bool:
        """See `TunnelEnd`."""
        if not self.end.send(ranked(cast.frame, rank)):
            return True
        if self.end.queued > _UNREAD:
            self.clogged = True
            return False
        return True

    def _room(self, end: SimLink) -> None:
        """Resume: the process has read what was queued for it."""
        self._full = False
        self._flow()
        if self.clogged:
            self.clogged = False
            self.relay.drained(self)
        self._peer.pump()

    def hold(self, *, on: bool) -> None:
        """See `TunnelEnd`."""
        self._flow()

    def _flow(self) -> None:
        paused = self._full or self.held
        if paused != self._paused:
            self._paused = paused
            channel = self._peer.channel
            if channel.ended is None:
                (channel.pause if paused else channel.resume)(self.lane)


class SimPeer:
    """One host's side of its channel with another, and the tunnels through it."""

    def __init__(self, host: SimHost, other: SimHost) -> None:
        self.host = host
        self.name = other.name
        self.dials = host.ident < other.ident
        self._scheduler = host.world.scheduler
        self._network = host.world.network
        self.channel = Channel(
            host.world.driver.chance(1 << 62) + 1,
            dials=self.dials,
            now=self._scheduler.now,
            peer=other.name,
            terms=self._network.terms,
        )
        self.way = host.core.casts.way(other.name, self)
        self._connection = 0  # the number of the present connection
        self._dialed = 0  # the number of the last connection that this side requested
        self._alarm: Entry | None = None
        self._dialing: Entry | None = None  # the end of the time for a dial
        self._tunnels: dict[int, SimTunnel] = {}  # by lane
        self.full: set[int] = set()  # lanes whose send buffer is full
        self._next_lane = 1 + self.dials

    @property
    def other(self) -> SimHost:
        """The other host at present: after a crash, its agent is another one than before."""
        return self.host.world.hosts_by_name[self.name]

    # -- for the agent ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect."""
        self._carry_out(self.channel.tick(self._scheduler.now))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the other agent."""
        if self.channel.ended is None:
            self.channel.send(_CONTROL, [json.dumps(message, separators=(",", ":")).encode()])
            self.pump()

    def open(self, end: SimLink, near: int, far: int, first: bool) -> None:
        """Open a tunnel to the other host for the link whose end is `end`."""
        lane = self._next_lane
        self._next_lane += 2
        self.send({"op": "open", "near": near, "far": far, "first": first, "lane": lane})
        self.join(lane, end, near, far, ours=True)

    def join(self, lane: int, end: SimLink, near: int, far: int, *, ours: bool) -> None:
        """Attach `end` to the tunnel on `lane`."""
        tunnel = self._tunnels[lane] = SimTunnel(self, lane, end, near, far, ours=ours)
        tunnel.start()

    @property
    def sessions(self) -> tuple[int, int]:
        """See `HostPeer`."""
        return self.channel.sessions

    def cast(self, lane: int, buffers: Sequence[Buffer]) -> bool:
        """See `HostPeer`."""
        room = True
        if self.channel.ended is None:
            room = self.channel.send(lane, [b"".join(buffers)])
            self.pump()
        return room

    def hold(self, lane: int, *, on: bool) -> None:
        """See `HostPeer`."""
        if self.channel.ended is None:
            (self.channel.pause if on else self.channel.resume)(lane)
            self.pump()

    def send_heartbeat(self, payload: bytes) -> None:
        """Send a heartbeat, ahead of all other data."""
        self.channel.heartbeat(payload)
        self.pump()

    def suspect(self) -> None:
        """Do nothing: a simulated connection either works or is lost."""

    def suspect_deaf(self) -> None:
        """Do nothing, as `suspect`."""

    def give_up(self, reason: str) -> None:
        """End the channel for good."""
        self._carry_out(self.channel.end(reason))

    def _on_data(self, lane: int, data: bytes) -> None:
        tunnel = self._tunnels.get(lane)
        if tunnel is not None:
            tunnel.arrived(data)
        elif lane >= CASTS:
            self.host.core.casts.received(self.way, lane, data)

    def close(self, lane: int, *, tell: bool) -> None:
        """Close the tunnel on `lane`; `tell` notifies the other host."""
        tunnel = self._tunnels.pop(lane, None)
        if tunnel is not None:
            tunnel.end.close("the other host closed it")
            if tell and self.channel.ended is None:
                for answer in self.host.core.casts.repeated(tunnel):
                    self.channel.send(lane, [answer])
                self.channel.send(lane, [b""])
                self.pump()
            self.host.core.casts.closed(tunnel)

    # -- the channel -----------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Deliver):
                data = bytes(effect.data)
                if effect.lane != _CONTROL:
                    self._on_data(effect.lane, data)
                else:
                    self.host.on_message(self, json.loads(data))
            elif isinstance(effect, Room):
                self.full.discard(effect.lane)
                tunnel = self._tunnels.get(effect.lane)
                if tunnel is not None:
                    tunnel.read(tunnel.end)
                elif effect.lane >= CASTS:
                    self.host.core.casts.room(self.way, effect.lane)
            elif isinstance(effect, Heartbeat):
                self.host.monitor.on_heartbeat(self, effect.payload)
            elif isinstance(effect, Dial):
                self._dial()
            elif isinstance(effect, Connected):
                self.host.core.casts.met(self.way)
            elif isinstance(effect, Ended):
                self.pump()  # sends the channel's last packet
                for lane in list(self._tunnels):
                    self.close(lane, tell=False)
                self.host.on_lost(self, effect.reason)
        self.pump()

    def pump(self) -> None:
        """Send the packets that are ready, and set the timer that the channel asks for."""
        scheduler, channel = self._scheduler, self.channel
        now = scheduler.now
        while (packet := channel.next_packet(now)) is not None:
            peer = self.other.peers.get(self.host.name)
            if peer is not None:
                parts = [bytes(part) for part in packet]
                connection = self._connection
                self._network.send(self.host, self.other, peer._arrive, connection, parts)
        deadline = channel.deadline
        alarm = self._alarm
        if deadline is None or (alarm is not None and alarm[0] == deadline):
            return
        if alarm is not None:
            scheduler.cancel(alarm)
        self._alarm = scheduler.aside(deadline, self.host.place, self._tick)

    def _tick(self) -> None:
        self._alarm = None
        self._carry_out(self.channel.tick(self._scheduler.now))

    def _arrive(self, connection: int, packet: list[Buffer]) -> None:
        if connection == self._connection and self.channel.ended is None:
            self.host.monitor.heard(self)
            self._carry_out(self.channel.on_packet(packet, self._scheduler.now))

    # -- connections -----------------------------------------------------------------------------

    def broken(self) -> None:
        """Note that the connection was closed by the exit of the other agent."""
        if self.channel.ended is None:
            self.channel.lost(self._scheduler.now, self._scheduler.random.random())
            self.pump()

    def _dial(self) -> None:
        self._dialed += 1
        self._network.send(self.host, self.other, self._knock, self._dialed)
        deadline = self._scheduler.now + _DIAL_TIMEOUT
        self._dialing = self._scheduler.aside(deadline, self.host.place, self._dial_failed)

    def _knock(self, connection: int) -> None:
        """Accept or ignore a dial; runs at the other host.

        The other host accepts HOME at first, and after that the other hosts of the job.
        """
        other, name = self.other, self.host.name
        if name not in other.peers and name not in other.lost and HOME in (name, *other.peers):
            other.connect(self.host)
        if name in other.peers:
            other.peers[name]._accept(connection)

    def _accept(self, connection: int) -> None:
        peer = self.other.peers.get(self.host.name)
        if self.channel.ended is None and peer is not None and connection > self._connection:
            self._connection = connection
            self.channel.opened(self._scheduler.now)
            self._network.send(self.host, self.other, peer._accepted, connection)
            self.pump()

    def _accepted(self, connection: int) -> None:
        if self.channel.ended is None and connection == self._dialed > self._connection:
            if self._dialing is not None:
                self._scheduler.cancel(self._dialing)
                self._dialing = None
            self._connection = connection
            self.channel.opened(self._scheduler.now)
            self.pump()

    def _dial_failed(self) -> None:
        self._dialing = None
        self.channel.lost(self._scheduler.now, self._scheduler.random.random())
        self.pump()
