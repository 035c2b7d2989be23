"""The host agent: the process on each host that launches, watches, introduces and kills procs.

The agent runs no user code, so failure detection and clean-up never wait for the interpreter lock
of a user's program. Each proc, and the client, holds one control link to the agent. Requests are
frames of JSON (see `Proc.tell_agent`)::

    spawn       start procs through the right launcher; descriptors of their links are attached
    introduce   hand the other end of a socket pair to a proc: of a link, or of a side stream
    autopsy     why did this proc exit? Answered when the cause is known
    kill        kill procs now
    preload     import modules in the launcher, ahead of the first spawn
    logging     stream the output of procs to the client, or not, and set their log level
    log_flush   pass on what procs have printed so far; answered with ``log_flushed``
    log_printed the client has printed this much of the output streamed to it
    keep        the job may outlive its driver, the client, for a while (`JobKeeper`)
    remember    store an entry for the next driver; ``forget`` removes the entry
    here        the next driver is ready
    cast_over   no more answers to this cast are wanted

The agent sends ``gone`` (procs that exited, and why) and ``peer`` (an introduction). A spawn may
ask for the procs' output to be captured; then the `LogRelay` reads and passes on the output.

The `Membership` (protocol/membership.py) knows the tree of spawns. It decides which members are
notified of an exit, and which procs must be killed. The agent passes requests and observations to
the membership, and performs the effects that it returns. When the agent exits, all control links
close, and so every proc of the host exits at once.

The agents of all hosts act as one (`Directory`). A `PeerHost` leads to each other agent, and
carries links between procs of the two hosts. On the client's host, *home*, the client starts the
agent, which dials the workers (``attach``). On other hosts the worker starts one agent for each
client, and passes the connections for that client to it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from monarch._engine.base.address import ChannelAddr
from monarch._engine.base.crash import crash_trace
from monarch._engine.base.errors import ProtocolError
from monarch._engine.base.home import HOME
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, STOPPED, SYSTEM, Verdict
from monarch._engine.launch import black_box
from monarch._engine.launch.children import Children, adopt_orphans, continue_without_parent
from monarch._engine.launch.interpreter import python_command
from monarch._engine.launch.launcher import launch_key
from monarch._engine.launch.out_of_memory import KillCount
from monarch._engine.launch.scratch import ScratchFolder
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
from monarch._engine.protocol.membership import Condemn, Hand, Membership, Tell
from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.cast.sender import heads_size
from monarch._engine.runtime.failover.keeper import FAREWELL, JobKeeper
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.heartbeats import HeartbeatMonitor
from monarch._engine.runtime.io.reactor import WRITE, Reactor, Timer
from monarch._engine.transport.link import Link
from monarch._engine.transport.segment import SegmentPool, Windows
from monarch._engine.wire.frame import CAST, CONTROL, RELEASE, SEGMENT, Frame, pack

if TYPE_CHECKING:
    from monarch._engine.runtime.admission.handshake_io import Arrival, Route, Wire
    from monarch._engine.runtime.cast.tunnel_end import Way
    from monarch._engine.runtime.hosts.peer_host import PeerHost
    from monarch._engine.runtime.hosts.stream_tunnel import StreamTunnel
    from monarch._engine.runtime.hosts.tunnel import Tunnel as HostTunnel
    from monarch._engine.runtime.output.relay import LogRelay

__all__ = ["Agent"]

_FRAME_LIMIT = 64 << 20
_QUEUE_LIMIT = 1 << 40  # control messages are small and few; sending never blocks the agent
_OUTPUT_WAIT = 5.0  # seconds that the report of an exit waits for a stuck terminal
_ADVICE = "configure(tail_log_lines=20) would show here what it printed last"
_SPARE = 64  # descriptors reserved for everything else
_LAST_OUTPUT_WAIT = 0.5  # seconds to wait for output to drain when the agent itself shuts down
_NO_WORKER = "its worker loop ended"


# Requests of procs and of the client; below, reports of launchers.
_REQUESTS = {
    op: f"_on_{op}"
    for op in (
        "attach",
        "autopsy",
        "cast_over",
        "connection",
        "data_connection",
        "detach",
        "forget",
        "heartbeat",
        "here",
        "introduce",
        "keep",
        "kill",
        "log_flush",
        "log_printed",
        "logging",
        "preload",
        "ready",
        "remember",
        "spawn",
        "way",
    )
}
_FOR_GUESTS = ("autopsy", "kill", "logging", "log_flush", "log_printed")
_REPORTS = {op: f"_on_{op}" for op in ("started", "exited", "stopped", "continued")}


class _Process:
    """A member of the membership that runs on this host: its link, descriptors and process."""

    __slots__ = (
        "box",
        "captured",
        "killed",
        "launcher",
        "link",
        "pid",
        "pidfd",
        "remembered",
        "scratch",
        "uid",
    )

    def __init__(
        self, uid: int, link: Link, launcher: _LauncherLink | None = None, scratch: str = ""
    ) -> None:
        self.uid = uid
        self.link = link
        self.launcher = launcher
        self.scratch = scratch
        self.pid = 0
        self.pidfd = -1
        self.box = -1  # for the `black_box`
        self.killed = False  # by this agent
        self.captured = False  # whether the relay reads its output
        self.remembered = False  # whether the relay keeps its last lines


class _Guest:
    """A member that lives on another host; has only as much of a link as requests need."""

    __slots__ = ("uid",)

    def __init__(self, uid: int) -> None:
        self.uid = uid


class _LauncherLink:
    __slots__ = ("link", "pid")

    def __init__(self, link: Link, pid: int) -> None:
        self.link = link
        self.pid = pid


class Agent:
    """The host agent; see the module.

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
        self._membership = Membership(client_uid)
        self.name = here
        self._directory = Directory(self._membership, here)
        self._peer_hosts: dict[str, PeerHost] = {}
        self.next_number = itertools.count(1).__next__
        self.monitor = HeartbeatMonitor(self.reactor, settings.host_timeout)
        self._given_up: dict[str, Verdict] = {}  # by host: why home gave it up
        self._addresses: dict[str, str] = {}  # by host: its address, as the client gave it
        self._secrets: dict[str, str] = {}  # by host: its secret file, if it belongs to another job
        self._greeted = 0  # connections whose second handshake is in progress
        self._reign = 0  # the client's epoch, see `JobKeeper`
        self._gateway: str | None = None  # the address of the gateway to the workers
        self._trusting = False  # of workers that admit any peer and prove nothing
        self._attaching: dict[str, int] = {}  # by host: the member that waits for it
        self._attach_limits: dict[str, float] = {}  # by host: seconds to wait, if not the default
        # Descriptors that wait for their receiver, by sender, receiver, and stream ("" for a link).
        self._ends_held: dict[tuple[int, int, str], deque[int]] = {}
        self.segments = SegmentPool(settings.shm_pool_limit)
        self.windows = Windows(settings.shm_pool_limit)
        self.casts = CastRelay(self, here)
        self._processes: dict[int, _Process] = {}
        self._launchers: dict[Any, _LauncherLink] = {}
        self._own_key = launch_key(os.environ)
        self._client_uid = client_uid
        self._host = socket.gethostname()
        self._relay: LogRelay | None = None
        self._kill_count: KillCount | None = None
        self._ends: list[tuple[int, Verdict]] = []  # exits to announce, in one batch
        self._alarm: Timer | None = None
        self._alarm_at = math.inf  # the deadline that `_alarm` is set for
        self._keeper = JobKeeper(self)
        adopt_orphans()
        continue_without_parent()
        self._scratch = ScratchFolder()
        self._children = Children()  # launchers, and the orphans of killed launchers
        self.reactor.register(self._children.fileno, self._on_child)
        self._launchers[(self._own_key, sys.executable)] = self._launcher_link(*launcher)
        link = self._connect(first, "the client" if here == HOME else "the worker")
        self._first = link
        link.uid = client_uid
        if here == HOME:
            self._admit_client(link)

    def run(self) -> None:
        self.reactor.run()

    # -- links -----------------------------------------------------------------------------------

    def _connect(self, sock: socket.socket, peer: str) -> Link:
        link = Link(
            sock,
            peer,
            lambda link, on: self.reactor.watch_writes(link.fileno, on),
            _FRAME_LIMIT,
            _QUEUE_LIMIT,
        )

        def ready(mask: int) -> None:
            if mask & WRITE:
                link.flush()
            if mask & ~WRITE:
                self._read(link)

        self.reactor.register(link.fileno, ready)
        return link

    def _read(self, link: Link) -> bool:
        """Handle what has arrived; return False if that was nothing or the link is lost."""
        frames: list[Frame] = []
        try:
            frames = link.receive(self.reactor.scratch)
            for frame in frames:
                self._handle(link, frame)
            if link.reader.refused is not None:
                raise link.reader.refused
        except (ProtocolError, ValueError, TypeError, LookupError) as error:
            text = f"monarch: {link.peer} sent an invalid message and was disconnected: {error}"
            print(text, file=sys.stderr)
            link.lose(str(error))
            if link is not self._first:
                self._perform(self._membership.kill([link.uid]))  # its control link is unusable
        if link.lost is None:
            return bool(frames)
        if link.fileno >= 0:
            self._close(link)
            self._link_lost(link)
        return False

    def _close(self, link: Link) -> None:
        self.reactor.unregister(link.fileno)
        link.close(link.lost or "the process ended")
        link.fileno = -1

    def _link_lost(self, link: Link) -> None:
        if isinstance(link.owner, _LauncherLink):
            self._launcher_lost(link.owner)
        elif link is self._first and self.name != HOME:
            self._end(_NO_WORKER)
        elif link is self._first and not self._keeper.driver_lost():
            self._end()
        # A proc's control link closes when the proc exits; the launcher reports that exit.

    def _tell(
        self, link: Link | _Guest, message: dict[str, Any], fds: list[int] | None = None
    ) -> None:
        if isinstance(link, _Guest):
            self._perform(self._directory.route([Tell(link.uid, message)]))
            return
        body = json.dumps(message, separators=(",", ":")).encode()
        link.send(pack(CONTROL, 0, 0, 0, b"", body, nfd=len(fds or ())), fds)

    def _handle(self, link: Link, frame: Frame) -> None:
        if frame.kind == CAST:
            self._on_cast(link, frame)
            return
        fds = link.take_fds(frame.nfd)
        message = json.loads(frame.body)
        table = _REPORTS if isinstance(link.owner, _LauncherLink) else _REQUESTS
        kept = getattr(self, table[message["op"]])(link, message, fds)
        for fd in fds:
            if fd not in (kept or ()):
                os.close(fd)

    # -- requests --------------------------------------------------------------------------------

    def _on_spawn(self, link: Link, message: dict[str, Any], fds: list[int]) -> list[int]:
        spec, procs = message["spec"], message["procs"]
        if len(fds) != len(procs):
            raise ValueError(f"{len(procs)} procs to spawn, {len(fds)} links for them")
        here = self._directory.here
        hosts = [here if (host := proc.get("host")) is None else host for proc in procs]
        if all(host == here for host in hosts):
            self._spawn_here(link.uid, spec, procs, fds)
            return []
        kept: list[int] = []
        uids = [proc["uid"] for proc in procs]
        for host in dict.fromkeys(hosts):
            those = [index for index, other in enumerate(hosts) if other == host]
            theirs = [procs[index] for index in those]
            if host == here:
                self._spawn_here(link.uid, spec, theirs, [fds[index] for index in those])
                continue
            for index in those:
                self._hold(fds[index], link.uid, uids[index])
                kept.append(fds[index])
            self._perform(self._directory.spawn_there(link.uid, host, spec, theirs))
        return kept

    def _spawn_here(
        self, parent: int, spec: dict[str, Any], procs: list[dict[str, Any]], fds: list[int]
    ) -> None:
        launcher = self._launcher_for(spec)
        now = environments.current.now()
        ready, unresponsive = spec["ready_timeout"], spec["unresponsive_timeout"] or math.inf
        self._perform(self._directory.spawn_here(parent, procs, launcher, now, ready, unresponsive))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Each proc takes three descriptors for good (control link, pidfd and black box), or five if
        # its output is captured, and up to three more until the launcher has received them.
        coming = 2 * sum(process.box < 0 for process in self._processes.values())
        taken = len(os.listdir("/dev/fd")) + coming
        if taken + 8 * len(procs) + _SPARE > limit:
            error = (
                f"error creating proc: the host agent may open no more than {limit} descriptors "
                "(ulimit -n); start fewer processes, or raise the limit"
            )
            refused = Verdict(FAILED, error)
            self._perform(self._directory.ended([(proc["uid"], refused) for proc in procs]))
            return
        passed: list[int] = []
        ours: list[int] = []
        orders: list[dict[str, Any]] = []
        for index, proc in enumerate(procs):
            uid = proc["uid"]
            mine, theirs = socket.socketpair()
            control = self._connect(mine, f"proc {uid:x}")
            control.uid = uid
            scratch = self._scratch.new(spec["env"], spec["cwd"])
            self._processes[uid] = _Process(uid, control, launcher, scratch)
            handed = [theirs.detach()]
            if spec["logs"] is not None:
                handed += self._capture(uid, proc, spec["logs"])
            ours += handed
            passed += [fds[index], *handed]
            orders.append({**proc, "agent": os.getpid(), "parent": parent, "scratch": scratch})
        self._tell(
            launcher.link,
            {
                "op": "fork",
                "spec": spec,
                "preload": spec["preload"],
                "path": spec["path"],
                "procs": orders,
            },
            passed,
        )
        for fd in ours:
            os.close(fd)
        self._perform(self._directory.started([proc["uid"] for proc in procs], now))

    def _on_ready(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self._membership.ready(link.uid)

    def _capture(self, uid: int, proc: dict[str, Any], options: dict[str, Any]) -> list[int]:
        """Create pipes for a new proc's output; return what becomes its stdout and stderr."""
        if self._relay is None:
            guest = _Guest(self._client_uid)

            def tell(message: dict[str, Any]) -> None:  # on the relay's thread
                client = self._processes.get(self._client_uid)
                if client is None:
                    self.reactor.call_soon(self._tell, guest, message)
                else:
                    self._tell(client.link, message)

            run = f"{self._client_uid & (1 << 63) - 1:x}"
            from monarch._engine.runtime.output.relay import LogRelay

            self._relay = LogRelay(tell, self.name, run)
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self._relay.add(uid, proc["label"], proc["rank"], options, (out, err))
        self._processes[uid].captured = True
        self._processes[uid].remembered = options["tail"] > 0
        return [theirs_out, theirs_err]

    def _on_introduce(self, link: Link, message: dict[str, Any], fds: list[int]) -> list[int]:
        # If no proc takes the descriptor it closes, and the sender asks for the reason.
        to, stream = message["to"], message.get("for", "")
        effects = self._directory.introduce(link.uid, to, environments.current.now(), stream)
        if any(isinstance(effect, Hand) for effect in effects):
            self._perform(effects, fds, {"for": stream} if stream else {})
            return []
        self._hold(fds[0], link.uid, to, stream)
        self._perform(effects)
        return fds

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
        self.casts.begin(link.uid, frame, content)

    def _on_cast_over(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self.casts.over(link.uid, message["number"])

    def _hold(self, fd: int, near: int, far: int, stream: str = "") -> None:
        """Keep the end that `near` sent for `far` until the destination is known."""
        self._ends_held.setdefault((near, far, stream), deque()).append(fd)

    def _take(self, near: int, far: int, stream: str = "") -> int:
        held = self._ends_held[near, far, stream]
        fd = held.popleft()
        if not held:
            del self._ends_held[near, far, stream]
        return fd

    def _on_autopsy(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        now = environments.current.now()
        self._perform(self._directory.autopsy(link.uid, message["uid"], now))

    def _on_kill(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self._perform(self._directory.kill(message["uids"]))

    def _on_heartbeat(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self._tell(link, message)  # follows the answers to all earlier requests

    def _on_preload(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        spec = {"env": message["env"], "python": None}
        self._tell(self._launcher_for(spec).link, {**message, "op": "preload"})

    def _on_logging(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        mine, asks = self._directory.split(link.uid, message)
        self._perform(asks)
        uids = mine["uids"]

        def tell_procs(captured: set[int]) -> None:
            for uid, rank in zip(uids, mine["ranks"], strict=True):
                process = self._processes.get(uid)
                if process is not None:
                    notice = {
                        "op": "log_level",
                        "level": message["level"],
                        "captured": uid in captured,
                        "from": link.uid,
                        "port": message["port"],
                        "rank": rank,
                    }
                    self._tell(process.link, notice)

        if self._relay is None:
            tell_procs(set())
        else:
            self._relay.configure(
                uids,
                message["streaming"],
                message["group"],
                message["window"],
                lambda captured: self.reactor.call_soon(tell_procs, captured),
            )

    def _on_log_flush(self, link: Link | _Guest, message: dict[str, Any], fds: list[int]) -> None:
        answer = {"op": "log_flushed", "id": message["id"]}
        if not isinstance(link, _Guest):
            others = [host for host, there in self._peer_hosts.items() if there.link.up]
            answer["others"] = len(others)  # so many hosts answer the client as well
            for host in others:
                self._perform(self._directory.ask_there(link.uid, host, message))
        if self._relay is None:
            self._tell(link, answer)
        else:
            self._relay.flush(lambda: self.reactor.call_soon(self._tell, link, answer))

    def _on_log_printed(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        host = message["agent"]
        if host != self.name:
            self._perform(self._directory.ask_there(link.uid, host, message))
        elif self._relay is not None:
            self._relay.acknowledge(message["size"])

    # -- launchers -------------------------------------------------------------------------------

    def _launcher_for(self, spec: dict[str, Any]) -> _LauncherLink:
        python = spec.get("python") or sys.executable
        key = (launch_key(spec["env"]), python)
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._exec_launcher(spec["env"], python)
        return launcher

    def _exec_launcher(self, environ: dict[str, str], python: str) -> _LauncherLink:
        mine, theirs = socket.socketpair()
        fd = theirs.fileno()
        code = f"from monarch._engine.runtime.agent.start import launcher_main; launcher_main({fd})"
        process = subprocess.Popen(
            python_command(python, code),
            env=environ,
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
        )
        process.returncode = 0  # `_launcher_lost` waits for the process; Popen must not
        theirs.close()
        return self._launcher_link(mine, process.pid)

    def _launcher_link(self, sock: socket.socket, pid: int) -> _LauncherLink:
        self._children.own.add(pid)
        link = self._connect(sock, "a launcher")
        launcher = link.owner = _LauncherLink(link, pid)
        return launcher

    def _launcher_lost(self, launcher: _LauncherLink) -> None:
        for key, known in list(self._launchers.items()):
            if known is launcher:
                del self._launchers[key]
        self._children.await_end(launcher.pid)  # its socket is closed, so it exits
        lost = [process for process in self._processes.values() if process.launcher is launcher]
        self._children.debris += [process.scratch for process in lost]
        self._perform(self._directory.route(self._membership.launcher_lost(launcher)))

    def _on_child(self, _mask: int = 0) -> None:
        """React to a change of a child: a launcher exited or was stopped, or an orphan exited.

        Processes that a lost launcher leaves behind become children of this process.
        """
        for pid, status in self._children.reap():
            if os.WIFSTOPPED(status):  # a launcher must run, since it reports the exits
                os.kill(pid, signal.SIGCONT)
        self._sweep()

    def _sweep(self) -> None:
        again = self._children.sweep()
        if again < math.inf:
            self.reactor.call_later(again - environments.current.now(), self._sweep)

    def _on_started(self, link: Link, message: dict[str, Any], fds: list[int]) -> list[int]:
        kept: list[int] = []
        each = len(fds) // max(1, len(message["procs"]))  # one each where there are no pidfds
        for index, (uid, pid) in enumerate(message["procs"]):
            process = self._processes.get(uid)
            if process is not None:
                process.pid = pid
                mine = fds[index * each : (index + 1) * each]
                *pidfd, process.box = mine
                process.pidfd = pidfd[0] if pidfd else -1
                kept += mine
        self._audit("spawned", procs=[{"uid": f"{u:x}", "pid": pid} for u, pid in message["procs"]])
        if self._kill_count is None:  # done here, as no request waits for the agent now
            self._kill_count = KillCount()
        return kept

    def _on_stopped(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        name = _signal_name(message["signal"])
        self._membership.stopped(message["uid"], name, environments.current.now())
        self._set_alarm()

    def _on_continued(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self._membership.continued(message["uid"])

    def _on_exited(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        for exited in message["procs"]:
            process = self._processes.get(exited["uid"])
            if process is None:
                continue  # condemned before, and already removed
            killer = ""
            if exited.get("status") == signal.SIGKILL and not process.killed and self._kill_count:
                killer = self._kill_count.claim()
            kind, text, cause = _cause(exited)
            if not self._membership.is_ready(process.uid) and "status" in exited:
                kind = FAILED
                status = " ".join(filter(None, [_status(exited["status"]), killer]))
                text = (
                    "error creating proc: its command ended before it became a proc "
                    f"({status}); does its interpreter have monarch?"
                )
            elif killer:
                text += f", {killer}"
            # Requests that the proc sent before it exited still count. The link may stay open: a
            # child that user code forked holds it, too.
            while process.link.fileno >= 0 and self._read(process.link):
                pass
            self._perform(self._directory.exited([process.uid]))
            crashed = kind == FAILED and process.box >= 0
            trace = crash_trace(black_box.read(process.box)) if crashed else ""
            # Advise only if the proc failed without a trace and nothing else explains the failure.
            known = trace or killer or process.killed or process.remembered
            advice = "" if cause != SYSTEM or kind != FAILED or known else _ADVICE
            self._left(process, kind, text, cause, trace, advice)

    def _on_way(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        """Send a proc the address at which to invite a proc of another host."""
        peer_host = self._peer_hosts.get(self._directory.host_of(message["to"]) or "")
        address, secured = ("", False) if peer_host is None else peer_host.link.here
        self._tell(link, {"op": "way", "to": message["to"], "here": address, "tls": secured})

    def _on_data_connection(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        """Report that a peer reached the door of a proc, or was refused there."""
        peer, refused = message["peer"], message["refused"]
        if self._directory.here == HOME:
            return
        if refused:
            told = {"op": "refused", "peer": peer, "reason": f"proc {link.uid:x}: {refused}"}
            self._tell(self._first, told)
        else:
            certificate = message["certificate"]
            self._audit("connected", uid=f"{link.uid:x}", peer=peer, certificate=certificate)

    def _audit(self, event: str, **fields: Any) -> None:
        """Let the worker record an event; the client's own host keeps no audit log."""
        if self._directory.here != HOME:
            self._tell(self._first, {"op": "audit", "event": event, "fields": fields})

    # -- exits -----------------------------------------------------------------------------------

    def _left(
        self, process: _Process, kind: str, text: str, cause: str, trace: str = "", advice: str = ""
    ) -> None:
        """Release what an exited proc held; announce its exit once its output is flushed."""
        uid = process.uid
        now = environments.current.wall_time()
        verdict = Verdict(kind, text, cause, self._host, process.pid, now, (), trace, advice)
        del self._processes[uid]
        self.casts.caller_gone(uid, for_good=True)
        self._audit("stopped", uid=f"{uid:x}", pid=process.pid, reason=text)
        if process.link.fileno >= 0:
            self._close(process.link)
        if process.pidfd >= 0:
            os.close(process.pidfd)
        if process.box >= 0:
            os.close(process.box)
        if self._relay is None or not process.captured:
            self._announce(uid, verdict)
            return

        def known(tail: list[str]) -> None:
            self._announce(uid, verdict._replace(tail=tuple(tail if kind == FAILED else ())))

        def late() -> None:  # the terminal does not take the output
            self._announce(uid, verdict)

        self._relay.finish(uid, lambda tail: self.reactor.call_soon(known, tail))
        self.reactor.call_later(_OUTPUT_WAIT, late)

    def _announce(self, uid: int, verdict: Verdict) -> None:
        if not self._ends:
            self.reactor.call_soon(self._announce_all)  # exits often come in groups
        self._ends.append((uid, verdict))

    def _announce_all(self) -> None:
        ends, self._ends = self._ends, []
        self._perform(self._directory.ended(ends))

    def _kill(self, process: _Process) -> None:
        process.killed = True
        if process.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it exited; the report follows
                signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        elif process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        elif process.link.fileno >= 0:
            # Not started yet: the proc will exit as soon as it reads its control link.
            process.link.sock.shutdown(socket.SHUT_RDWR)

    # -- drivers ---------------------------------------------------------------------------------

    def _on_keep(self, link: Link, message: dict[str, Any], fds: list[int]) -> list[int]:
        return self._keeper.keep(message, fds)

    def _on_remember(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self._keeper.remember(message["uid"], message["keepsake"])

    def _on_forget(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self._keeper.forget(message["uid"])

    def _on_here(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self._keeper.driver_is_here(link)

    def _admit_client(self, link: Link) -> None:
        self._processes[self._client_uid] = _Process(self._client_uid, link)

    def _end(self, reason: str = FAREWELL) -> None:
        """Exit and kill all procs: the client has exited, or no longer needs this host."""
        self._keeper.shut_door()
        for peer_host in list(self._peer_hosts.values()):
            peer_host.link.end(reason)
        self._perform(self._membership.client_lost())
        self._children.end(ask=True)
        if self._relay is not None:
            self._relay.end(_LAST_OUTPUT_WAIT)
        self._scratch.remove()
        os._exit(0)

    # -- what the membership decides -------------------------------------------------------------

    def _perform(
        self,
        effects: Sequence[Effect],
        fds: Sequence[int] = (),
        said: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Perform effects. A `Hand` passes on `fds`, and the fields `said` with its notice."""
        for effect in effects:
            if isinstance(effect, Tell):
                self._tell(self._processes[effect.to].link, effect.notice)
            elif isinstance(effect, Hand):
                notice = {"op": "peer", "uid": effect.sender, **said}
                self._tell(self._processes[effect.to].link, notice, list(fds))
            elif isinstance(effect, Condemn):
                process = self._processes[effect.uid]
                self._kill(process)
                self._left(process, FAILED, effect.error, INFRASTRUCTURE)
            elif isinstance(effect, Send):
                self._peer_host(effect.host).say(effect.message)
            elif isinstance(effect, Tunnel):
                near, far, first, stream = effect[1:]
                sock = socket.socket(fileno=self._take(near, far, stream))
                self._peer_host(effect.host).open(near, far, sock, first=first, stream=stream)
            elif isinstance(effect, Refuse):
                os.close(self._take(*effect))
                self.casts.settled(effect.near)
            elif isinstance(effect, Keep):
                self._hold(os.dup(fds[0]), effect.near, effect.far)
            elif isinstance(effect, Admit):
                self._admit(*effect)
            elif isinstance(effect, Attach):
                self._peer_host(effect.host)
            elif isinstance(effect, Spread):
                for peer_host in self._peer_hosts.values():
                    peer_host.say(effect.message)
            else:
                for uid in effect.uids:
                    self._kill(self._processes[uid])
        self._set_alarm()

    def _admit(self, near: int, far: int, stream: str) -> None:
        """Hand a held descriptor to its receiver, which is known here by now."""
        fd = self._take(near, far, stream)
        effects = self._directory.introduce_here(near, far, stream=bool(stream))
        self._perform(effects, [fd], {"for": stream} if stream else {})
        os.close(fd)

    def _set_alarm(self) -> None:
        deadline = self._directory.deadline
        if deadline < self._alarm_at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = deadline
            self._alarm = self.reactor.call_later(deadline - environments.current.now(), self._tick)

    def _tick(self) -> None:
        self._alarm_at = math.inf
        self._perform(self._directory.tick(environments.current.now()))

    # -- other hosts -----------------------------------------------------------------------------

    def _peer_host(self, host: str) -> PeerHost:
        """Return the agent of `host`; dial the host if there is no session with it."""
        peer_host = self._peer_hosts.get(host)
        if peer_host is None:
            # A worker that is being attached may not have started yet; others run, or have run.
            new = host in self._attaching
            peer_host = self._new_peer_host(
                host,
                self._dial,
                self._attach_limits.get(host, settings.mesh_attach_config_timeout)
                if new
                else 3 * settings.host_timeout,
            )
        return peer_host

    def _new_peer_host(
        self, host: str, dial: Callable[[PeerHost], None] | None, patience: float
    ) -> PeerHost:
        from monarch._engine.runtime.hosts.peer_host import PeerHost  # most jobs have one host

        peer_host = self._peer_hosts[host] = PeerHost(
            self,
            host,
            dial,
            environments.current.chance(1 << 62) + 1,
            patience,
            settings.host_timeout,
            settings.codec_max_frame_length,
        )
        return peer_host

    def _dial(self, peer_host: PeerHost) -> None:
        """Open a connection to a worker, on a thread of its own."""
        from monarch._engine.protocol.session.handshake import HandshakeError
        from monarch._engine.runtime.admission.gateway import Gateway
        from monarch._engine.runtime.admission.handshake_io import dial, direct_way, why_unreachable
        from monarch._engine.runtime.admission.secret import SecretError, find_secret

        address = self._addresses.get(peer_host.name)
        if address is None:  # home dials the others, and is never dialed
            peer_host.dial_failed("its address is not known here", for_good=True)
            return
        purpose = {
            "client": self._client_uid,
            "from": self._directory.here,
            "as": peer_host.name,
            "session": peer_host.number,
            "reign": self._reign if self._keeper.awaits(peer_host.name) else 0,
        }

        timeout = max(settings.host_timeout / 3, 0.5)

        def run() -> None:
            try:
                key = find_secret(self._secrets.get(peer_host.name))
                where = ChannelAddr.parse(address)
                way: Route = direct_way
                if self._gateway is not None:
                    through = ChannelAddr.parse(self._gateway)
                    way = Gateway(through, find_secret(), self._client_uid, self._trusting).open
                sock = dial(where, key, purpose, timeout, trusting=self._trusting, way=way)
            except (HandshakeError, SecretError, ValueError) as error:
                failed = functools.partial(peer_host.dial_failed, str(error), for_good=True)
                self.reactor.call_soon(failed)
            except OSError as error:
                text = why_unreachable(error, timeout)
                self.reactor.call_soon(self._dial_failed, peer_host, text)
            else:
                self.reactor.call_soon(peer_host.dialed, sock)

        environments.current.start_thread("monarch-dial", run)

    def _dial_failed(self, peer_host: PeerHost, problem: str) -> None:
        """Report why a dial failed to the member that waits for the host; more dials follow."""
        self._tell_attacher(peer_host.name, "attaching", problem)
        peer_host.dial_failed(problem, for_good=False)

    def _on_attach(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        """Attach hosts for the client: by name, the addresses where their workers listen."""
        from monarch._engine.runtime.admission.secret import take_settings

        take_settings(message["environ"])
        settings.install_client_values(message["config"])
        # Settings that were configured after this process started take effect now.
        self.monitor.be_patient(settings.host_timeout)
        for peer_host in self._peer_hosts.values():
            peer_host.be_patient(settings.host_timeout)
        self._gateway = message["gateway"]
        self._trusting |= message["trusting"]
        self._addresses.update(message["hosts"])
        self._secrets.update(message["secrets"])
        if message["reign"]:
            self._reign = message["reign"]
            self._keeper.attach_again(list(message["hosts"]))
        for host in message["hosts"]:
            self._perform(self._directory.host_found(host))
            self._attaching[host] = link.uid
            if message["timeout"] is not None:
                self._attach_limits[host] = message["timeout"]
            if self._peer_host(host).link.up:
                self.peer_host_up(self._peer_hosts[host])
        for peer_host in self._peer_hosts.values():
            peer_host.say(self._directory_message())

    def _on_detach(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        """Leave hosts that the client no longer needs; `shutdown`: end their workers, too.

        Answered by ``detached`` once each host has received the order, or its session is over. The
        asker may exit then, and this agent with it; whatever it has not sent by then is lost.
        """
        shutdown, missing = message["shutdown"], len(message["hosts"])

        def one_less() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self._tell(link, {"op": "detached", "number": message["number"]})

        for host in message["hosts"]:
            # Removed at once, so that attaching again begins a new session.
            peer_host = self._peer_hosts.pop(host, None)
            if peer_host is None:
                one_less()
            else:
                peer_host.leave(one_less, shutdown=shutdown)
            how = "shut down" if shutdown else "released"
            self._perform(self._directory.host_left(host, f"host {host} was {how}"))

    def _on_connection(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        """Take over a connection from the worker: of home, or of another host of the job."""
        from monarch._engine.runtime.admission.authenticated import AuthenticSocket

        sock = socket.socket(fileno=os.dup(fds[0]))

        def admit(sock: Wire) -> None:
            if message.get("claim"):
                self._keeper.answer_claim(sock)
            else:
                self._adopt(message["from"], sock, message["reign"], message["number"])

        key = bytes.fromhex(message["session"])
        if not message["tls"]:
            admit(sock if message["bare"] else AuthenticSocket(sock, key, dialer=False))
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
            self._tell(self._first, {"op": "refused", "peer": message["peer"], "reason": why})
            if not (self._greeted or self._peer_hosts):  # started for that connection only
                self._end()

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

    def _adopt(self, host: str, sock: Wire, reign: int, number: int) -> None:
        """Use an authenticated connection of another host; a higher `reign` is of a new home."""
        if host == HOME and reign > self._reign:
            if not self._keeper.may_come_home(reign):
                sock.close()
                return
            self._reign = reign
            self._tell(self._first, {"op": "home", "reign": reign, "number": number})
        peer_host = self._peer_hosts.get(host)
        if peer_host is None:
            peer_host = self._new_peer_host(host, None, settings.host_timeout)
        peer_host.answer(sock)

    # The methods that `CastRelay` needs (see `Carrier`).

    def cast_way(self, host: str, *, dial: bool) -> Way | None:
        peer_host = self._peer_host(host) if dial else self._peer_hosts.get(host)
        return None if peer_host is None else peer_host.way

    def cast_comes(self, near: int, far: int) -> bool:
        return (near, far, "") in self._ends_held

    def cast_tell(self, proc: int, frame: bytes) -> None:
        process = self._processes.get(proc)
        if process is not None:
            process.link.send(frame)

    def cast_later(self, delay: float, action: Callable[[], None]) -> Timer:
        return self.reactor.call_later(delay, action)

    def cast_now(self) -> float:
        return environments.current.now()

    def _directory_message(self) -> dict[str, Any]:
        """Return what other hosts need to connect to one another."""
        return {
            "op": "addresses",
            "hosts": self._addresses,
            "secrets": self._secrets,
            "trusting": self._trusting,
        }

    def peer_host_up(self, peer_host: PeerHost) -> None:
        """Handle the first connection of a session with another host."""
        host = peer_host.name
        if host != HOME:
            self._perform(self._directory.host_found(host))
        if self._directory.here == HOME:
            peer_host.say(self._directory_message())
            self._keeper.peer_host_up(peer_host)
        elif host == HOME and self._reign:
            self._keeper.home_found(peer_host)
        if not self._keeper.awaits(host):
            self._tell_attached(host, None)

    def connection_altered(self, peer_host: PeerHost) -> None:
        """Record that bytes from another host were altered in transit; the link reconnects."""
        self._audit("altered", host=peer_host.name)

    def peer_host_lost(self, peer_host: PeerHost, reason: str) -> None:
        """Handle the loss of the session with another host: it cannot be reached any longer."""
        host = peer_host.name
        if self._peer_hosts.get(host) is not peer_host:
            return
        del self._peer_hosts[host]
        if host == HOME:
            if not self._keeper.home_lost(reason):
                self._end()
            return
        self._tell_attached(host, reason)
        known = self._given_up.pop(host, None)
        if known is not None:
            self._perform(self._directory.host_lost(host, known))
            return
        if reason.endswith(FAREWELL):  # it ends with the client, or the client detached it
            self._perform(self._directory.host_left(host, f"host {host} was released"))
            return
        text = f"host {host} is unreachable: {reason}"
        self._perform(self._directory.host_lost(host, Verdict(FAILED, text, INFRASTRUCTURE)))

    def _give_up(self, host: str, verdict: Verdict) -> None:
        """End the session with a host that home has given up: its part of the job ends."""
        peer_host = self._peer_hosts.get(host)
        if peer_host is not None:
            self._given_up[host] = verdict
            peer_host.link.end(verdict.error)
        elif host != self.name:
            self._perform(self._directory.host_lost(host, verdict))

    def _tell_attached(self, host: str, error: str | None) -> None:
        self._tell_attacher(host, "attached", error)
        self._attaching.pop(host, None)
        self._attach_limits.pop(host, None)

    def _tell_attacher(self, host: str, op: str, error: str | None) -> None:
        process = self._processes.get(self._attaching.get(host, 0))
        if process is not None:
            self._tell(process.link, {"op": op, "host": host, "error": error})

    def tunnel_opened(
        self,
        peer_host: PeerHost,
        tunnel: HostTunnel | StreamTunnel,
        *,
        first: bool,
        stream: str,
    ) -> None:
        """Connect a link, or a stream, that another agent carries to a proc of this host."""
        ours, theirs = socket.socketpair()
        tunnel.attach(ours)
        asker, to = tunnel.far, tunnel.near
        if first:  # the next message starts the proc
            self._directory.admit(asker, peer_host.name)
            self._hold(theirs.detach(), asker, to)
            return
        effects = self._directory.opened(
            peer_host.name, asker, to, environments.current.now(), stream=bool(stream)
        )
        said: dict[str, Any] = {}
        if stream:
            address, secured = peer_host.link.here
            said = {"for": stream, "via": {"here": address, "tls": secured}}
        self._perform(effects, [theirs.fileno()], said)
        theirs.close()  # if no proc took it, the other end is now closed

    def from_peer_host(self, peer_host: PeerHost, message: dict[str, Any]) -> None:
        """Handle a message of another agent."""
        op = message["op"]
        if op == "spawn":
            self._spawn_for_guest(peer_host, message)
        elif op == "ask":
            request = message["request"]
            asker = message.get("from", 0)
            if asker:
                self._directory.admit(asker, peer_host.name)
            if request["op"] not in _FOR_GUESTS:
                raise ProtocolError(f"a guest may not ask for {request['op']!r}")
            getattr(self, _REQUESTS[request["op"]])(_Guest(asker), request, [])
        elif op == "addresses":
            self._addresses.update(message["hosts"])
            # These are paths on the client's machine. Other machines have our job's secret only.
            secrets = message["secrets"].items()
            self._secrets.update({host: path for host, path in secrets if os.path.exists(path)})
            self._trusting = message["trusting"]
        elif op == "job":
            self._keeper.heard(message)
        elif op == "resumed":
            self._keeper.resumed(peer_host.name, message)
            self._tell_attached(peer_host.name, None)
        elif op == "lost":
            self._give_up(message["host"], Verdict.from_fields(message["end"]))
        elif op == "unheard":  # the driver has exited; another may replace it
            if self._relay is not None:
                self._relay.client_left()
        elif op == "leave":
            if message["shutdown"]:
                self._tell(self._first, {"op": "shutdown"})
            self._end()
        else:
            if op == "left":
                self.casts.caller_left(peer_host.way, message["uid"])
            now = environments.current.now()
            self._perform(self._directory.heard(peer_host.name, message, now))

    def _spawn_for_guest(self, peer_host: PeerHost, message: dict[str, Any]) -> None:
        parent, procs = message["parent"], message["procs"]
        self._directory.admit(parent, peer_host.name)
        ends = [self._take(parent, proc["uid"]) for proc in procs]
        # A process inherits this host's environment, which was set up for its worker.
        spec = {**message["spec"], "env": dict(os.environ), "cwd": os.getcwd()}
        spec["path"] = [*sys.path, *(entry for entry in spec["path"] if entry not in sys.path)]
        if self._membership.alive(parent):
            self._spawn_here(parent, spec, procs, ends)
        for fd in ends:
            os.close(fd)


def _cause(message: dict[str, Any]) -> tuple[str, str, str]:
    """Return the kind, text and cause of an exit that a launcher reports."""
    error = message.get("error")
    if error is not None:
        return FAILED, f"error creating proc: {error}", INFRASTRUCTURE
    code = os.waitstatus_to_exitcode(message["status"])
    if code == 0:
        return STOPPED, "process exited cleanly", SYSTEM
    text = f"the process this actor was running on exited with non-zero code {code}"
    if code < 0:
        text = f"the process this actor was running on failed: Killed(sig={-code})"
        text += f", {_signal_name(-code)}"
    return FAILED, text, SYSTEM


def _status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else _signal_name(-code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
