"""The worker loop: accepts the clients of a host, and runs one host agent for each.

A worker listens at one address. A peer proves that it knows the secret (`handshake_io`), and names
the client that it comes for: the peer is the client's own host agent, or the agent of another host
of the same job. The first connection for a client starts an agent for that client, a process of its
own, which gets this connection and all further ones for the same client, as long as the client does
not begin anew (`protocol.agent_choice`). So jobs share nothing but the listening socket. When an
agent exits, everything of its job ends with it, and nothing of other jobs. The worker itself never
parses the messages of a session. (With TLS, the agent makes a second handshake, see
`handshake_io`.)

A refused connection is counted, and logged with its address; `audit` lists what else is recorded.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from monarch._engine.base.address import ChannelAddr
from monarch._engine.base.settings import settings
from monarch._engine.launch import helper
from monarch._engine.protocol.agent_choice import REFUSE, REPLACE, Running, Visit, choose
from monarch._engine.protocol.session.handshake import key_name
from monarch._engine.runtime.admission.audit import record
from monarch._engine.runtime.admission.gateway import RELAY, Relays
from monarch._engine.runtime.admission.handshake_io import (
    CLAIM,
    PROBE,
    Arrival,
    Greeting,
    listen,
    uses_tls,
)
from monarch._engine.runtime.admission.host_identity import listener_names, listening_end, tls_names
from monarch._engine.runtime.admission.secret import find_secret
from monarch._engine.runtime.admission.socket_file import remove
from monarch._engine.runtime.io.descriptors import raise_descriptor_limit
from monarch._engine.runtime.io.listener import Entrance
from monarch._engine.runtime.io.reactor import Reactor
from monarch._engine.transport.link import Link
from monarch._engine.wire.frame import CONTROL, pack

__all__ = ["Worker"]

_FRAME_LIMIT = 1 << 20
_MOST_STRANGERS = 1000  # handshakes in progress
_OWN = 64  # descriptors that are not for handshakes
_log = logging.getLogger("monarch.worker")
_OPEN_WARNING = (
    "%s accepts ALL clients, also without the secret, and runs the code that they send as this "
    "user: configure(allow_unauthenticated=True) was called. Without that call, only clients that "
    "know the secret are accepted"
)


class _Job:
    """A client's agent on this host, for one session. A client that attaches again gets another."""

    __slots__ = ("link", "name", "process", "reign", "session")

    def __init__(self, process: subprocess.Popen[bytes], link: Link, session: int) -> None:
        self.name = ""  # set if the job may outlive its client, see `monarch._failover`
        self.reign = 0
        self.process = process
        self.link = link
        self.session = session


