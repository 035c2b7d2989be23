"""Clusters of thousands of hosts in virtual time: the real protocol cores, and a model of the rest.

Each host has the cores of an agent: casts (`protocol.cast`), a channel to each host that it
communicates with (`protocol.session.channel`), the failure detector (`protocol.session.detector`)
and the membership of the job (`protocol.directory` around `protocol.membership`). They are driven
as `runtime` drives them. The layers below and above them are modelled (`Model`):

- **The network.** A packet takes `latency` and up to `jitter` more, and the time that both hosts'
  `bandwidth` implies. Each segment of 1,448 bytes is lost with probability `loss`. It is sent again
  as TCP does when no later segment reveals the loss: after `rto`, then twice that, and so on. Later
  packets of that connection wait. (Real TCP recovers faster in the middle of much traffic, so this
  is the bad case.)
- **The agent.** It is one Python process. Each message in or out takes `handling` of its time, each
  answer or host listed in a message `entry` more, and a heartbeat or an acknowledgement `beat`.
  Other messages wait meanwhile.
- **The procs.** They are launched one after the other, in `launch` each. A rank answers after
  `work`.

Procs are spawned as `runtime` does it: on more hosts than the fan-out by an order that goes down
the tree (`Directory.spawn_down`, `protocol.spawn_orders`), and behind it a call of all ranks, which
answer when they run.

There is a link between the driver's host and each other host, as `attach_to_workers` makes them.
The links of the tree are dialed by the first cast that needs them. Suspicion and redials follow
`runtime.hosts.peer_host`. The seed determines the whole course.

These invariants are checked at each step: per pair of hosts and direction every message arrives
once and in order, unless one of the two hosts gave up the other; a cast is delivered to a host at
most once; each rank has one outcome.
"""

from __future__ import annotations

import heapq
import itertools
import json
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from monarch._engine.base.home import HOME
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, SYSTEM, Verdict
from monarch._engine.protocol import cast as casts
from monarch._engine.protocol.cast import Answer, Casts
from monarch._engine.protocol.directory import Directory, Order, Send, Spread, Tunnel
from monarch._engine.protocol.membership import Membership, Tell
from monarch._engine.protocol.session import detector as detectors
from monarch._engine.protocol.session.channel import (
    Channel,
    Connected,
    Deliver,
    Dial,
    Ended,
    Heartbeat,
    Terms,
)
from monarch._engine.protocol.session.detector import Detector
from monarch._engine.protocol.session.lanes import CONTROL
from monarch._engine.protocol.spawn_orders import Arrivals, Orders, Place
from monarch._engine.wire.packet import ACK, HEADER, PING

__all__ = ["PROCS", "Call", "Cluster", "Model"]

PROCS = 8
"""On each host."""

FANOUT = 16

_CLIENT = 1
_SEGMENT = 1448  # bytes of TCP in a packet of Ethernet
_TRIES = 4  # attempts to replace a silent connection before its host is given up
_DIALS = 6  # most dials at the same time
_DIAL_TRIPS = 6  # one-way trips of a connection and its handshake
_BEATS = 12  # heartbeats within the timeout
_SYN_RTO = 1.0
_ATTACHING = 60.0
_HOLD = 0.02  # see `runtime.cast.relay`
_NEVER = float("inf")


class Model(NamedTuple):
    """The parameters of the model: seconds, bytes per second, probabilities; see the header."""

    latency: float = 50e-6
    jitter: float = 50e-6
    bandwidth: float = 1.25e9
    loss: float = 0.0
    rto: float = 0.2
    handling: float = 50e-6
    beat: float = 15e-6
    entry: float = 2e-6
    share: float = 14e-6  # the procs of a host in an order, into JSON and out of it
    launch: float = 1.5e-3
    work: float = 200e-6
    argument: int = 200  # bytes of a call, with its frame
    result: int = 64
    spec: int = 4000  # bytes of the description of procs to launch
    timeout: float = 3.0


_PLAIN = Model()


