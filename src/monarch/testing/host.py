"""A simulated host: a shell of the agent's core, and processes that are `SimProc`s.

The agent is the real `AgentCore`. It speaks the real control protocol (JSON in CONTROL frames) with
each process of its host, over links with a latency, and with the agents of the other hosts.
Simulated are the launch of a process, the moment at which an exit is noticed, and the sessions with
other hosts (monarch.testing.network).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from monarch._engine.base.home import HOME
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import Verdict
from monarch._engine.launch.exit_status import why_exited
from monarch._engine.protocol.failover import FAREWELL
from monarch._engine.runtime.agent import control
from monarch._engine.runtime.agent.core import AgentCore
from monarch._engine.runtime.io.heartbeats import HeartbeatMonitor
from monarch._engine.wire.frame import CAST
from monarch.testing.driver import EPOCH, SimTimer
from monarch.testing.link import SimLink, SimSocket, socket_pair
from monarch.testing.network import SimPeer
from monarch.testing.scheduler import Place

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


class _Timers:
    """The timers of an agent's heartbeats, which are background steps."""

    def __init__(self, host: SimHost) -> None:
        self.call_later = host.later


class SimHost:
    """A simulated host. `ident` is its number; `client` the uid of the script's process."""

    def __init__(self, world: World, ident: int, client: int) -> None:
        self.world = world
        self.ident = ident
        self.hostname = f"host{ident}"
        self.name = self.hostname if ident else HOME  # as agents call it
        self.place = Place(self.hostname)
        self.core: AgentCore[SimLink] = AgentCore(self, self, self, client, self.name)
        self.monitor = HeartbeatMonitor(_Timers(self), settings.host_timeout)
        self.peers: dict[str, SimPeer] = {}
        self.lost: set[str] = set()  # hosts that were given up
        self.client = client
        self.procs: dict[int, SimProc] = {}  # procs that have not exited
        self._ending = False
        self._control: dict[int, SimLink] = {}

    # -- control links ---------------------------------------------------------------------------

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
                self.core.casts.begin(link.uid, frame)
            else:
                op, message = control.request(frame.body)
                self._on_request(link.uid, op, message, link.take_fds(frame.nfd))
        if link.lost is not None and link.fileno >= 0:
            link.fileno = -1
            link.close()
            if link.uid == self.client:
                self.end()
        return bool(frames)

    def _on_request(self, asker: int, op: str, message: Any, ends: list[SimLink]) -> None:
        core = self.core
        if op == "spawn":
            core.spawn(asker, message["spec"], message["procs"], ends)
        elif op == "introduce":
            core.introduce(asker, message["to"], ends[0], message.get("for", ""))
        elif op == "autopsy":
            core.autopsy(asker, message["uid"])
        elif op == "cast_over":
            core.casts.over(asker, message["number"])
        elif op == "kill":
            core.kill(message["uids"])
        elif op == "logging":
            core.set_output(asker, message)
        elif op == "log_flush":
            self.tell(asker, {"op": "log_flushed", "id": message["id"], "others": 0})
        elif op == "attach":
            self._attach(asker, list(message["hosts"]))
        elif op == "detach":
            answer = {"op": "detached", "number": message["number"]}
            core.detach(message["hosts"], lambda: self.tell(asker, answer), shutdown=False)
        elif op not in ("ready", "preload"):  # a process is ready, and all modules are loaded
            raise NotImplementedError(f"the simulated agent cannot do this: {op}")

    def _attach(self, asker: int, hosts: Sequence[str]) -> None:
        for host in hosts:
            lost = host in self.lost
            self.core.perform(self.core.directory.host_found(host))
            if lost:
                self.world.attach(self, host)
            self.tell(asker, {"op": "attached", "host": host, "error": None})

    # -- processes (see `Members`) ---------------------------------------------------------------

    def tell(self, uid: int, notice: dict[str, Any]) -> None:
        """See `Members`."""
        self.send(uid, control.encode(notice))

    def hand(self, uid: int, notice: dict[str, Any], end: SimLink) -> None:
        """See `Members`."""
        link = self._control.get(uid)
        if link is None:
            end.close("nobody is there to take it")
        else:
            link.send(control.encode(notice, 1), [end])

    def send(self, uid: int, frame: bytes) -> None:
        """See `Members`."""
        link = self._control.get(uid)
        if link is not None:
            link.send(frame)

    def discard(self, end: SimLink) -> None:
        """See `Members`."""
        end.close("nobody takes it")

    def launcher(self, spec: dict[str, Any]) -> Hashable:
        """See `Members`."""
        return "launcher"

    def localized(self, spec: dict[str, Any]) -> dict[str, Any]:
        """See `Members`."""
        return spec

    def launch(
        self,
        launcher: Any,
        parent: int,
        spec: dict[str, Any],
        procs: Sequence[dict[str, Any]],
        ends: Sequence[SimLink],
    ) -> Verdict | None:
        """See `Members`."""
        world = self.world
        scheduler = world.scheduler
        for fields, end in zip(procs, ends, strict=True):
            uid = fields["uid"]
            self.core.membership.ready(uid)
            proc = world.new_proc(self, uid, {**spec, **fields, "parent": parent})
            scheduler.pause(proc.place)  # until `_started`
            proc.adopt_agent(self.admit(proc))  # type: ignore[arg-type]
            proc.adopt(SimSocket(end), parent)  # type: ignore[arg-type]
            delay = _LAUNCH * (0.5 + scheduler.random.random())
            scheduler.at(scheduler.now + delay, self.place, self._started, proc)
        return None

    def _started(self, proc: SimProc) -> None:
        if not proc.place.dead:
            self.world.record("began", proc.label)
            self.world.scheduler.unpause(proc.place)

    def kill(self, uid: int) -> None:
        """See `Members`."""
        proc = self.procs.get(uid)
        if proc is not None:
            self.world.exit(proc, 9)

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
        self.core.exited(proc.uid)
        self.core.left(proc.uid, self.verdict(proc.uid, *why_exited(status)))

    def verdict(self, uid: int, kind: str, text: str, cause: str) -> Verdict:
        """See `Members`."""
        when = EPOCH + self.world.scheduler.now
        return Verdict(kind, text, cause, self.hostname, self.procs[uid].pid, when)

    def forget(self, uid: int, verdict: Verdict) -> None:
        """See `Members`."""
        del self.procs[uid]
        link = self._control.pop(uid)
        if link.fileno >= 0:
            link.fileno = -1
            link.close()

    def flush(self, uid: int, verdict: Verdict, then: Callable[[Verdict], None]) -> None:
        """See `Members`. Output of simulated processes is not captured."""
        then(verdict)

    def set_output(self, request: dict[str, Any], then: Callable[[set[int]], None]) -> None:
        """See `Members`."""
        then(set())

    # -- the agent's process and clock (see `Shell`) ---------------------------------------------

    def now(self) -> float:
        """See `Shell`."""
        return self.world.scheduler.now

    def soon(self, action: Callable[[], None]) -> None:
        """See `Shell`."""
        self.world.scheduler.soon(self.place, action)

    def at(self, when: float, action: Callable[[], None]) -> SimTimer:
        """See `Shell`."""
        scheduler = self.world.scheduler
        return SimTimer(when, action, scheduler, scheduler.at(when, self.place, action))

    def later(self, delay: float, action: Callable[[], None]) -> SimTimer:
        """See `Shell`."""
        scheduler = self.world.scheduler
        when = scheduler.now + delay
        return SimTimer(when, action, scheduler, scheduler.aside(when, self.place, action))

    def asked(self, asker: int, request: dict[str, Any]) -> None:
        """See `Shell`."""
        raise NotImplementedError("output of simulated processes is not captured")

    def home_lost(self, reason: str) -> bool:
        """See `Shell`. Simulated jobs do not outlive their script."""
        return False

    def end(self, reason: str = FAREWELL) -> None:
        """See `Shell`."""
        if self._ending:
            return
        self._ending = True
        if self.name == HOME:
            self.core.exited(self.client)
            self.core.end(reason)
            self.world.agent_process.end()
        else:
            self.core.end(reason)
            self.world.crash_agent(self)

    # -- other hosts (see `OtherHosts`) ----------------------------------------------------------

    def say(self, host: str, message: dict[str, Any]) -> None:
        """See `OtherHosts`."""
        peer = self._peer(host)
        if peer is not None:
            peer.send(message)

    def spread(self, message: dict[str, Any]) -> None:
        """See `OtherHosts`."""
        for peer in list(self.peers.values()):
            peer.send(message)

    def open(
        self, host: str, near: int, far: int, end: SimLink, *, first: bool, stream: str
    ) -> bool:
        """See `OtherHosts`."""
        assert not stream, "streams are not simulated"
        peer = self._peer(host)
        if peer is None:
            return False
        peer.open(end, near, far, first)
        return True

    def way(self, host: str, *, dial: bool) -> Way | None:
        """See `OtherHosts`."""
        peer = self._peer(host) if dial else self.peers.get(host)
        return None if peer is None else peer.way

    def attach(self, host: str) -> None:
        """See `OtherHosts`."""
        self.world.attach(self, host)

    def give_up(self, host: str, reason: str) -> bool:
        """See `OtherHosts`."""
        peer = self.peers.get(host)
        if peer is None:
            return False
        peer.give_up(reason)
        return True

    def leave(self, host: str, done: Callable[[], None], *, shutdown: bool) -> None:
        """See `OtherHosts`."""
        peer = self.peers.pop(host, None)
        if peer is not None:
            peer.send({"op": "leave", "shutdown": shutdown})
            self.monitor.forget(peer)
        self.lost.add(host)
        done()  # the script goes on to exit, but this agent stays up

    def end_sessions(self, reason: str) -> None:
        """See `OtherHosts`."""
        for peer in list(self.peers.values()):
            peer.give_up(reason)

    def _peer(self, name: str) -> SimPeer | None:
        """Return the channel to another agent, made on first use; None once it was given up."""
        peer = self.peers.get(name)
        if peer is None and name not in self.lost:
            self.world.connect(self, self.world.hosts_by_name[name])
            peer = self.peers.get(name)
        return peer

    def connect(self, other: SimHost) -> SimPeer:
        """Make a channel to `other`, and monitor it by heartbeats."""
        peer = self.peers[other.name] = SimPeer(self, other)
        self.monitor.watch(peer)
        return peer

    def on_message(self, peer: SimPeer, message: dict[str, Any]) -> None:
        """Process a message of another agent."""
        op = message["op"]
        if op == "open":
            mine, theirs = socket_pair(self.world.scheduler)
            near, far = message["near"], message["far"]
            peer.join(message["lane"], mine.link, far, near, ours=False)
            self.core.opened(peer.name, near, far, theirs.link, first=message["first"])
        elif op == "leave":
            self.end()
        else:
            if op == "found":
                self.lost.discard(message["host"])
            self.core.heard(peer.name, peer.way, message)

    def on_lost(self, peer: SimPeer, reason: str) -> None:
        """Handle the end of a channel."""
        name = peer.name
        current = self.peers.get(name) is peer
        if current:
            self.lost.add(name)
            del self.peers[name]
            self.monitor.forget(peer)
        self.core.casts.way_over(peer.way, reason)
        if current:
            self.world.record("lost host", self.hostname, peer.other.hostname)
            self.core.session_lost(name, reason)