class Worker:
    """Serves the clients of a host. `run` returns when a client shuts down the host, or on `stop`.

    Args:
        address: where to listen. Raises OSError when that is not possible, ValueError for a scheme
            that hosts cannot use, SecretError without a usable secret or certificates.
        names: other addresses (URLs) at which clients reach this worker, see `host_identity`.
    """

    def __init__(self, address: ChannelAddr, names: Sequence[str] = ()) -> None:
        key = find_secret()
        self._keys = {key_name(key): key}
        # Only a call in this very process may turn this on: neither the environment nor a client.
        self._open = settings.allow_unauthenticated
        self._open &= settings.origin("allow_unauthenticated") == "configure"
        if self._open:
            _log.warning(_OPEN_WARNING, address)
        self._tls = None
        if uses_tls(address):
            from monarch._engine.runtime.admission.tls import server_context  # few workers need it

            self._tls = server_context()
        self._names = list(names)
        if address.bind is not None:
            self._names.append(address._replace(bind=None).url)
        self._sock = listen(address)
        self._end = listening_end(self._sock)
        self._reactor = Reactor()
        self._jobs: dict[int, _Job] = {}
        self._relays = Relays(self._reactor)
        self._strangers = 0
        # Half of the remaining descriptors are for agents, and for accepted connections.
        self._most = max(8, min(_MOST_STRANGERS, (raise_descriptor_limit() - _OWN) // 2))
        self.refused = 0
        """The number of connections that were refused."""
        self._entrance = Entrance(self._reactor, self._sock, self._came)
        secured = self._tls is not None
        record("listening", address=str(address), tls=secured, open_to_all=self._open)

    @property
    def port(self) -> int:
        """The port that the worker listens at; 0 for a Unix socket."""
        name: tuple[str, int] | str | bytes = self._sock.getsockname()
        return 0 if isinstance(name, (str, bytes)) else int(name[1])

    def run(self) -> None:
        """Serve; blocks. Returns after a shutdown, when all that ran here for clients has ended."""
        try:
            self._reactor.run()
        finally:
            name = self._sock.getsockname()
            self._entrance.close()
            if name and isinstance(name, str):
                remove(name)
            self._relays.close()
            for job in self._jobs.values():
                job.link.sock.close()  # its agent exits, with all processes that it started
            for job in self._jobs.values():
                job.process.wait()

    def stop(self) -> None:
        """Make `run` return. Callable from any thread, also before `run`."""
        self._reactor.call_soon(self._reactor.stop)

    # -- connections -----------------------------------------------------------------------------

    def _came(self, sock: socket.socket, address: Any) -> None:
        if self._strangers >= self._most:
            sock.close()
            self._refuse(address, "too many connections are in the middle of a handshake")
            return
        self._strangers += 1

        def accepted(arrival: Arrival) -> None:
            self._strangers -= 1
            try:
                self._admit(arrival, address)
            except OSError as error:  # the agent's process could not be started
                arrival.sock.close()
                text = error.strerror or str(error)
                self._refuse(address, f"a process for it cannot be started: {text}")

        def refused(why: str) -> None:
            self._strangers -= 1
            self._refuse(address, why)

        Greeting(
            self._reactor,
            sock,
            self._keys.get,
            accepted,
            refused,
            listener_names(sock, self._names, self._end) if self._tls is None else tls_names,
            tls=self._tls,
            open_to_all=self._open,
        )

    def _refuse(self, address: Any, why: str) -> None:
        self.refused += 1
        _log.warning("refused a connection from %s: %s", _show(address), why)
        record("refused", peer=_show(address), reason=why, count=self.refused)

    def _admit(self, arrival: Arrival, address: Any) -> None:
        """Pass an authenticated connection to the agent that it is for."""
        sock, purpose = arrival.sock, arrival.purpose
        if purpose.get(PROBE):
            sock.close()
            return
        if RELAY in purpose:
            self._relay(arrival, address)
            return
        if CLAIM in purpose:
            self._pass_claim(arrival, address)
            return
        try:
            client, host, here = purpose["client"], purpose["from"], purpose["as"]
            session, reign = purpose["session"], purpose.get("reign", 0)
            numbers = (client, session, reign, purpose.get("origin", 0))
            if not all(isinstance(number, int) for number in numbers):
                raise TypeError("client, session, reign or origin")
            if not all(isinstance(name, str) for name in (host, here)):
                raise TypeError("from or as")
        except (LookupError, TypeError) as error:
            sock.close()
            self._refuse(address, f"the purpose of the connection is invalid: {error}")
            return
        job = self._jobs.get(client)
        running = None if job is None else Running(job.session, job.reign)
        choice = choose(running, Visit(host, session, reign))
        if choice is REFUSE:
            sock.close()
            return
        if choice is REPLACE and job is not None:
            job.link.sock.shutdown(socket.SHUT_WR)  # that agent may not know that it is over
            job = None
        if job is None:
            job = self._start(client, here, session)
            job.reign = reign
        record(
            "attached",
            peer=_show(address),
            client=f"{client:x}",
            host=host,
            authenticated=arrival.authenticated,
            certificate=arrival.certificate,
        )
        more = {"reign": reign, "number": session, "origin": purpose.get("origin", 0)}
        self._pass_on(job, arrival, address, {"from": host, **more})

    def _pass_on(self, job: _Job, arrival: Arrival, address: Any, more: dict[str, Any]) -> None:
        message = {
            "op": "connection",
            "peer": _show(address),
            "session": arrival.session.hex(),
            "tls": self._tls is not None,
            "bare": arrival.bare,
            **more,
        }
        body = json.dumps(message).encode()
        job.link.send(pack(CONTROL, 0, 0, 0, b"", body, nfd=1), [arrival.sock.fileno()])
        arrival.sock.close()

    def _pass_claim(self, arrival: Arrival, address: Any) -> None:
        """Pass on a claim to a job without a driver. The job's agent answers, if there is one."""
        name = arrival.purpose[CLAIM]
        job = next((job for job in self._jobs.values() if name and job.name == name), None)
        if job is None:
            arrival.sock.close()
        else:
            self._pass_on(job, arrival, address, {"from": "", "claim": True})

    def _relay(self, arrival: Arrival, address: Any) -> None:
        """Connect a peer to another worker: this worker is its `Gateway`."""
        client, target = arrival.purpose.get("client"), arrival.purpose[RELAY]
        sock = arrival.sock
        assert isinstance(sock, socket.socket)  # TLS has been ended, see `Greeting`
        with sock:
            if not isinstance(client, int) or not isinstance(target, str):
                self._refuse(address, "its request for a way through this gateway is invalid")
                return
            self._relays.take(client, target, sock, arrival.session)
        record(
            "relayed",
            peer=_show(address),
            client=f"{client:x}",
            to=target,
            authenticated=arrival.authenticated,
            certificate=arrival.certificate,
        )

    # -- agents ----------------------------------------------------------------------------------

    def _start(self, client: int, here: str, session: int) -> _Job:
        sock, process = helper.start(
            helper.AGENT, client, here, path=sys.path, start_new_session=True
        )
        link = Link(sock, "an agent", None, _FRAME_LIMIT, _FRAME_LIMIT)
        job = self._jobs[client] = _Job(process, link, session)
        link.serve(self._reactor, self._reader(client, job))
        return job

    def _reader(self, client: int, job: _Job) -> Callable[[Link], None]:
        def read(link: Link) -> None:
            for frame in link.receive(self._reactor.scratch):
                message = json.loads(frame.body)
                if message["op"] == "shutdown":
                    self._reactor.stop()
                elif message["op"] == "job":
                    job.name = message["job"]
                elif message["op"] == "home":
                    job.session, job.reign = message["number"], message["reign"]
                elif message["op"] == "refused":
                    self._refuse(message["peer"], message["reason"])
                elif message["op"] == "audit":
                    record(message["event"], client=f"{client:x}", **message["fields"])
            if link.lost is not None:
                self._reactor.unregister(link.fileno)
                link.close(link.lost)
                if self._jobs.get(client) is job:
                    del self._jobs[client]
                job.process.wait()
                record("detached", client=f"{client:x}")

        return read


def _show(address: Any) -> str:
    if isinstance(address, (str, bytes)) and address:
        # The owner of a file chooses its name: the name must not add lines of its own to a log.
        return ascii(os.fsdecode(address))[1:-1]
    if isinstance(address, tuple):
        host = f"{address[0]}".removeprefix("::ffff:")  # IPv4 on a socket for both protocols
        return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
    return "this machine"