class Call:
    """A call of all ranks, or their spawn, with its outcomes."""

    def __init__(self, number: int, began: float, ranks: int) -> None:
        self.number = number
        self.began = began
        self.ended: float | None = None
        self.outcomes = bytearray(ranks)  # 1: answered, 2: lost
        self.orders: list[tuple[str, int]] = []  # of an order to spawn: its hosts and their numbers
        self.depth = 0
        self.lost_with: set[Any] = set()

    @property
    def seconds(self) -> float:
        assert self.ended is not None, "not every rank is accounted for"
        return self.ended - self.began

    @property
    def answered(self) -> int:
        return self.outcomes.count(1)

    @property
    def lost(self) -> int:
        return self.outcomes.count(2)

    def take(self, rank: int, outcome: int) -> None:
        assert not self.outcomes[rank], f"rank {rank} is accounted for twice"
        self.outcomes[rank] = outcome


class GivenUp(NamedTuple):
    """One host has given up another."""

    when: float
    by: int
    host: int
    rightly: bool
    """It was dead, or cut off at that time."""


class Peer:
    """One side of the link between two hosts; see `runtime.hosts.peer_host`."""

    def __init__(self, here: Node, there: Node, *, dials: bool) -> None:
        cluster = here.cluster
        self.there = there
        self.dials = dials
        self.channel = Channel(
            cluster.random.getrandbits(62) + 1,
            dials=dials,
            now=cluster.now,
            peer=there.name,
            terms=Terms(patience=3 * cluster.model.timeout if here.number else _ATTACHING),
        )
        self.link = 0  # the number of the connection
        self.arrives = 0.0  # when the last packet that was sent on the connection arrives
        self.alarm = _NEVER
        self.dialing = 0
        self.suspected = False
        self.deaf_until = self.fresh_until = 0.0
        self.said = self.heard = 0  # numbers of the last message sent and received
        self.orders: Orders[Any] = Orders()
        self.arrivals: Arrivals[Any] = Arrivals()
        self.lanes = itertools.count(1)  # of the tunnels to its procs
        self.queued = False


