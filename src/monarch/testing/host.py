"""A simulated host: a shell of the agent's core, and processes that are `SimProc`s.

The agent is the real one but for its shell: `AgentCore` decides, `ControlLinks` speak the control
protocol with each process, and `Hosts` holds the sessions with the agents of other hosts, with
their dials, handshakes, heartbeats and tunnels. All of that runs on streams in memory
(monarch.testing.stream). Simulated are the launch of a process, the moment at which an exit is
noticed, and the worker loop (monarch.testing.worker).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from monarch._engine.base.home import HOME
from monarch._engine.base.verdict import Verdict
from monarch._engine.launch.exit_status import why_exited
from monarch._engine.runtime.agent import control
from monarch._engine.runtime.agent.control_links import ControlLinks
from monarch._engine.runtime.agent.core import AgentCore
from monarch._engine.runtime.agent.hosts import Hosts, Keeper
from monarch._engine.transport.link import Link
from monarch._engine.wire.frame import CAST, Frame
from monarch.testing.driver import EPOCH, SimTimer, background_reactor
from monarch.testing.network import PORT, address_of
from monarch.testing.scheduler import Place
from monarch.testing.worker import KEY

if TYPE_CHECKING:
    import socket

    from monarch._engine.runtime.hosts.peer_host import PeerHost
    from monarch.testing.proc import SimProc
    from monarch.testing.world import World

__all__ = ["SimHost"]

_LAUNCH = 1.5e-3
"""The average start time of a process, in seconds."""

_REAP = 300e-6
"""The average time until an exit is noticed, in seconds."""


class SimHosts(Hosts):
    """The other hosts, as the agent of a simulated host sees them."""

    def __init__(self, agent: SimHost, client: int, name: str, count: int) -> None:
        super().__init__(agent, client, name)
        self._world = agent.world
        self._hostname = agent.hostname
        # Every host that there is may be dialed, but for home.
        self._named = {f"host{ident}": _url(ident) for ident in range(1, count)}
        self.addresses = dict(self._named)

    def _find_key(self, host: str) -> bytes:
        return KEY

    def _take_settings(self, request: control.Attach) -> None:
        """Do nothing: the hosts of a simulation have the settings of its script anyway."""

    def attach_all(self, asker: int, request: control.Attach) -> None:
        """See `Hosts.attach_all`; the hosts that `simulate` names have their addresses here."""
        given = request["hosts"].items()
        hosts = {host: self._named.get(host, address) for host, address in given}
        super().attach_all(asker, {**request, "hosts": hosts})

    def _locate(self, address: str) -> str:
        return self._named.get(address, address)

    def peer_host_lost(self, peer_host: PeerHost, reason: str, *, farewell: bool) -> None:
        """See `Hosts.peer_host_lost`."""
        self._world.record("lost host", self._hostname, peer_host.name or "host0")
        super().peer_host_lost(peer_host, reason, farewell=farewell)


def _url(ident: int) -> str:
    return f"tcp://{address_of(ident)}:{PORT}"


class SimHost:
    """A simulated host. `ident` is its number; `client` the uid of the script's process.

    `name`: as the client calls it, if not by its number.
    """

    def __init__(self, world: World, ident: int, client: int, count: int, name: str = "") -> None:
        self.world = world
        self.ident = ident
        self.hostname = f"host{ident}"
        self.name = name or (self.hostname if ident else HOME)  # as agents call it
        self.place = Place(self.hostname)
        self.place.machine = world.workers[ident]
        self._streams = world.driver.streams
        self.reactor = background_reactor(self._streams, self.place)
        self.keeper: Keeper | None = None  # simulated jobs do not outlive their script
        self._links = ControlLinks(self.reactor, self._handle, self._rejected, self._link_lost)
        self.hosts = SimHosts(self, client, self.name, count)
        self.core: AgentCore[int] = AgentCore(self, self.hosts, self, client, self.name)
        self.client = client
        self.procs: dict[int, SimProc] = {}  # procs that have not exited
        self._ending = False
        self._control: dict[int, Link] = {}

    # -- control links ---------------------------------------------------------------------------

    def admit(self, proc: SimProc) -> socket.socket:
        """Make a control link to `proc`; return the end for `proc`."""
        mine, theirs = self._streams.pair()
        link = self._links.connect(mine, proc.label)
        link.uid = proc.uid
        self._control[proc.uid] = link
        self.procs[proc.uid] = proc
        return theirs

    def _handle(self, link: Link, frame: Frame) -> None:
        if frame.kind == CAST:
            self.core.casts.begin(link.uid, frame)
        else:
            op, message = control.request(frame.body)
            self._on_request(link.uid, op, message, link.take_fds(frame.nfd))

    def _rejected(self, link: Link) -> None:
        if link.uid != self.client:
            self.core.kill_member(link.uid)

    def _link_lost(self, link: Link) -> None:
        if link.uid == self.client:
            self.end()

    def _on_request(self, asker: int, op: str, message: Any, ends: list[int]) -> None:
        core = self.core
        if op in core.requests:
            core.requests[op](asker, message, ends)
        elif op == "log_flush":
            self.tell(asker, {"op": "log_flushed", "id": message["id"], "others": 0})
        elif op == "way":
            address, secured = self.hosts.way_to(message["to"])
            answer = {"op": "way", "to": message["to"], "here": address, "tls": secured}
            self.tell(asker, answer)
        elif op == "data_connection":
            self.world.record("direct", message["peer"], message["refused"])
        elif op == "attach":
            self.hosts.attach_all(asker, message)
        elif op == "detach":
            answer = {"op": "detached", "number": message["number"]}
            done = functools.partial(self.tell, asker, answer)
            core.detach(message["hosts"], done, shutdown=message["shutdown"])
        elif op not in ("ready", "preload"):  # a process is ready, and all modules are loaded
            raise NotImplementedError(f"the simulated agent cannot do this: {op}")

    # -- for the sessions with other hosts (see `Agent` in runtime.agent.hosts) ------------------

    def inform(self, uid: int, notice: dict[str, Any]) -> None:
        """Send a notice to a member of this host, unless it has exited."""
        self.tell(uid, notice)

    def tell_owner(self, message: dict[str, Any]) -> None:
        """End the worker, if a client orders it; it knows what else its agent would report."""
        if message["op"] == "shutdown":
            self.world.workers[self.ident].stop()

    def audit(self, event: str, **fields: Any) -> None:
        """Do nothing: simulated hosts keep no audit log."""

    def print_here(self) -> None:
        """Do nothing: the output of simulated processes is not captured."""

    def take_over(self, request: Any, descriptor: int) -> None:
        """Use a connection that the worker has admitted."""
        self.hosts.take_over(request, descriptor)
        self._streams.close(descriptor)

    # -- processes (see `Members`) ---------------------------------------------------------------

    def tell(self, uid: int, notice: dict[str, Any]) -> None:
        """See `Members`."""
        self.send(uid, control.encode(notice))

    def hand(self, uid: int, notice: dict[str, Any], end: int) -> None:
        """See `Members`."""
        link = self._control.get(uid)
        if link is not None:
            self._links.tell(link, notice, [end])
        self._streams.close(end)

    def send(self, uid: int, frame: bytes) -> None:
        """See `Members`."""
        link = self._control.get(uid)
        if link is not None:
            link.send(frame)

    def discard(self, end: int) -> None:
        """See `Members`."""
        self._streams.close(end)

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
        ends: Sequence[int],
    ) -> Verdict | None:
        """See `Members`."""
        world = self.world
        scheduler = world.scheduler
        for fields, end in zip(procs, ends, strict=True):
            uid = fields["uid"]
            self.core.membership.ready(uid)
            proc = world.new_proc(self, uid, {**spec, **fields, "parent": parent})
            scheduler.pause(proc.place)  # until `_started`
            proc.adopt_agent(self.admit(proc))
            proc.adopt(self._streams.socket(end), parent)
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
        self._links.drain(link)  # requests that the process sent before it exited still count
        self.core.exited(proc.uid)
        self.core.left(proc.uid, self.verdict(proc.uid, *why_exited(status)))

    def verdict(self, uid: int, kind: str, text: str, cause: str) -> Verdict:
        """See `Members`."""
        when = EPOCH + self.world.scheduler.now
        return Verdict(kind, text, cause, self.hostname, self.procs[uid].pid, when)

    def forget(self, uid: int, verdict: Verdict) -> None:
        """See `Members`."""
        del self.procs[uid]
        self._links.close(self._control.pop(uid))

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
        when = max(when, scheduler.now)
        return SimTimer(when, action, scheduler, scheduler.at(when, self.place, action))

    def aside(self, when: float, action: Callable[[], None]) -> SimTimer:
        """See `Shell`."""
        timer: SimTimer = self.reactor.call_at(when, action)
        return timer

    def asked(self, asker: int, request: dict[str, Any]) -> None:
        """See `Shell`."""
        raise NotImplementedError("output of simulated processes is not captured")

    def keep_job(self) -> Keeper:
        """Raise: see `keeper`."""
        raise NotImplementedError("simulated jobs do not outlive their script")

    def home_lost(self, reason: str) -> bool:
        """See `Shell`. Simulated jobs do not outlive their script."""
        return False

    def end(self, trouble: str = "") -> None:
        """See `Shell`."""
        if self._ending:
            return
        self._ending = True
        if self.name == HOME:
            self.core.exited(self.client)
            self.core.end(trouble)
            self.world.agent_process.end()
        else:
            self.core.end(trouble)
            self.world.crash_agent(self)
