"""The other hosts of the job, as a host's agent sees them: their addresses, dials and sessions.

A `PeerHost` is the session with the agent of another host. At home the client gives the addresses
(``attach``), and home passes them on, so that the other hosts can dial one another. Each agent
dials hosts on threads, or answers the connections that its worker passes on.

The name of a host is a place in the job, which the worker of another machine may take over when
the host was lost (`rebind`). Then all that names the host means the other machine. The agent on the
first one may still run, cut off from home: its connections are refused (`is_fenced`).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.address import ChannelAddr
from monarch._engine.base.home import HOME
from monarch._engine.base.settings import settings
from monarch._engine.protocol.agent_choice import is_fenced, session_number
from monarch._engine.runtime.agent.control import Attach, Connection
from monarch._engine.runtime.agent.core import AgentCore
from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.heartbeats import HeartbeatMonitor
from monarch._engine.runtime.io.reactor import Reactor
from monarch._engine.transport.link import Link
from monarch._engine.transport.segment import SegmentPool, Windows

if TYPE_CHECKING:  # most jobs have one host: the rest is loaded when there are others
    from monarch._engine.protocol.agent_messages import (
        Addresses,
        AgentMessage,
        Job,
        Resumed,
        Spawn,
    )
    from monarch._engine.runtime.admission.handshake_io import Arrival, Route, Wire
    from monarch._engine.runtime.cast.tunnel_end import SpawnShare, Way
    from monarch._engine.runtime.hosts.peer_host import PeerHost
    from monarch._engine.runtime.hosts.stream_tunnel import StreamTunnel
    from monarch._engine.runtime.hosts.tunnel import Tunnel

__all__ = ["Hosts", "Keeper"]


class Keeper(Protocol):
    """The keeper of a job that may outlive its script: `JobKeeper` of `monarch._failover`."""

    def keep(self, message: Any, fds: list[int]) -> None: ...
    def remember(self, uid: int, keepsake: str) -> None: ...
    def forget(self, uid: int) -> None: ...
    def shut_door(self) -> None: ...
    def driver_lost(self) -> bool: ...
    def driver_is_here(self, link: Link) -> None: ...
    def home_lost(self, reason: str) -> bool: ...
    def attach_again(self, hosts: list[str]) -> None: ...
    def awaits(self, host: str) -> bool: ...
    def peer_host_up(self, peer_host: PeerHost) -> None: ...
    def home_found(self, peer_host: PeerHost) -> None: ...
    def may_come_home(self, reign: int) -> bool: ...
    def answer_claim(self, sock: Wire) -> None: ...
    def heard(self, news: Job) -> None: ...
    def resumed(self, host: str, message: Resumed) -> None: ...


class HostsAgent(Protocol):
    """The interface to its agent that `Hosts` needs."""

    reactor: Reactor

    @property
    def core(self) -> AgentCore[int]:
        """The agent's core."""
        ...

    keeper: Keeper | None
    """The keeper of the job, once it is to outlive its script."""

    def keep_job(self) -> Keeper:
        """Return the keeper of the job, made on first use."""
        ...

    def inform(self, uid: int, notice: dict[str, Any]) -> None:
        """Send a notice to a member of this host, unless it has exited."""
        ...

    def tell_owner(self, message: dict[str, Any]) -> None:
        """Send a message to the client, or on other hosts than the client's to the worker."""
        ...

    def audit(self, event: str, **fields: Any) -> None:
        """Let the worker record an event."""
        ...

    def print_here(self) -> None:
        """Print output here that was streamed to the client."""
        ...

    def end(self) -> None:
        """End the agent."""
        ...


