"""The worker loop of a simulated host: admits connections, and passes them to the host's agent.

The handshake is the real one (`Greeting`), with real proofs of a secret that all hosts share. Its
nonces are not from the seed, but have the same size in each run. The place of the worker stands for
the machine: it stays when the agent exits, and is dead without power.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from monarch._engine.protocol.agent_choice import (
    FORWARD,
    REFUSE,
    REPLACE,
    Running,
    Visit,
    choose,
)
from monarch._engine.protocol.session.handshake import key_name
from monarch._engine.runtime.admission.gateway import RELAY, Relay, Relays
from monarch._engine.runtime.admission.handshake_io import Arrival, Greeting
from monarch._engine.runtime.admission.host_identity import listener_names
from monarch._engine.runtime.agent.core import NO_WORKER
from monarch.testing.driver import background_reactor
from monarch.testing.scheduler import JITTER, Place
from monarch.testing.stream import MemorySocket

if TYPE_CHECKING:
    import socket

    from monarch.testing.world import World

__all__ = ["KEY", "SimWorker"]

KEY = hashlib.sha256(b"the secret of a simulated job").digest()
"""The key of the job, which all hosts know."""


class SimWorker:
    """The worker loop of the host with number `ident`."""

    def __init__(self, world: World, ident: int) -> None:
        self.ident = ident
        self.place = Place(f"the worker of host{ident}")
        self.place.machine = self
        self._world = world
        self._reactor = background_reactor(world.driver.streams, self.place)
        self.listens = True
        self._relays = _Relays(self._reactor, world, self)
        self._session: int | None = None  # the client's session, if an agent runs for it

    def accept(self, sock: MemorySocket) -> None:
        """Begin the handshake with a peer that has connected."""
        find = {key_name(KEY): KEY}.get
        Greeting(self._reactor, sock, find, self._admit, self._refuse, listener_names(sock))

    def agent_ended(self) -> None:
        """Note that the agent has exited; the client's next connection starts another one."""
        self._session = None

    def stop(self) -> None:
        """Refuse connections from now on: a client has shut down the host."""
        self.listens = False

    def _refuse(self, why: str) -> None:
        self._world.record("refused", self.place.name, why)

    def _admit(self, arrival: Arrival) -> None:
        """Pass a connection to the agent that it is for, see `Worker`."""
        sock, purpose = arrival.sock, arrival.purpose
        assert isinstance(sock, MemorySocket)
        if RELAY in purpose:
            self._relays.take(purpose["client"], purpose[RELAY], sock, arrival.session)
            sock.close()
            return
        host, session, reign = purpose["from"], purpose["session"], purpose["reign"]
        running = None if self._session is None else Running(self._session, 0)
        choice = choose(running, Visit(host, session, reign))
        if choice is REFUSE:
            sock.close()
            return
        if choice is REPLACE:
            self._agent.end(NO_WORKER)  # that agent may not know that it is over
        if choice is not FORWARD:
            self._session = session
            if self._agent.name != purpose["as"]:  # the client calls this host so
                self._world.start_agent(self.ident, purpose["as"])
        request = {
            "peer": "a host",
            "session": arrival.session.hex(),
            "tls": False,
            "bare": arrival.bare,
            "from": host,
            "reign": reign,
            "number": session,
            "origin": purpose.get("origin", 0),
        }
        scheduler = self._world.scheduler
        when = scheduler.now + scheduler.random.random() * JITTER
        agent = self._agent
        scheduler.aside(when, agent.place, agent.take_over, request, sock.detach())

    @property
    def _agent(self) -> Any:
        return self._world.hosts[self.ident]


class _Relays(Relays):
    """The relays of a simulated worker; each is a place of its own."""

    def __init__(self, reactor: Any, world: World, machine: SimWorker) -> None:
        super().__init__(reactor)
        self._world = world
        self._machine = machine

    def _launch(self) -> tuple[socket.socket, Any]:
        streams = self._world.driver.streams
        ours, theirs = streams.pair()
        place = Place(f"a relay of {self._machine.place.name}")
        place.machine = self._machine
        reactor = background_reactor(streams, place)
        relay = Relay(reactor, theirs)
        reactor.on_stop = relay.close
        return ours, _Exited()


class _Exited:
    """The process of a relay, which has ended at once."""

    def wait(self) -> None:
        """Return at once."""