class Node:
    """A host."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        model = cluster.model
        self.cluster = cluster
        self.number = number
        self.name = f"host{number}" if number else HOME
        self.casts = Casts(self.name, hold=_HOLD, patience=4 * model.timeout)
        self.detector = Detector(model.timeout / _BEATS, model.timeout, model.timeout)
        self.directory = Directory(Membership(_CLIENT), self.name)
        self.peers: dict[str, Peer] = {}
        self.lost: dict[str, float] = {}
        self.dead = False
        self.alarm = _NEVER
        self.free = 0.0  # time at which the agent has done its work
        self.queue: deque[Peer] = deque()  # connections with messages to send
        self.out = self.into = 0.0  # times at which the network card is free, by direction
        self.worked = 0.0
        self.messages: Counter[str] = Counter()  # messages in and out, and their bytes
        self.delivered: set[int] = set()
        self.share: Any = None  # of the order that is being handled
        self.told: Counter[int] = Counter()  # exits of procs that were reported to the client
        self.up: dict[int, float] = {}  # procs of this host, and since when they run
        self.early: dict[int, list[tuple[int, int]]] = {}  # calls of procs that are not ordered yet

    # -- the agent ---------------------------------------------------------------------------------

    def perform(self, effects: Iterable[Any]) -> None:
        cluster = self.cluster
        for effect in effects:
            match effect:
                case casts.Deliver(cast, first, last):
                    assert cast not in self.delivered, "delivered twice"
                    self.delivered.add(cast)
                    cluster.calls[cast].depth = max(cluster.calls[cast].depth, cluster.level)
                    cluster.at_ranks[cast](self, cast, first, last)
                case casts.Forward(to, cast, level, route):
                    payload = bytes(cluster.sizes[cast])
                    shares = cluster.shares.get(cast)
                    theirs = [] if shares is None else [shares[host] for host in route.hosts]
                    self.say(to, ("forward", cast, level, tuple(route), payload, theirs))
                case casts.Reply(to, cast, answers):
                    self.say(to, ("reply", cast, [tuple(answer) for answer in answers]))
                case casts.Release(to, cast, done):
                    self.say(to, ("release", cast, done))
                case casts.Outcomes(cast, answers, done):
                    call = cluster.calls[cast]
                    for answer in answers:
                        if isinstance(answer, Answer):
                            call.take(answer.rank, 1)
                            self.confirm(call, answer.rank)
                        else:
                            call.lost_with.add(answer.host)
                            for rank in answer.ranks:
                                call.take(rank, 2)
                    if done:
                        call.ended = max(self.free, cluster.now)
                case Send(host, message):
                    self.say_directly(host, message)
                case Spread(message):
                    for name in list(self.peers):
                        self.say_directly(name, message)
                case Tunnel(host, near, far, first):
                    self.say_directly(host, {"op": "open", "near": near, "far": far})
                case Order():
                    self.order(effect)
                case Tell(to, notice):
                    assert to == _CLIENT
                    if notice["op"] == "gone":
                        self.told.update(uid for uid, *_ in notice["procs"])
                case _:
                    raise AssertionError(effect)

    def on_message(self, sender: str, message: tuple[Any, ...]) -> None:
        cluster = self.cluster
        now = cluster.now
        match message:
            case ("forward", cast, level, route, _, shares):
                cluster.level = level
                if shares:
                    self.share = json.loads(shares[0])
                self.perform(self.casts.on_forward(sender, cast, level, casts.Route(*route), now))
            case ("reply", cast, answers):
                told = [Answer(*a) if len(a) == 2 else casts.Loss(*a) for a in answers]
                self.perform(self.casts.on_reply(cast, told, now))
            case ("release", cast, done):
                self.perform(self.casts.on_release(sender, cast, done, now))
            case ("call", call, rank, _):
                self.work_on(call, rank)
            case ("ready", call, rank, _):
                self.answer_when_up(call, rank, rank + 1)
            case ("done", call, rank, _):
                cluster.direct(call, rank)
            case ("agents", said):
                self.on_agent(sender, said)
                self.carry_out_orders(self.peers[sender].arrivals.heard())

    def on_agent(self, sender: str, message: Any) -> None:
        """Handle a direct message of another agent."""
        match message:
            case {"op": "open"}:
                self.directory.admit(_CLIENT, sender)
            case {"op": "spawn", "number": number, "procs": procs}:
                self.carry_out_orders(self.peers[sender].arrivals.by_copy(number, procs))
            case {"op": "spawn", "procs": procs}:
                self.carry_out_orders([procs])
            case {"op": "lost", "host": host, "end": end}:
                if host not in self.lost:  # (this host's own detector handles the connection)
                    verdict = Verdict.from_fields(end)
                    self.perform(self.directory.host_lost(host, verdict))
            case {"op": "ask", "request": {"op": "kill", "uids": uids}}:
                for uid in uids:
                    assert uid in self.up, "the request has overtaken the order"
                    self.kill(uid)
            case _:
                self.perform(self.directory.heard(sender, message, self.cluster.now))

    # -- spawning ----------------------------------------------------------------------------------

    def order(self, order: Order) -> None:
        """Send an order to spawn procs down the tree; see `runtime.cast.relay`."""
        cluster = self.cluster
        shares: dict[str, bytes] = {}
        numbers: list[tuple[str, int]] = []
        for host, procs in order.parts:
            peer = self.peer(host)
            place = peer.orders.send(procs)
            lanes = [next(peer.lanes) for _ in procs]
            shares[host] = json.dumps([*place, lanes, procs], separators=(",", ":")).encode()
            numbers.append((host, place.number))
        call = cluster.order(len(shares), shares, numbers, cluster.model.spec)
        starts = range(len(shares) + 1)
        self.perform(
            self.casts.cast(call.number, list(shares), starts, order.fanout, cluster.now, _HOLD)
        )
        cluster.at(cluster.model.timeout / 2, self, self.insist, call)

    def confirm(self, call: Call, place: int) -> None:
        if call.orders:
            host, number = call.orders[place]
            if host in self.peers:
                self.peers[host].orders.confirm(number)

    def insist(self, call: Call) -> None:
        """Send orders that are not confirmed directly."""
        for place, (host, _) in enumerate(call.orders):
            if not call.outcomes[place] and host in self.peers:
                self.send_copies(host, self.peers[host].orders.copies())

    def say_directly(self, host: str, message: Any) -> None:
        """Send a message of the agents, behind the orders that are open there."""
        if host not in self.lost:
            self.send_copies(host, self.peer(host).orders.say())
            self.say(host, ("agents", message))

    def send_copies(self, host: str, copies: list[tuple[int, Any]]) -> None:
        spec = "x" * self.cluster.model.spec
        for number, procs in copies:
            copy = {"op": "spawn", "parent": _CLIENT, "spec": spec, "procs": procs}
            self.say(host, ("agents", {**copy, "number": number}))

    def take_order(self, call: int, first: int, _: int) -> None:
        """Take this host's share of an order; answer that it has arrived."""
        number, said, _, procs = self.share
        arrivals = self.peer(HOME).arrivals
        self.carry_out_orders(arrivals.by_tree(Place(number, said), procs))
        self.perform(self.casts.answered(call, first, b"", self.cluster.now))

    def carry_out_orders(self, orders: Iterable[Any]) -> None:
        for procs in orders:
            self.launch(procs)

    def launch(self, procs: list[dict[str, Any]]) -> None:
        """Start procs, one after the other."""
        cluster = self.cluster
        self.directory.admit(_CLIENT, HOME)
        spawned = self.directory.membership.spawn(_CLIENT, procs, "launcher", cluster.now)
        self.perform(self.directory.route(spawned))
        up = max(self.free, cluster.now)
        for proc in procs:
            assert proc["uid"] not in self.up, "launched twice"
            up += cluster.model.launch * (0.75 + cluster.random.random() / 2)
            self.up[proc["uid"]] = up
            for call, rank in self.early.pop(proc["uid"], ()):
                cluster.at(up - cluster.now, self, self.answer, call, rank)

    def answer_when_up(self, call: int, first: int, last: int) -> None:
        """Let ranks of this host answer when their procs run."""
        cluster = self.cluster
        for rank in range(first, last):
            uid = cluster.uids[rank]
            if uid in self.up:
                cluster.at(max(0.0, self.up[uid] - cluster.now), self, self.answer, call, rank)
            else:
                self.early.setdefault(uid, []).append((call, rank))

    def answer(self, call: int, rank: int) -> None:
        """Send the answer of a rank of this host."""
        outcome = bytes(self.cluster.model.result)
        if call in self.cluster.flat:
            self.say(HOME, ("done", call, rank, outcome))
            return
        self.perform(self.casts.answered(call, rank, outcome, self.cluster.now))

    def work_on(self, call: int, rank: int) -> None:
        """Let a rank of this host work on a call."""
        seconds = self.cluster.model.work * (0.5 + self.cluster.random.random())
        self.cluster.at(
            max(0.0, self.free - self.cluster.now) + seconds, self, self.answer, call, rank
        )

    def kill(self, uid: int) -> None:
        """Let a proc of this host exit."""
        verdict = Verdict(FAILED, "killed", SYSTEM, self.name)
        self.perform(self.directory.ended([(uid, verdict)]))

    # -- links -------------------------------------------------------------------------------------

    def say(self, to: str, message: tuple[Any, ...]) -> None:
        if to in self.lost:
            return
        peer = self.peer(to)
        self.list_entries(message)
        peer.said += 1
        data = pickle.dumps((peer.said, message), 5)
        peer.channel.send(CONTROL, [data])
        self.count("out", len(data))
        self.pump(peer)

    def count(self, way: str, size: int) -> None:
        self.messages[way] += 1
        self.messages[f"{way} bytes"] += size

    def peer(self, name: str) -> Peer:
        peer = self.peers.get(name)
        if peer is None:
            peer = self.peers[name] = Peer(self, self.cluster.named[name], dials=True)
            self.carry_out(peer, peer.channel.tick(self.cluster.now))
        return peer

    def pump(self, peer: Peer) -> None:
        """Queue the connection for sending, and set the alarm for the channel's deadline."""
        cluster = self.cluster
        channel = peer.channel
        if not peer.queued:
            peer.queued = True
            self.queue.append(peer)
            if len(self.queue) == 1:
                cluster.at(max(0.0, self.free - cluster.now), self, self.serve)
        deadline = channel.deadline
        if deadline is not None and deadline < peer.alarm:
            peer.alarm = deadline
            cluster.at(deadline - cluster.now, self, self.on_alarm, peer)

    def serve(self) -> None:
        """Send one packet of the first connection in the queue."""
        cluster = self.cluster
        peer = self.queue.popleft()
        packet = peer.channel.next_packet(cluster.now)
        if packet is None:
            peer.queued = False
        else:
            self.queue.append(peer)
            cluster.carry(self, peer, packet)
        if self.queue:
            cluster.at(max(0.0, self.free - cluster.now), self, self.serve)

    def beat(self, peer: Peer, payload: bytes) -> None:
        """Send a heartbeat, before all queued packets."""
        peer.channel.heartbeat(payload)
        packet = peer.channel.next_packet(self.cluster.now)
        if packet is not None:
            self.cluster.carry(self, peer, packet)
        self.pump(peer)

    def on_alarm(self, peer: Peer) -> None:
        peer.alarm = _NEVER
        if self.peers.get(peer.there.name) is peer:
            deadline = peer.channel.deadline
            if deadline is not None and deadline <= self.cluster.now:
                self.carry_out(peer, peer.channel.tick(self.cluster.now))
            self.pump(peer)

    def on_packet(self, sender: Node, link: int, packet: list[Any], size: int) -> None:
        peer = self.peers.get(sender.name)
        if peer is None or peer.link != link:
            return
        cluster = self.cluster
        model = cluster.model
        self.into = max(self.into, cluster.now - size / model.bandwidth) + size / model.bandwidth
        self.work(max(self.into, cluster.now), cluster.cost(packet))
        peer.suspected = False
        self.detector.heard(sender.name, cluster.now)
        self.carry_out(peer, peer.channel.on_packet(packet, cluster.now))
        self.pump(peer)

    def list_entries(self, message: tuple[Any, ...]) -> None:
        """Spend the time for the entries of a list in a message."""
        match message:
            case ("forward", _, _, route, _, shares):
                entries = len(route[0])
                self.work(self.cluster.now, self.cluster.model.share * len(shares))
            case ("reply", _, answers):
                entries = len(answers)
            case _:
                return
        self.work(self.cluster.now, self.cluster.model.entry * entries)

    def work(self, since: float, seconds: float) -> None:
        self.free = max(self.free, since) + seconds
        self.worked += seconds

    def carry_out(self, peer: Peer, effects: Iterable[Any]) -> None:
        cluster = self.cluster
        there = peer.there.name
        for effect in effects:
            match effect:
                case Deliver(_, data):
                    self.count("in", len(data))
                    number, message = pickle.loads(data)
                    self.list_entries(message)
                    peer.heard += 1
                    assert number == peer.heard, "lost, doubled or reordered"
                    self.on_message(there, message)
                case Heartbeat(payload):
                    self.judge(self.detector.on_heartbeat(there, payload, cluster.now))
                case Dial():
                    self.dial(peer)
                case Connected(again):
                    if not again:
                        peer.channel.be_patient(cluster.model.timeout)
                        self.detector.add(there, cluster.now)
                        self.watch()
                case Ended():
                    self.pump(peer)  # sends the BYE packet
                    self.lose(peer)
        self.watch()

    def dial(self, peer: Peer) -> None:
        """Open another connection; see `runtime.hosts.peer_host`."""
        cluster = self.cluster
        peer.dialing += 1
        seconds = cluster.dial_time(self, peer.there)
        limit = max(cluster.model.timeout / 3, 0.5)
        done = self.dialed if seconds <= limit else self.dial_failed
        cluster.at(min(seconds, limit), self, done, peer)

    def dialed(self, peer: Peer) -> None:
        cluster = self.cluster
        there = peer.there
        peer.dialing -= 1
        if self.peers.get(there.name) is not peer or there.dead or self.name in there.lost:
            return
        if peer.link:
            doubted = peer.suspected or cluster.now < peer.deaf_until
            if not doubted or cluster.now < peer.fresh_until:
                return
            peer.fresh_until = cluster.now + cluster.model.timeout / _TRIES
        other = there.peers.get(self.name)
        if other is None:
            other = there.peers[self.name] = Peer(there, self, dials=False)
        elif other.dials:
            if there.number < self.number or other.channel.met:
                return
            other.dials = False
            other.channel.answer()
        link = next(cluster.links)
        for node, end in ((self, peer), (there, other)):
            end.link = link
            end.arrives = 0.0
            end.channel.opened(cluster.now)
            node.pump(end)

    def dial_failed(self, peer: Peer) -> None:
        peer.dialing -= 1
        if self.peers.get(peer.there.name) is peer and not peer.link and not peer.dialing:
            peer.channel.lost(self.cluster.now, self.cluster.random.random())
            self.pump(peer)

    # -- silent peers ------------------------------------------------------------------------------

    def watch(self) -> None:
        cluster = self.cluster
        detector, others = self.detector.deadline, (self.casts.deadline, self.directory.deadline)
        deadline = min(time for time in (detector, *others) if time is not None)
        if deadline < self.alarm:
            self.alarm = deadline
            cluster.at(max(0.0, deadline - cluster.now), self, self.look)

    def look(self) -> None:
        self.alarm = _NEVER
        now = self.cluster.now
        self.judge(self.detector.tick(now))
        if self.casts.deadline is not None and self.casts.deadline <= now:
            self.perform(self.casts.tick(now))
        if self.directory.deadline <= now:
            self.perform(self.directory.tick(now))
        self.watch()

    def judge(self, effects: Iterable[detectors.Effect]) -> None:
        cluster = self.cluster
        for effect in effects:
            peer = self.peers.get(str(effect.peer))
            if peer is None:
                continue
            if isinstance(effect, detectors.SendHeartbeat):
                self.beat(peer, effect.payload)
            elif isinstance(effect, detectors.Suspect):
                cluster.suspicions += 1
                if effect.deaf:
                    peer.deaf_until = cluster.now + cluster.model.timeout / _TRIES
                    self.try_once(peer)
                else:
                    peer.suspected = True
                    self.try_again(peer)
            else:
                self.carry_out(peer, peer.channel.end("unreachable"))

    def try_again(self, peer: Peer) -> None:
        if peer.suspected and self.peers.get(peer.there.name) is peer:
            self.try_once(peer)
            later = self.cluster.model.timeout / (3 * _TRIES)
            self.cluster.at(later, self, self.try_again, peer)

    def try_once(self, peer: Peer) -> None:
        if peer.dials and peer.dialing < _DIALS:
            self.dial(peer)

    def lose(self, peer: Peer) -> None:
        """Give up that host: its timeout is over, or its session has ended."""
        cluster = self.cluster
        there = peer.there
        del self.peers[there.name]
        self.detector.remove(there.name)
        self.lost[there.name] = cluster.now
        cluster.give_up(self, there)
        self.perform(self.casts.host_lost(there.name, "unreachable", cluster.now))
        verdict = Verdict(FAILED, f"{there.name} is unreachable", INFRASTRUCTURE)
        self.perform(self.directory.host_lost(there.name, verdict))
        if there.name == HOME:
            self.dead = True  # an agent that has lost its job exits


