"""The worker loop of a simulated host: admits connections, and passes them to the host's agent.

The handshake is the real one (`Greeting`), with real proofs of a secret that all hosts share. Its
nonces are not from the seed, but have the same size in each run. The place of the worker stands for
the machine: it stays when the agent exits, and is dead without power.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from monarch._engine.protocol.session.handshake import key_name
from monarch._engine.runtime.admission.handshake_io import Arrival, Greeting
from monarch._engine.runtime.admission.host_identity import listener_names
from monarch.testing.driver import background_reactor
from monarch.testing.scheduler import JITTER, Place
from monarch.testing.stream import MemorySocket

if TYPE_CHECKING:
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
        self._session: int | None = None  # the client's session, if an agent runs for it

    def accept(self, sock: MemorySocket) -> None:
        """Begin the handshake with a peer that has connected."""
        find = {key_name(KEY): KEY}.get
        Greeting(self._reactor, sock, find, self._admit, self._refuse, listener_names(sock))

    def agent_ended(self) -> None:
        """Note that the agent has exited; the client's next connection starts another one."""
        self._session = None

    def _refuse(self, why: str) -> None:
        self._world.record("refused", self.place.name, why)

    def _admit(self, arrival: Arrival) -> None:
        """Pass a connection to the agent that it is for, see `Worker`."""
        sock, purpose = arrival.sock, arrival.purpose
        assert isinstance(sock, MemorySocket)
        host, session = purpose["from"], purpose["session"]
        if self._session is not None and not host and session != self._session:
            if session < self._session:  # it is of a session before the present one
                sock.close()
                return
            self._world.crash_agent(self._agent)  # it may not know that it is over
        if self._session is None:
            if host:  # from another host of a job that is not here, or no longer
                sock.close()
                return
            self._session = session
        request = {
            "peer": "a host",
            "session": arrival.session.hex(),
            "tls": False,
            "bare": arrival.bare,
            "from": host,
            "reign": purpose["reign"],
            "number": session,
        }
        scheduler = self._world.scheduler
        when = scheduler.now + scheduler.random.random() * JITTER
        agent = self._agent
        scheduler.aside(when, agent.place, agent.take_over, request, sock.detach())

    @property
    def _agent(self) -> Any:
        return self._world.hosts[self.ident]
