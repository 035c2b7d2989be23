"""The host agent: the process on each host that launches, watches, introduces and kills procs.

The agent runs no user code, so failure detection and clean-up never wait for the interpreter lock
of a user's program. Each proc, and the client, holds one control link to the agent, for requests
(`control`) and notices: ``gone`` (procs that exited, and why), ``peer`` (an introduction), and
answers. When the agent exits, all control links close, and so every proc of the host exits at once.

The decisions are made in the `AgentCore`, which the simulator runs, too. This module is the core's
shell: it puts the parts together and passes requests and reports on. The parts are the control
links (`ControlLinks`), the `Processes` of this host and their `Launchers`, their `Output`, the
sessions with the other `Hosts`, and the `Keeper` of a job that may outlive its driver (a feature).

The agents of all hosts act as one (`Directory`). On the client's host, *home*, the client starts
the agent, which dials the workers (``attach``). On other hosts the worker starts one agent for each
client, and passes the connections for that client to it.
"""

from __future__ import annotations

import functools
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch._engine.base.features import find, hook
from monarch._engine.base.home import HOME
from monarch._engine.base.verdict import STOPPED, SYSTEM, Verdict
from monarch._engine.launch.cores import divided
from monarch._engine.launch.exit_status import signal_name
from monarch._engine.runtime.agent import control
from monarch._engine.runtime.agent.control_links import ControlLinks
from monarch._engine.runtime.agent.core import NO_WORKER, AgentCore
from monarch._engine.runtime.agent.hosts import Hosts, Keeper
from monarch._engine.runtime.agent.launchers import LauncherLink, Launchers
from monarch._engine.runtime.agent.output import Output, Uncaptured
from monarch._engine.runtime.agent.processes import Processes
from monarch._engine.runtime.cast.sender import heads_size
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.reactor import Reactor, Timer
from monarch._engine.transport.link import Link
from monarch._engine.wire.frame import CAST, RELEASE, SEGMENT, Frame, pack

if TYPE_CHECKING:
    from monarch._engine.runtime.hosts.peer_host import PeerHost

__all__ = ["Agent"]

_CHILD_EXITED = "the process exited; it was a child of another process of the program"

_Handler = Callable[[Link, Any, list[int]], None]


