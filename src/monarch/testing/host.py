"""A simulated host: an agent made of the real protocol cores, and processes that are `SimProc`s.

The agent uses the real `Membership` (the membership of one host) and `Directory` (of all hosts). It
speaks the real control protocol (JSON in CONTROL frames) with each process of its host, over links
with a latency, and with the agents of the other hosts. It notices an exit a moment after it occurs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch._engine.base.home import HOME
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, Verdict
from monarch._engine.protocol.directory import (
    Admit,
    Attach,
    Directory,
    Effect,
    Keep,
    Refuse,
    Send,
    Spread,
    Tunnel,
)
from monarch._engine.protocol.membership import Condemn, Hand, Kill, Membership, Tell
from monarch._engine.protocol.session import detector as detectors
from monarch._engine.runtime.agent.agent import _cause
from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.failover.keeper import FAREWELL
from monarch._engine.wire.frame import CAST, CONTROL, pack
from monarch.testing.driver import EPOCH, SimTimer
from monarch.testing.link import SimLink, SimSocket, socket_pair
from monarch.testing.network import SimPeer
from monarch.testing.scheduler import Entry, Place

if TYPE_CHECKING:
    from monarch._engine.runtime.cast.tunnel_end import Way
    from monarch.testing.proc import SimProc
    from monarch.testing.world import World

__all__ = ["SimHost"]

_LAUNCH = 1.5e-3
"""The average start time of a process, in seconds."""

_REAP = 300e-6
"""The average time until an exit is noticed, in seconds."""

_UNLIMITED = 1 << 60


class SimHost:
    """A simulated host. `ident` is its number; `client` the uid of the script's process."""

    def __init__(self, world: World, ident: int, client: int) -> None:
        self.world = world
        self.ident = ident
        self.hostname = f"host{ident}"
        self.name = self.hostname if ident else HOME  # as agents call it
        self.place = Place(self.hostname)
        self.membership = Membership(client)
        self.directory = Directory(self.membership, self.name)
        self.detector = detectors.Detector()
        self.peers: dict[str, SimPeer] = {}
        self.casts = CastRelay(self, self.name)
        self._coming: dict[tuple[int, int], SimLink] = {}  # link ends that await their receiver
        self._parents: dict[int, SimLink] = {}  # links to the parents of procs not spawned yet
        self.lost: set[str] = set()  # hosts that were given up
        self._given_up: dict[str, Verdict] = {}  # verdicts on hosts that HOME gave up
        self._watch: Entry | None = None
        self.client = client
        self.procs: dict[int, SimProc] = {}  # procs that have not exited
        self._control: dict[int, SimLink] = {}
        self._ends: list[tuple[int, Verdict]] = []  # exits that are not reported yet
        self._alarm: Entry | None = None

    # -- members ---------------------------------------------------------------------------------

    def admit(self, proc: SimProc) -> SimSocket:
        """Make a control link to `proc`; return the end for `proc`."""
        mine, theirs = socket_pair(self.world.scheduler)
        link = mine.link
        link.uid = proc.uid
        link.attach(self.place, proc.label, self._read, _UNLIMITED, _UNLIMITED)
        self._control[proc.uid] = link
        self.procs[proc.uid] = proc
        return theirs

    def _read(self, link: SimLink) -> bool:
        frames = link.receive(None)
        for frame in frames:
            if frame.kind == CAST:
                self.casts.begin(link.uid, frame)
                continue
            message = json.loads(frame.body)
            fds = link.take_fds(frame.nfd)
            getattr(self, f"_on_{message['op']}")(link.uid, message, fds)
        if link.lost is not None and link.fileno >= 0:
            link.fileno = -1
            link.close()
            if link.uid == self.client:
                self.perform(self.directory.exited([self.client]))
                self.perform(self.membership.client_lost())
                self.world.agent_process.end()
        return bool(frames)

    def tell(self, uid: int, notice: dict[str, Any], fds: Sequence[Any] = ()) -> None:
        """Send a notice to a process of this host; close `fds` if the process has exited."""
        link = self._control.get(uid)
        if link is not None:
            body = json.dumps(notice, separators=(",", ":")).encode()
            link.send(pack(CONTROL, 0, 0, 0, b"", body, nfd=len(fds)), list(fds))
            return
        for end in fds:
            end.close("nobody is there to take it")

    # -- requests --------------------------------------------------------------------------------

    def _on_spawn(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        spec, procs = message["spec"], message["procs"]
        hosts = [proc.get("host", HOME) for proc in procs]
        for host in dict.fromkeys(hosts):
            picked = [index for index, other in enumerate(hosts) if other == host]
            theirs = [procs[index] for index in picked]
            ends = [fds[index] for index in picked]
            if host == self.name:
                self.spawn(asker, spec, theirs, ends)
            else:
                for proc, end in zip(theirs, ends, strict=True):
                    self._coming[asker, proc["uid"]] = end
                self.perform(self.directory.spawn_there(asker, host, spec, theirs))

    def spawn(
        self, parent: int, spec: dict[str, Any], procs: list[dict[str, Any]], ends: list[SimLink]
    ) -> None:
        """Start procs on this host; `ends` are their links to the parent."""
        world = self.world
        scheduler = world.scheduler
        now, patience = scheduler.now, spec["ready_timeout"]
        self.perform(self.directory.spawn_here(parent, procs, "launcher", now, patience))
        for fields, end in zip(procs, ends, strict=True):
            uid = fields["uid"]
            self.membership.ready(uid)
            proc = world.new_proc(self, uid, {**spec, **fields, "parent": parent})
            scheduler.pause(proc.place)  # until `_started`
            proc.adopt_agent(self.admit(proc))  # type: ignore[arg-type]
            proc.adopt(SimSocket(end), parent)  # type: ignore[arg-type]
            delay = _LAUNCH * (0.5 + scheduler.random.random())
            scheduler.at(scheduler.now + delay, self.place, self._started, proc)
        uids = [fields["uid"] for fields in procs]
        self.perform(self.directory.started(uids, scheduler.now))

    def _started(self, proc: SimProc) -> None:
        if not proc.place.dead:
            self.world.record("began", proc.label)
            self.world.scheduler.unpause(proc.place)

    def _on_introduce(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        to = message["to"]
        self._coming[asker, to] = fds[0]
        self.perform(self.directory.introduce(asker, to, self.world.scheduler.now), fds)

    def _on_autopsy(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        now = self.world.scheduler.now
        self.perform(self.directory.autopsy(asker, message["uid"], now))

    def _on_cast_over(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        self.casts.over(asker, message["number"])

    def _on_kill(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        self.perform(self.directory.kill(message["uids"]))

    def _on_ready(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        """Do nothing: `spawn` reports that the process is ready."""

    def _on_preload(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        """Do nothing: there is one interpreter, so the modules are loaded."""

    def _on_logging(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        mine, asks = self.directory.split(asker, message)
        self.perform(asks)
        for uid, rank in zip(mine["uids"], mine["ranks"], strict=True):
            notice = {
                "op": "log_level",
                "from": asker,
                "port": message["port"],
                "rank": rank,
            }
            self.tell(uid, notice)

    def _on_log_flush(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        self.tell(asker, {"op": "log_flushed", "id": message["id"], "others": 0})

    def _on_attach(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        for host in message["hosts"]:
            lost = host in self.lost
            self.perform(self.directory.host_found(host))
            if lost:
                self.world.attach(self, host)
            self.tell(asker, {"op": "attached", "host": host, "error": None})

    def _on_detach(self, asker: int, message: dict[str, Any], fds: list[Any]) -> None:
        for host in message["hosts"]:
            peer = self.peers.get(host)
            if peer is not None:
                peer.send({"op": "leave"})
                del self.peers[host]
                self.detector.remove(host)
            self.lost.add(host)
            self.perform(self.directory.host_left(host, f"host {host} was released"))
        self.tell(asker, {"op": "detached", "number": message["number"]})  # this host stays up

    # -- other hosts -----------------------------------------------------------------------------

    def peer(self, name: str) -> SimPeer | None:
        """Return the channel to another agent, made on first use; None once it was given up."""
        peer = self.peers.get(name)
        if peer is None and name not in self.lost:
            self.world.connect(self, self.world.hosts_by_name[name])
            peer = self.peers.get(name)
        return peer

    def connect(self, other: SimHost) -> SimPeer:
        """Make a channel to `other`, and monitor it by heartbeats."""
        peer = self.peers[other.name] = SimPeer(self, other)
        self.detector.add(other.name, self.world.scheduler.now)
        self._set_watch()
        return peer

    def on_message(self, peer: SimPeer, message: dict[str, Any]) -> None:
        """Process a message of another agent."""
        op, name = message["op"], peer.other.name
        now = self.world.scheduler.now
        if op == "open":
            self._on_open(peer, message)
        elif op == "spawn":
            parent, procs = message["parent"], message["procs"]
            self.directory.admit(parent, name)
            ends = [self._parents.pop(proc["uid"]) for proc in procs]
            self.spawn(parent, message["spec"], procs, ends)
        elif op == "ask":
            request = message["request"]
            if request["op"] == "kill":
                self.perform(self.directory.kill(request["uids"]))
                return
            self.directory.admit(message["from"], name)
            if request["op"] == "logging":
                self._on_logging(message["from"], request, [])
            else:
                self.perform(self.directory.autopsy(message["from"], request["uid"], now))
        elif op == "leave":
            for other in list(self.peers.values()):
                other.give_up(FAREWELL)
            self.world.crash_agent(self)
        elif op == "lost":
            self._give_up(message["host"], Verdict.from_fields(message["end"]))
        else:
            if op == "found":
                self.lost.discard(message["host"])
            if op == "left":
                self.casts.caller_left(peer.way, message["uid"])
            self.perform(self.directory.heard(name, message, now))

    def _on_open(self, peer: SimPeer, message: dict[str, Any]) -> None:
        mine, theirs = socket_pair(self.world.scheduler)
        peer.join(message["lane"], mine.link, message["far"], message["near"], ours=False)
        if message["first"]:
            self._parents[message["far"]] = theirs.link
            return
        now = self.world.scheduler.now
        effects = self.directory.opened(peer.other.name, message["near"], message["far"], now)
        if not effects:
            theirs.link.close("nobody takes it")
        self.perform(effects, [theirs.link])

    def cast_way(self, host: str, *, dial: bool) -> Way | None:
        """See `Carrier`."""
        peer = self.peer(host) if dial else self.peers.get(host)
        return None if peer is None else peer.way

    def cast_comes(self, near: int, far: int) -> bool:
        """See `Carrier`."""
        return (near, far) in self._coming

    def cast_tell(self, proc: int, frame: bytes) -> None:
        """See `Carrier`."""
        link = self._control.get(proc)
        if link is not None:
            link.send(frame)

    def cast_later(self, delay: float, action: Callable[[], None]) -> SimTimer:
        """See `Carrier`."""
        scheduler = self.world.scheduler
        when = scheduler.now + delay
        return SimTimer(when, action, scheduler, scheduler.aside(when, self.place, action))

    def cast_now(self) -> float:
        """See `Carrier`."""
        return self.world.scheduler.now

    def on_heartbeat(self, peer: SimPeer, payload: bytes) -> None:
        """Process a heartbeat of another agent."""
        now = self.world.scheduler.now
        self._judge(self.detector.on_heartbeat(peer.other.name, payload, now))

    def _look(self) -> None:
        self._watch = None
        self._judge(self.detector.tick(self.world.scheduler.now))

    def _judge(self, effects: Sequence[detectors.Effect]) -> None:
        for effect in effects:
            peer = self.peers.get(str(effect.peer))
            if peer is None:
                continue
            if isinstance(effect, detectors.SendHeartbeat):
                peer.heartbeat(effect.payload)
            elif isinstance(effect, detectors.Unreachable):
                seconds = self.world.scheduler.now - effect.since
                what = (
                    "it received nothing from this host"
                    if effect.deaf
                    else "nothing arrived from it"
                )
                peer.give_up(f"{what} for {seconds:.1f} s")
        self._set_watch()

    def _set_watch(self) -> None:
        deadline = self.detector.deadline
        if self._watch is None and deadline is not None:
            self._watch = self.world.scheduler.aside(deadline, self.place, self._look)

    def on_lost(self, peer: SimPeer, reason: str) -> None:
        """Give up a host whose channel has ended: report the loss of its processes."""
        other = peer.other
        current = self.peers.get(other.name) is peer
        if current:
            self.lost.add(other.name)
            del self.peers[other.name]
            self.detector.remove(other.name)
        self.casts.way_over(peer.way, reason)
        if not current:
            return
        self.world.record("lost host", self.hostname, other.hostname)
        known = self._given_up.pop(other.name, None)
        if known is not None:
            self.perform(self.directory.host_lost(other.name, known))
            return
        if reason.endswith(FAREWELL):
            self.perform(self.directory.host_left(other.name, f"host {other.name} was released"))
            return
        error = f"host {other.hostname} is unreachable from {self.hostname}: {reason}"
        when = EPOCH + self.world.scheduler.now
        verdict = Verdict(FAILED, error, INFRASTRUCTURE, other.hostname, 0, when)
        self.perform(self.directory.host_lost(other.name, verdict))
        if other.name == HOME:
            self.perform(self.membership.client_lost())

    def _give_up(self, name: str, verdict: Verdict) -> None:
        """Give up a host that HOME cannot reach, with the verdict of HOME."""
        peer = self.peers.get(name)
        if peer is not None:
            self._given_up[name] = verdict
            peer.give_up(verdict.error)
        elif name != self.name:
            self.perform(self.directory.host_lost(name, verdict))

    # -- exits -----------------------------------------------------------------------------------

    def exited(self, proc: SimProc, status: int) -> None:
        """Have the agent notice, after a delay, that a process of this host has exited."""
        scheduler = self.world.scheduler
        delay = _REAP * (0.5 + scheduler.random.random())
        scheduler.at(scheduler.now + delay, self.place, self._reap, proc, status)

    def _reap(self, proc: SimProc, status: int) -> None:
        link = self._control.get(proc.uid)
        if link is None:
            return  # the agent has already condemned this process
        while link.fileno >= 0 and self._read(link):
            pass  # requests that the process sent before it exited are still carried out
        self.perform(self.directory.exited([proc.uid]))
        kind, text, cause = _cause({"status": status})
        self._left(proc, kind, text, cause)

    def _left(self, proc: SimProc, kind: str, text: str, cause: str = INFRASTRUCTURE) -> None:
        self.procs.pop(proc.uid, None)
        self.casts.caller_gone(proc.uid, for_good=True)
        link = self._control.pop(proc.uid, None)
        if link is not None and link.fileno >= 0:
            link.fileno = -1
            link.close()
        when = EPOCH + self.world.scheduler.now
        verdict = Verdict(kind, text, cause, self.hostname, proc.pid, when)
        if not self._ends:
            self.world.scheduler.soon(self.place, self._announce)
        self._ends.append((proc.uid, verdict))

    def _announce(self) -> None:
        ends, self._ends = self._ends, []
        self.perform(self.directory.ended(ends))

    # -- effects of the protocol cores -----------------------------------------------------------

    def perform(self, effects: Sequence[Effect], fds: Sequence[Any] = ()) -> None:
        """Carry out effects of the protocol cores; `fds` go to the receivers of handed links."""
        for effect in effects:
            if isinstance(effect, Tell):
                self.tell(effect.to, effect.notice)
            elif isinstance(effect, Hand):
                self._coming.pop((effect.sender, effect.to), None)
                self.tell(effect.to, {"op": "peer", "uid": effect.sender}, fds)
            elif isinstance(effect, Send):
                peer = self.peer(effect.host)
                if peer is not None:
                    peer.send(effect.message)
            elif isinstance(effect, Tunnel):
                end = self._coming.pop((effect.near, effect.far))
                peer = self.peer(effect.host)
                if peer is None:
                    end.close("its host is lost")
                    self.casts.settled(effect.near)
                else:
                    peer.open(end, effect.near, effect.far, effect.first)
            elif isinstance(effect, Refuse):
                self._coming.pop((effect.near, effect.far)).close("nobody takes it")
                self.casts.settled(effect.near)
            elif isinstance(effect, Keep):
                self._coming[effect.near, effect.far] = fds[0]
            elif isinstance(effect, Admit):
                end = self._coming.pop((effect.near, effect.far))
                hands = self.directory.introduce_here(effect.near, effect.far, stream=False)
                if not hands:
                    end.close("nobody takes it")
                self.perform(hands, [end])
            elif isinstance(effect, Attach):
                self.world.attach(self, effect.host)
            elif isinstance(effect, Spread):
                for other in list(self.peers.values()):
                    other.send(effect.message)
            elif isinstance(effect, Kill):
                for uid in effect.uids:
                    self._kill(uid)
            elif isinstance(effect, Condemn):
                proc = self.procs[effect.uid]
                self._kill(effect.uid)
                self._left(proc, FAILED, effect.error)
        self._set_alarm()

    def _kill(self, uid: int) -> None:
        proc = self.procs.get(uid)
        if proc is not None:
            self.world.exit(proc, 9)

    def _set_alarm(self) -> None:
        scheduler = self.world.scheduler
        deadline = self.directory.deadline
        if self._alarm is not None:
            if self._alarm[0] <= deadline:
                return
            scheduler.cancel(self._alarm)
            self._alarm = None
        if deadline < math.inf:
            self._alarm = scheduler.at(deadline, self.place, self._tick)

    def _tick(self) -> None:
        self._alarm = None
        self.perform(self.directory.tick(self.world.scheduler.now))