class Hosts:
    """The other hosts of the job; see the module. These are the `OtherHosts` of the agent's core.

    Args:
        agent: the agent of this host.
        client: the uid of the client.
        name: the name of this host.
    """

    def __init__(self, agent: HostsAgent, client: int, name: str) -> None:
        self.name = name
        self.reactor = agent.reactor
        clock = environments.current.clock()
        self.segments = SegmentPool(settings.shm_pool_limit, clock.call_later)
        self.windows = Windows(settings.shm_pool_limit)
        self.monitor = HeartbeatMonitor(agent.reactor.call_at, settings.host_timeout)
        self.addresses: dict[str, str] = {}  # by host: its address, as the client gave it
        self.reign = 0  # the client's epoch, see `Keeper`
        self._agent = agent
        self._client = client
        self._sessions = itertools.count(1)
        self._agents: dict[str, int] = {}  # by host: home's session with it, as home has said
        self._peer_hosts: dict[str, PeerHost] = {}
        self._secrets: dict[str, str] = {}  # by host: its secret file, if of another job
        self._greeted = 0  # connections whose second handshake is in progress
        self._gateways: list[str] = []  # the addresses of gateways to the workers
        self._gateway = 0  # the number of the one that was reached last
        self._no_gateway = ""  # why none is reached, since the last dial that was answered
        self._trusting = False  # of workers that admit any peer and prove nothing
        self._attaching: dict[str, int] = {}  # by host: the member that waits for it
        self._attach_limits: dict[str, float] = {}  # by host: seconds to wait, if not the default
        self._rebinding: dict[str, list[int]] = {}  # by host: the procs that wait for it
        self._bound: dict[str, str] = {}  # by host that was rebound: its address, as asked for
        self._dialed_once: set[str] = set()  # hosts to give up when a dial fails
        self._number = 0  # home's session with this host, which names this agent
        self._least: dict[str, int] = {}  # by host: the least number of an agent that is not fenced

    @property
    def casts(self) -> CastRelay:
        """See `Neighbourhood`."""
        return self._agent.core.casts

    def next_number(self) -> int:
        """See `Neighbourhood`."""
        return session_number(self.reign, next(self._sessions))

    def met(self) -> list[PeerHost]:
        """Return the sessions with other hosts."""
        return list(self._peer_hosts.values())

    def find(self, host: str) -> PeerHost | None:
        """Return the session with `host`, if there is one."""
        return self._peer_hosts.get(host)

    # -- for the core (see `OtherHosts`) ---------------------------------------------------------

    def say(self, host: str, message: AgentMessage) -> None:
        """See `OtherHosts`."""
        self._peer_host(host).say(message)

    def spread(self, message: AgentMessage) -> None:
        """See `OtherHosts`."""
        for peer_host in self._peer_hosts.values():
            peer_host.say(message)

    def open(self, host: str, near: int, far: int, end: int, *, first: bool, stream: str) -> bool:
        """See `OtherHosts`."""
        sock = environments.current.socket_of(end)
        self._peer_host(host).open(near, far, sock, first=first, stream=stream)
        return True

    def order(self, host: str, order: Spawn, ends: Sequence[int]) -> tuple[Way, SpawnShare]:
        """See `OtherHosts`."""
        peer_host = self._peer_host(host)
        socks = [environments.current.socket_of(end) for end in ends]
        return peer_host.way, peer_host.order(order, socks)

    def way(self, host: str, *, dial: bool) -> Way | None:
        """See `OtherHosts`."""
        peer_host = self._peer_host(host) if dial else self._peer_hosts.get(host)
        return None if peer_host is None else peer_host.way

    def attach(self, host: str) -> None:
        """See `OtherHosts`."""
        self._peer_host(host)

    def give_up(self, host: str, reason: str) -> bool:
        """See `OtherHosts`."""
        peer_host = self._peer_hosts.get(host)
        if peer_host is None:
            return False
        peer_host.link.end(reason)
        return True

    def way_to(self, uid: int) -> tuple[str, bool]:
        """Return this host's address towards the host of a proc, and whether it uses TLS.

        The address is empty if there is none.
        """
        host = self._agent.core.directory.host_of(uid)
        peer_host = self._peer_hosts.get(host or "")
        return ("", False) if peer_host is None else peer_host.link.here

    def leave(self, host: str, done: Callable[[], None], *, shutdown: bool) -> None:
        """See `OtherHosts`.

        The caller may exit once `done` is called, and this agent with it; a message that it has not
        sent by then is lost.
        """
        # Removed at once, so that attaching again begins a new session.
        peer_host = self._peer_hosts.pop(host, None)
        if peer_host is None:
            done()
        else:
            peer_host.leave(done, shutdown=shutdown)

    def end_sessions(self, reason: str, *, farewell: bool) -> None:
        """See `OtherHosts`."""
        for peer_host in self.met():
            peer_host.link.end(reason, farewell=farewell)

    # -- sessions --------------------------------------------------------------------------------

    def _peer_host(self, host: str) -> PeerHost:
        """Return the agent of `host`; dial the host if there is no session with it."""
        peer_host = self._peer_hosts.get(host)
        if peer_host is None:
            # A worker that is being attached may not have started yet; others run, or have run.
            new = host in self._attaching or host in self._rebinding
            patience = (
                self._attach_limits.get(host, settings.mesh_attach_config_timeout)
                if new
                else 3 * settings.host_timeout
            )
            peer_host = self._new(host, self._dial, patience)
            if self.name == HOME and not new:  # hosts that are being attached are reported together
                self.spread(self._directory(host))
        return peer_host

    def _new(
        self, host: str, dial: Callable[[PeerHost], None] | None, first_patience: float
    ) -> PeerHost:
        from monarch._engine.runtime.hosts.peer_host import PeerHost

        peer_host = self._peer_hosts[host] = PeerHost(
            self,
            host,
            dial,
            environments.current.chance(1 << 62) + 1,
            first_patience,
            settings.host_timeout,
            settings.codec_max_frame_length,
        )
        return peer_host

    def _dial(self, peer_host: PeerHost) -> None:
        """Open a connection to a worker, on a thread of its own."""
        from monarch._engine.protocol.session.handshake import HandshakeError
        from monarch._engine.runtime.admission.gateway import Gateway, GatewayLost, Gateways
        from monarch._engine.runtime.admission.handshake_io import dial, direct_way, why_unreachable
        from monarch._engine.runtime.admission.secret import SecretError

        address = self.addresses.get(peer_host.name)
        if address is None:  # home dials the others, and is never dialed
            # Later, since the session has only just begun: it is not in the table yet.
            problem = "its address is not known here"
            failed = functools.partial(peer_host.dial_failed, problem, for_good=True)
            self.reactor.call_soon(failed)
            return
        home = self.name == HOME
        purpose = {
            "client": self._client,
            "from": self.name,
            "as": peer_host.name,
            # This names the agent, see `protocol.agent_choice`.
            "session": peer_host.number if home else self._agents.get(peer_host.name, 0),
            "reign": self.reign if self._awaits(peer_host.name) else 0,
            "origin": self._number,
        }

        timeout = max(settings.host_timeout / 3, 0.5)

        def run() -> None:
            try:
                key = self._find_key(peer_host.name)
                where = ChannelAddr.parse(address)
                way: Route = direct_way
                route: Gateways | None = None
                if self._gateways:
                    own = self._find_key("")
                    through = [
                        Gateway(ChannelAddr.parse(one), own, self._client, self._trusting)
                        for one in self._gateways
                    ]
                    route = Gateways(through, self._gateway)
                    way = route.open
                sock = dial(where, key, purpose, timeout, trusting=self._trusting, way=way)
            except (HandshakeError, SecretError, ValueError) as error:
                failed = functools.partial(peer_host.dial_failed, str(error), for_good=True)
                self.reactor.call_soon(failed)
            except OSError as error:
                text = why_unreachable(error, timeout)
                no_gateway = isinstance(error, GatewayLost)
                self.reactor.call_soon(self._dial_failed, peer_host, text, no_gateway)
            else:
                if route is not None:
                    self.reactor.call_soon(self._gateway_found, route.used)
                self.reactor.call_soon(peer_host.dialed, sock)

        environments.current.start_thread("monarch-dial", run)

    def _gateway_found(self, number: int) -> None:
        self._gateway, self._no_gateway = number, ""

    def _dial_failed(self, peer_host: PeerHost, problem: str, no_gateway: bool) -> None:
        """Report why a dial failed to the member that waits for the host; more dials may follow."""
        if no_gateway:
            self._no_gateway = problem
        self._tell_attacher(peer_host.name, "attaching", problem)
        peer_host.dial_failed(problem, for_good=peer_host.name in self._dialed_once)

    def _is_killed(self, host: str) -> bool:
        """Whether the job that a host belongs to was killed, by this program or another."""
        from monarch._engine.runtime.admission.secret import is_revoked

        return host in self._secrets and is_revoked(self._secrets[host])

    def _find_key(self, host: str) -> bytes:
        """Return the key of the job that a host belongs to. Raises SecretError."""
        from monarch._engine.runtime.admission.secret import find_secret

        return find_secret(self._secrets.get(host))

    def _take_settings(self, request: Attach) -> None:
        """Adopt the client's settings, and its variables that locate secrets."""
        from monarch._engine.runtime.admission.secret import take_settings

        take_settings(request["environ"])
        settings.follow_client(request["config"])

    def attach_all(self, asker: int, request: Attach) -> None:
        """Attach hosts for the client; `asker` is notified when each is connected."""
        self._take_settings(request)
        # Settings that were changed after this process started take effect now, those in the
        # environment of the client included.
        self.monitor.be_patient(settings.host_timeout)
        for peer_host in self._peer_hosts.values():
            peer_host.be_patient(settings.host_timeout)
        if request["gateways"] != self._gateways:
            self._gateways, self._gateway = request["gateways"], 0
        self._trusting |= request["trusting"]
        self.addresses.update(request["hosts"])
        self._secrets.update(request["secrets"])
        core = self._agent.core
        if request["reign"]:
            self.reign = request["reign"]
            self._agent.keep_job().attach_again(list(request["hosts"]))
        for host in request["hosts"]:
            core.perform(core.directory.host_found(host))
            self._attaching[host] = asker
            if request["timeout"] is not None:
                self._attach_limits[host] = request["timeout"]
            if self._peer_host(host).link.up:
                self.peer_host_up(self._peer_hosts[host])
        self.spread(self._directory())

    def rebind(self, asker: int, request: Mapping[str, Any]) -> None:
        """Serve a lost host by the worker at another address, at home.

        The proc `asker`, of any host, is notified whether the worker was reached. If the address is
        that of another host of the job, that one is released: the worker has one agent for each
        client.
        """
        host, address = request["host"], self._locate(request["address"])
        core = self._agent.core
        known = self._peer_hosts.get(host)
        self._rebinding.setdefault(host, []).append(asker)
        if known is not None and known.link.up:
            self._tell_rebound(host, None)
            return
        if len(self._rebinding[host]) > 1:  # one address at a time
            return
        for other, at in self.addresses.items():
            if at != address or other == host:
                continue
            if other in self._bound and other in self._peer_hosts:
                self._tell_rebound(host, f"the worker at {address} serves in the place of {other}")
                return
            # A later job may have the addresses of one that was killed, and has another secret.
            if other in self._secrets and not self._is_killed(other):
                self._secrets[host] = self._secrets[other]
            if other in self._peer_hosts:
                core.detach([other], lambda: None, shutdown=False)
        self.addresses[host] = address
        self._bound[host] = request["address"]
        core.perform(core.directory.host_found(host))
        self._attach_limits[host] = request["timeout"]
        if request["once"]:
            self._dialed_once.add(host)
        self._peer_host(host)
        self.spread(self._directory(host))

    def _locate(self, address: str) -> str:
        """Return the address to dial for an address that a program names."""
        return address

    def _tell_rebound(self, host: str, error: str | None) -> None:
        address = self._bound.get(host, host)
        notice = {"op": "rebound", "host": host, "address": address, "error": error}
        for asker in self._rebinding.pop(host, ()):
            self._agent.core.answer(asker, notice)

    def take_over(self, request: Connection, fd: int) -> None:
        """Use a connection that the worker has accepted: of home, or of another host of the job.

        The descriptor stays the caller's.
        """
        from monarch._engine.runtime.admission.authenticated import AuthenticSocket

        sock = environments.current.socket_of(os.dup(fd))

        def admit(sock: Wire) -> None:
            if request.get("claim"):
                self._agent.keep_job().answer_claim(sock)
            else:
                reign, number = request.get("reign", 0), request.get("number", 0)
                self._adopt(request["from"], sock, reign, number, request.get("origin", 0))

        key = bytes.fromhex(request["session"])
        if not request["tls"]:
            admit(sock if request["bare"] else AuthenticSocket(sock, key, dialer=False))
            return
        # The dialer and this process make a second TLS handshake, see `handshake_io`.
        from monarch._engine.protocol.session.handshake import key_name
        from monarch._engine.runtime.admission.handshake_io import Greeting
        from monarch._engine.runtime.admission.host_identity import tls_names
        from monarch._engine.runtime.admission.secret import SecretError
        from monarch._engine.runtime.admission.tls import server_context

        keys = {key_name(key): key}

        def accepted(arrival: Arrival) -> None:
            self._greeted -= 1
            admit(arrival.sock)

        def refused(why: str) -> None:
            self._greeted -= 1
            self._agent.tell_owner({"op": "refused", "peer": request["peer"], "reason": why})
            if not (self._greeted or self._peer_hosts):  # started for that connection only
                self._agent.end()

        self._greeted += 1
        try:
            tls = server_context()
        except SecretError as error:
            sock.close()
            refused(str(error))
            return
        Greeting(
            self.reactor,
            sock,
            keys.get,
            accepted,
            refused,
            tls_names,
            tls=tls,
            steps_aside=False,
        )

    def _adopt(self, host: str, sock: Wire, reign: int, number: int, origin: int) -> None:
        """Use an authenticated connection of another host; a higher `reign` is of a new home.

        `number` is the session of home that the dialer means, `origin` the one that names it.
        """
        if host == HOME:
            self._number = max(number, self._number)
        elif is_fenced(origin, max(self._agents.get(host, 0), self._least.get(host, 0))):
            self._agent.audit("fenced", host=host)
            sock.close()
            return
        if host == HOME and reign > self.reign:
            if not self._agent.keep_job().may_come_home(reign):
                sock.close()
                return
            self.reign = reign
            self._agent.tell_owner({"op": "home", "reign": reign, "number": number})
        peer_host = self._peer_hosts.get(host)
        if peer_host is None:
            peer_host = self._new(host, None, settings.host_timeout)
        peer_host.answer(sock)

    def _directory(self, only: str | None = None) -> Addresses:
        """Return what other hosts need to connect to one another, or to one of them."""
        about = self._peer_hosts if only is None else (only,)
        addresses = {
            host: at for host, at in self.addresses.items() if only is None or host == only
        }
        return {
            "op": "addresses",
            "hosts": addresses,
            "secrets": {host: self._secrets[host] for host in addresses if host in self._secrets},
            "agents": {host: self._peer_hosts[host].number for host in about},
            "trusting": self._trusting,
        }

    def _tell_attached(self, host: str, error: str | None) -> None:
        self._tell_attacher(host, "attached", error)
        self._attaching.pop(host, None)
        self._attach_limits.pop(host, None)
        self._dialed_once.discard(host)
        self._tell_rebound(host, error)

    def _tell_attacher(self, host: str, op: str, error: str | None) -> None:
        asker = self._attaching.get(host, 0)
        if asker:
            self._agent.inform(asker, {"op": op, "host": host, "error": error})

    # -- for the sessions (see `Neighbourhood`) --------------------------------------------------

    def peer_host_up(self, peer_host: PeerHost) -> None:
        """Handle the first connection of a session with another host."""
        host, core = peer_host.name, self._agent.core
        if host != HOME:
            core.perform(core.directory.host_found(host))
        if self.name == HOME:
            peer_host.say(self._directory())
            if self._agent.keeper is not None:
                self._agent.keeper.peer_host_up(peer_host)
        elif host == HOME and self.reign:
            self._agent.keep_job().home_found(peer_host)
        if not self._awaits(host):
            self._tell_attached(host, None)

    def _awaits(self, host: str) -> bool:
        """Whether the host has yet to send what it holds of an earlier home."""
        return self._agent.keeper is not None and self._agent.keeper.awaits(host)

    def connection_altered(self, peer_host: PeerHost) -> None:
        """Record that bytes from another host were altered in transit; the link reconnects."""
        self._agent.audit("altered", host=peer_host.name)

    def peer_host_lost(self, peer_host: PeerHost, reason: str, *, farewell: bool) -> None:
        """Handle the loss of the session with another host: it cannot be reached any longer."""
        host = peer_host.name
        if self._peer_hosts.get(host) is peer_host:
            del self._peer_hosts[host]
            if self._no_gateway and not farewell and self._no_gateway not in reason:
                reason = f"{self._no_gateway} ({reason})"
            if host != HOME:
                self._tell_attached(host, reason)
            farewell = farewell or self._is_killed(host)
            if host != HOME or not peer_host.dials:  # home is lost already if it is to be dialed
                self._agent.core.session_lost(host, reason, farewell=farewell)

    def tunnel_opened(
        self,
        peer_host: PeerHost,
        tunnel: Tunnel | StreamTunnel,
        *,
        first: bool,
        stream: str,
    ) -> None:
        """Connect a link, or a stream, that another agent carries to a proc of this host."""
        ours, theirs = environments.current.socket_pair()
        tunnel.attach(ours)
        fields: dict[str, Any] = {}
        if stream:
            address, secured = peer_host.link.here
            fields = {"for": stream, "via": {"here": address, "tls": secured}}
        self._agent.core.opened(
            peer_host.name,
            tunnel.far,
            tunnel.near,
            theirs.detach(),
            first=first,
            stream=stream,
            fields=fields,
        )

    def from_peer_host(self, peer_host: PeerHost, message: AgentMessage) -> None:
        """Handle a message of another agent."""
        if message["op"] == "addresses":
            self.addresses.update(message["hosts"])
            # These are paths on the client's machine. Other machines have our job's secret only.
            secrets = message["secrets"].items()
            self._secrets.update({host: path for host, path in secrets if os.path.exists(path)})
            self._trusting = message["trusting"]
            self._agents.update(message["agents"])
        elif message["op"] == "job":
            self._agent.keep_job().heard(message)
        elif message["op"] == "resumed":
            self._agent.keep_job().resumed(peer_host.name, message)
            self._tell_attached(peer_host.name, None)
        elif message["op"] == "unheard":  # the driver has exited; another may replace it
            self._agent.print_here()
        elif message["op"] == "leave":
            if message["shutdown"]:
                self._agent.tell_owner({"op": "shutdown"})
            self._agent.end()
        else:
            if message["op"] == "lost":
                # Until home has another session with it.
                number = self._agents.pop(message["host"], 0)
                if number:
                    self._least[message["host"]] = number + 1
            self._agent.core.heard(peer_host.name, peer_host.way, message)