class Agent:
    """The host agent's process: the shell of its `AgentCore`; see the module.

    Args:
        first: a socket to the client, or to the worker that started this agent for the client.
        client_uid: the uid of the client.
        launcher: the socket and the pid of the launcher for this process's launch environment.
        here: the name of this host in the client's job.
    """

    def __init__(
        self,
        first: socket.socket,
        client_uid: int,
        launcher: tuple[socket.socket, int],
        here: str,
    ) -> None:
        self.reactor = Reactor()
        self.client = client_uid
        self.hostname = socket.gethostname()
        self._home = here == HOME
        self._links = ControlLinks(self.reactor, self._handle, self._rejected, self._link_lost)
        self._launchers = Launchers(self.reactor, self._links)
        self._processes = Processes(self._links, self._launchers, self._capture_output, self.audit)
        self._hosts = Hosts(self, client_uid, here)
        self.core = AgentCore(self._processes, self._hosts, self, client_uid, here)
        self.keeper: Keeper | None = None  # made when the job is to outlive its script
        self._requests = self._handlers()
        self._launchers.adopt(*launcher)
        self.owner = self._links.connect(first, "the client" if self._home else "the worker")
        self.owner.uid = client_uid
        if self._home:
            self.admit_driver(self.owner)

    def run(self) -> None:
        """Run the agent, until it ends this process."""
        self.reactor.run()

    def end(self, trouble: str = "") -> None:
        """Exit and kill all procs: the client has exited, or no longer needs this host.

        `trouble`: another reason.
        """
        if self.keeper is not None:
            self.keeper.shut_door()
        self.core.end(trouble)
        self._launchers.end()
        self._processes.output.end()
        self._processes.end()
        os._exit(0)

    # -- control links ---------------------------------------------------------------------------

    def connect(self, sock: socket.socket, peer: str) -> Link:
        """See `JobHolder` in `monarch._failover.keeper`."""
        return self._links.connect(sock, peer)

    def tell(self, link: Link, message: dict[str, Any]) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self._links.tell(link, message)

    def close(self, link: Link) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self._links.close(link)

    def tell_owner(self, message: dict[str, Any]) -> None:
        """Send a message to the client, or on other hosts than the client's to the worker."""
        self._links.tell(self.owner, message)

    def inform(self, uid: int, notice: dict[str, Any]) -> None:
        """Send a notice to a member of this host, unless it has exited."""
        if self._processes.find(uid) is not None:
            self._processes.tell(uid, notice)

    def audit(self, event: str, **fields: Any) -> None:
        """Let the worker record an event; the client's own host keeps no audit log."""
        if not self._home:
            self.tell_owner({"op": "audit", "event": event, "fields": fields})

    def _capture_output(self) -> Output:
        """Return what captures the output of procs. Without that feature none is captured."""
        make = find("capture_output")
        if make is None:
            return Uncaptured()
        made: Output = make(self.reactor, self.core.here, self.client, self._tell_client)
        return made

    def _tell_client(self, message: dict[str, Any]) -> None:
        """Send a message to the client, from any thread."""
        client = self._processes.find(self.client)
        if client is None:
            self.reactor.call_soon(self.core.answer, self.client, message)
        else:
            self._links.tell(client.link, message)

    def _link_lost(self, link: Link) -> None:
        if isinstance(link.owner, LauncherLink):
            launcher = link.owner
            self._launchers.lost(launcher, self._processes.scratch_of(launcher))
            self.core.launcher_lost(launcher)
        elif link is self.owner and not self._home:
            self.end(NO_WORKER)
        elif link is self.owner and (self.keeper is None or not self.keeper.driver_lost()):
            self.end()
        elif link is not self.owner and self._processes.joined(link.uid):
            uid = link.uid
            self.core.exited(uid)
            self.core.left(uid, self._processes.verdict(uid, STOPPED, _CHILD_EXITED, SYSTEM))
        # Another proc's control link closes when the proc exits; the launcher reports that exit.

    def _rejected(self, link: Link) -> None:
        if link is not self.owner:
            self.core.kill_member(link.uid)  # its control link is unusable

    # -- requests and reports --------------------------------------------------------------------

    def _handlers(self) -> dict[str, _Handler]:
        """Return the handlers of the requests that the core does not handle by itself.

        A handler takes the descriptors that it keeps out of the list.
        """
        core, hosts = self.core, self._hosts
        return {
            "attach": lambda link, message, fds: hosts.attach_all(link.uid, message),
            "census": self._on_census,
            "connection": lambda link, message, fds: hosts.take_over(message, fds[0]),
            "data_connection": self._on_data_connection,
            "detach": self._on_detach,
            "forget": lambda link, message, fds: self.keep_job().forget(message["uid"]),
            # This follows the answers to all earlier requests.
            "heartbeat": lambda link, message, fds: self.tell(link, message),
            "here": lambda link, message, fds: self.keep_job().driver_is_here(link),
            "join": self._on_join,
            "keep": lambda link, message, fds: self.keep_job().keep(message, fds),
            "log_drawn": self._on_log_drawn,
            "log_flush": self._on_log_flush,
            "log_printed": self._on_log_printed,
            "preload": self._on_preload,
            "ready": lambda link, message, fds: core.membership.ready(link.uid),
            "remember": lambda link, message, fds: self.keep_job().remember(
                message["uid"], message["keepsake"]
            ),
            "way": self._on_way,
        }

    def _handle(self, link: Link, frame: Frame) -> None:
        if frame.kind == CAST:
            self._on_cast(link, frame)
            return
        fds = link.take_fds(frame.nfd)
        try:
            if isinstance(link.owner, LauncherLink):
                self._on_report(*control.report(frame.body), fds)
            else:
                op, message = control.request(frame.body)
                shared = self.core.requests.get(op)
                if shared is None:
                    self._requests[op](link, message, fds)
                else:
                    shared(link.uid, message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _on_cast(self, link: Link, frame: Frame) -> None:
        """Begin a cast of a proc (`CastRelay`). A shared segment stays mapped while needed."""
        content = None
        if frame.flags & SEGMENT:
            from monarch._engine.runtime.hosts.tunnel import (
                map_segment,  # most programs make no casts
            )

            table = frame.body[heads_size(frame.body) :]
            ident, mapping = map_segment(link, table)
            released = pack(RELEASE, 0, 0, 0, b"", ident.to_bytes(8, "little"))
            weakref.finalize(mapping, link.send, released)
            content = memoryview(mapping)
        self.core.casts.begin(link.uid, frame, content)

    def _on_preload(self, link: Link, message: control.Preload, fds: list[int]) -> None:
        launcher = self._launchers.find(divided(message["env"], 1)[0], None, {})
        self._links.tell(launcher.link, {**message, "op": "preload", "threads": {}})

    def _on_join(self, link: Link, message: control.Join, fds: list[int]) -> None:
        """Admit a process that the sender has started by itself, and that has chosen its uid."""
        uid = message["uid"]
        if not self.core.membership.knows(uid):  # otherwise its connection is closed
            self._processes.join(uid, socket.socket(fileno=fds.pop()))
            self.core.join(link.uid, uid)

    def _on_census(self, link: Link, message: control.Census, fds: list[int]) -> None:
        others = [peer_host.name for peer_host in self.peer_hosts() if peer_host.link.up]
        for host in others:
            self.core.ask_there(link.uid, host, message)
        self.tell(link, {**self._census(message["id"]), "others": others})

    def _census(self, number: int) -> dict[str, Any]:
        """Return the notice that answers a request for the processes of this host."""
        procs = self._processes.pids()
        rows = hook("census")(procs, dict(self.core.membership.families()))
        return {
            "op": "census",
            "id": number,
            "host": self.core.here,
            "machine": self.hostname,
            "procs": rows,
        }

    def _on_log_flush(self, link: Link, message: control.LogFlush, fds: list[int]) -> None:
        others = [peer_host.name for peer_host in self.peer_hosts() if peer_host.link.up]
        for host in others:
            self.core.ask_there(link.uid, host, message)
        flushed = {"op": "log_flushed", "id": message["id"], "others": len(others)}
        self._processes.output.flush(functools.partial(self.tell, link, flushed))

    def _on_log_drawn(self, link: Link, message: control.LogDrawn, fds: list[int]) -> None:
        self._processes.capture().drawn(message["drawn"])

    def _on_log_printed(self, link: Link, message: control.LogPrinted, fds: list[int]) -> None:
        host = message["agent"]
        if host == self.core.here:
            self._processes.output.printed(message["size"])
        else:
            self.core.ask_there(link.uid, host, message)

    def _on_way(self, link: Link, message: control.WayTo, fds: list[int]) -> None:
        """Send a proc the address at which to invite a proc of another host."""
        address, secured = self._hosts.way_to(message["to"])
        self.tell(link, {"op": "way", "to": message["to"], "here": address, "tls": secured})

    def _on_data_connection(
        self, link: Link, message: control.DataConnection, fds: list[int]
    ) -> None:
        """Report that a peer reached the door of a proc, or was refused there."""
        peer, refused = message["peer"], message["refused"]
        if self._home:
            return
        if refused:
            reason = f"proc {link.uid:x}: {refused}"
            self.tell_owner({"op": "refused", "peer": peer, "reason": reason})
        else:
            certificate = message["certificate"]
            self.audit("connected", uid=f"{link.uid:x}", peer=peer, certificate=certificate)

    def _on_detach(self, link: Link, message: control.Detach, fds: list[int]) -> None:
        answer = {"op": "detached", "number": message["number"]}
        done = functools.partial(self.tell, link, answer)
        self.core.detach(message["hosts"], done, shutdown=message["shutdown"])

    def _on_report(self, op: str, message: Any, fds: list[int]) -> None:
        """Handle a report of a launcher."""
        if op == "started":
            self._processes.started(message["procs"], fds)
        elif op == "exited":
            self._on_exited(message)
        elif op == "stopped":
            self.core.stopped(message["uid"], signal_name(message["signal"]))
        else:
            self.core.membership.continued(message["uid"])

    def _on_exited(self, message: control.Exited) -> None:
        for exited in message["procs"]:
            uid = exited["uid"]
            process = self._processes.find(uid)
            if process is None:
                continue  # condemned before, and already removed
            killer = self._processes.killer(exited)
            ready = self.core.membership.is_ready(uid)
            # Requests that the proc sent before it exited still count.
            self._links.drain(process.link)
            self.core.exited(uid)
            self.core.left(uid, self._processes.why_exited(exited, killer, ready=ready))

    # -- for the core (see `Shell`) --------------------------------------------------------------

    def now(self) -> float:
        """See `Shell`."""
        return environments.current.now()

    def soon(self, action: Callable[[], None]) -> None:
        """See `Shell`."""
        self.reactor.call_soon(action)

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        """See `Shell`."""
        return self.reactor.call_at(when, action)

    aside = at

    def asked(self, asker: int, request: dict[str, Any]) -> None:
        """See `Shell`."""
        if request["op"] == "census":
            self.core.answer(asker, self._census(request["id"]))
        elif request["op"] == "log_printed":
            self._processes.output.printed(request["size"])
        else:
            flushed = {"op": "log_flushed", "id": request["id"]}
            self._processes.output.flush(functools.partial(self.core.answer, asker, flushed))

    def home_lost(self, reason: str) -> bool:
        """See `Shell`."""
        return self.keeper is not None and self.keeper.home_lost(reason)

    # -- for the keeper of the job: `JobHolder` in `monarch._failover.keeper` describes these ------

    def keep_job(self) -> Keeper:
        """Return the keeper of the job, made on first use."""
        keeper = self.keeper
        if keeper is None:
            keeper = self.keeper = hook("job_keeper")(self)
        return keeper

    def peer_hosts(self) -> list[PeerHost]:
        """See `JobHolder` in `monarch._failover.keeper`."""
        return self._hosts.met()

    def addresses(self) -> dict[str, str]:
        """See `JobHolder` in `monarch._failover.keeper`."""
        return self._hosts.addresses

    def families(self) -> list[tuple[int, int]]:
        """See `JobHolder` in `monarch._failover.keeper`."""
        return self.core.membership.families()

    def admit_driver(self, link: Link) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self._processes.admit(self.client, link)

    def driver_left(self) -> bool:
        """See `JobHolder` in `monarch._failover.keeper`."""
        if not self._processes.remove(self.client):
            return False
        self.core.client_left()
        return True

    def driver_returned(self) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self.core.client_returned()

    def expect_driver(self) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self.core.membership.client_returned()

    def home_left(self, verdict: Verdict) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self.core.perform(self.core.directory.home_lost(verdict))

    def home_returned(self) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self.core.perform(self.core.directory.home_found())

    def host_resumed(self, host: str, procs: Sequence[Sequence[int]]) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self.core.directory.resumed(host, procs)

    def print_here(self) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self._processes.output.client_left()

    def print_there(self) -> None:
        """See `JobHolder` in `monarch._failover.keeper`."""
        self._processes.output.client_returned()