class Cluster:
    """`hosts` hosts, and the driver's host, which is number 0; see the header."""

    def __init__(
        self, hosts: int, model: Model = _PLAIN, *, seed: int = 1, fanout: int = FANOUT
    ) -> None:
        self.model = model
        self.fanout = fanout
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Node | None, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self.links = itertools.count(1)
        self._uids = itertools.count(1)
        self._numbers = itertools.count(1)
        self._cuts: list[tuple[float, frozenset[int], bool, bool]] = []
        self.calls: dict[int, Call] = {}
        self.flat: set[int] = set()
        self.sizes: dict[int, int] = {}  # bytes of a cast's payload
        self.shares: dict[int, dict[str, bytes]] = {}  # the shares of hosts in an order
        self.at_ranks: dict[int, Callable[[Node, int, int, int], None]] = {}
        self.level = 0  # depth in the tree of the forward that is being handled
        self.suspicions = 0
        self.given_up: list[GivenUp] = []
        self.nodes = [Node(self, number) for number in range(hosts + 1)]
        self.named = {node.name: node for node in self.nodes}
        self.driver, *self.hosts = self.nodes
        self.uids: list[int] = []
        for host in self.hosts:
            self.driver.peer(host.name)
        self.run(60.0, lambda: all(self.is_up(host) for host in self.hosts[-1:]))
        self.run(60.0, lambda: all(self.is_up(host) for host in self.hosts))

    # -- time --------------------------------------------------------------------------------------

    def at(self, delay: float, node: Node | None, call: Callable[..., None], *args: Any) -> None:
        """Call `call` after a delay, unless `node` is dead by then."""
        self.when(self.now + delay, node, call, *args)

    def when(self, time: float, node: Node | None, call: Callable[..., None], *args: Any) -> None:
        """Call `call` at a time, unless `node` is dead by then."""
        heapq.heappush(self._events, (time, next(self._order), node, call, args))

    def run(self, seconds: float = _NEVER, until: Callable[[], bool] | None = None) -> None:
        """Let `seconds` pass, or less if `until` becomes true before."""
        events = self._events
        end = self.now + seconds
        while events and events[0][0] <= end:
            when, _, node, call, args = heapq.heappop(events)
            self.now = max(self.now, when)
            if node is None or not node.dead:
                call(*args)
                if until is not None and until():
                    return
        if end < _NEVER:
            self.now = end

    # -- the network -------------------------------------------------------------------------------

    def cost(self, packet: list[Any]) -> float:
        kind = HEADER.unpack(packet[0])[0]
        return self.model.beat if kind in (PING, ACK) else self.model.handling

    def carry(self, sender: Node, peer: Peer, packet: list[Any]) -> None:
        model = self.model
        size = sum(map(len, packet))
        cost = self.cost(packet)
        sender.work(self.now, cost)
        segments = -(-size // _SEGMENT)
        sender.out = max(self.now + cost, sender.out) + (size + 66 * segments) / model.bandwidth
        receiver = peer.there
        trip = self.trip(sender, receiver, sender.out, segments, model.rto)
        arrives = peer.arrives = max(sender.out + trip, peer.arrives)
        if arrives == _NEVER:
            return
        data = [b"".join(packet)] if len(packet) == 1 else [packet[0], b"".join(packet[1:])]
        # An absolute time: adding a delay would round, and change the order of equal arrivals.
        self.when(arrives, receiver, receiver.on_packet, sender, peer.link, data, size)

    def trip(self, sender: Node, receiver: Node, when: float, segments: int, rto: float) -> float:
        """Return the seconds that a packet takes to that host; infinity if it never arrives."""
        model = self.model
        chance = self.random.random
        trip = model.latency + chance() * model.jitter
        if segments > 1 and chance() > (1 - model.loss) ** (segments - 1):
            trip += 2 * model.latency + model.jitter  # a later segment reveals the loss
        wait = 0.0
        while self._is_cut(sender, receiver, when + wait) or chance() < model.loss:
            wait += rto
            rto *= 2
            if wait > 1000:
                return _NEVER
        return wait + trip

    def dial_time(self, sender: Node, receiver: Node) -> float:
        seconds = 0.0
        for number in range(_DIAL_TRIPS):
            one, other = (sender, receiver) if number % 2 == 0 else (receiver, sender)
            rto = self.model.rto if number > 1 else _SYN_RTO
            seconds += self.trip(one, other, self.now + seconds, 1, rto)
        return seconds + _DIAL_TRIPS * self.model.handling

    def cut(
        self, some: Iterable[Node], seconds: float, *, to: bool = True, of: bool = True
    ) -> None:
        """Drop all packets to these hosts, from them, or both, for `seconds`."""
        numbers = frozenset(node.number for node in some)
        self._cuts.append((self.now + seconds, numbers, to, of))

    def _is_cut(self, sender: Node, receiver: Node, when: float) -> bool:
        for until, some, to, of in self._cuts:
            if when < until:
                inside, into = sender.number in some, receiver.number in some
                if (to and into and not inside) or (of and inside and not into):
                    return True
        return False

    @property
    def links_up(self) -> int:
        """Return the number of pairs of hosts with a connection."""
        return sum(peer.channel.up for node in self.nodes for peer in node.peers.values()) // 2

    @property
    def replayed(self) -> int:
        """Return the number of packets that were sent again on another connection."""
        peers = [peer for node in self.nodes for peer in node.peers.values()]
        return sum(peer.channel.replayed for peer in peers)

    def is_up(self, host: Node) -> bool:
        """Whether the driver has a connection to the host."""
        return self.driver.peers[host.name].channel.up

    def give_up(self, node: Node, other: Node) -> None:
        """Note that `node` has given up `other`."""
        when = self.now
        cut = self._is_cut(node, other, when) or self._is_cut(other, node, when)
        self.given_up.append(GivenUp(when, node.number, other.number, other.dead or cut))

    # -- the driver --------------------------------------------------------------------------------

    def _begin(self, ranks: int | None = None) -> Call:
        ranks = PROCS * len(self.hosts) if ranks is None else ranks
        call = Call(next(self._numbers), self.now, ranks)
        self.calls[call.number] = call
        return call

    def order(
        self, hosts: int, shares: dict[str, bytes], orders: list[tuple[str, int]], size: int
    ) -> Call:
        """Begin the cast of an order to spawn, which each of its hosts answers once."""
        call = self._begin(hosts)
        call.orders = orders
        self.sizes[call.number] = size
        self.shares[call.number] = shares
        self.at_ranks[call.number] = Node.take_order
        return call

    def _cast(self, size: int, at_ranks: Callable[[Node, int, int, int], None]) -> Call:
        call = self._begin()
        self.sizes[call.number] = size
        self.at_ranks[call.number] = at_ranks
        starts = range(0, PROCS * len(self.hosts) + 1, PROCS)
        names = [host.name for host in self.hosts]
        driver = self.driver
        driver.perform(driver.casts.cast(call.number, names, starts, self.fanout, self.now))
        return call

    def call(self) -> Call:
        """Call all ranks, through the tree."""

        def work(node: Node, call: int, first: int, last: int) -> None:
            for rank in range(first, last):
                node.work_on(call, rank)

        return self._cast(self.model.argument, work)

    def call_one_by_one(self) -> Call:
        """Call all ranks without a tree: send a message to each."""
        call = self._begin()
        self.flat.add(call.number)
        call.depth = 1
        for rank in range(len(call.outcomes)):
            host = self.hosts[rank // PROCS]
            self.driver.say(host.name, ("call", call.number, rank, bytes(self.model.argument)))
        return call

    def _procs(self) -> dict[str, list[dict[str, Any]]]:
        """Return new procs as a mesh describes them, by host."""
        ranks = PROCS * len(self.hosts)
        base = self.random.getrandbits(40) << 20
        self.uids = [base | rank for rank in range(ranks)]
        entries = [
            {
                "uid": uid,
                "rank": rank,
                "label": f"anon-{rank}",
                "host": self.hosts[rank // PROCS].name,
            }
            for rank, uid in enumerate(self.uids)
        ]
        return {
            host.name: entries[PROCS * number : PROCS * (number + 1)]
            for number, host in enumerate(self.hosts)
        }

    def spawn(self) -> Call:
        """Spawn a mesh of `PROCS` procs on each host, through the tree, and wait for all."""
        driver, procs = self.driver, self._procs()
        spec = {"spec": "x" * self.model.spec}
        books = driver.directory
        if len(procs) > self.fanout:
            driver.perform(books.spawn_down(_CLIENT, spec, procs, self.fanout))
        else:
            for host, those in procs.items():
                driver.perform(books.spawn_there(_CLIENT, host, spec, those))
        return self._cast(self.model.argument, Node.answer_when_up)

    def spawn_one_by_one(self) -> Call:
        """Spawn such a mesh without a tree: the driver's host sends to each other host."""
        driver = self.driver
        spec = {"spec": "x" * self.model.spec}
        for host, procs in self._procs().items():
            driver.perform(driver.directory.spawn_there(_CLIENT, host, spec, procs))
        call = self._begin()
        self.flat.add(call.number)
        call.depth = 1
        for rank in range(len(call.outcomes)):
            host = self.hosts[rank // PROCS]
            driver.say(host.name, ("ready", call.number, rank, bytes(self.model.argument)))
        return call

    def direct(self, number: int, rank: int) -> None:
        call = self.calls[number]
        call.take(rank, 1)
        if call.answered == len(call.outcomes):
            call.ended = max(self.driver.free, self.now)

    def finish(self, call: Call, seconds: float = 100.0) -> Call:
        """Let time pass until all ranks have an outcome."""
        self.run(seconds, lambda: call.ended is not None)
        assert call.ended is not None, "not every rank is accounted for"
        assert 0 not in call.outcomes
        return call
