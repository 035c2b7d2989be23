"""The host agent: one process per host that launches, watches, introduces and ends procs.

It runs no user code, so liveness and clean-up never wait for somebody's interpreter lock. Procs
and the client hold one control link each (frames of JSON, see `Proc.tell_agent`)::

    spawn       start procs through the right launcher; their links come along as descriptors
    introduce   hand the other end of a socket pair to a proc
    autopsy     why is this proc gone? Answered when known
    kill        end procs now
    preload     import modules in the launcher, ahead of the first spawn
    logging     stream the output of procs to the client, or not, and set their log level
    log_flush   pass on what procs printed so far; answered with ``log_flushed``
    log_printed the client printed so much of what was streamed to it

and the agent answers with ``gone`` (procs that ended, and why) and ``peer`` (an introduction).
Output is captured if the spawn asks for it, and is the `LogRelay`'s business.

The tree of processes is the tree of spawns: when a proc ends, the procs it spawned are killed, and
when the client's link closes, all are. The agent's own end closes every control link, which ends
every proc at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from typing import Any

from monarch._engine.base.errors import ProtocolError
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, STOPPED, SYSTEM, Verdict
from monarch._engine.launch.launcher import Launcher, die_with_parent, launch_key
from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.log_relay import LogRelay
from monarch._engine.runtime.reactor import WRITE, Reactor
from monarch._engine.transport.link import Link
from monarch._engine.wire.frame import CONTROL, Frame, pack

__all__ = ["Agent"]

_FRAME_LIMIT = 64 << 20
_QUEUE_LIMIT = 1 << 40  # control messages are small and few; the agent never waits
_OUTPUT_WAIT = 5.0  # seconds that the news of an end waits for a stuck terminal to take the output
_SPARE = 64  # descriptors for everything else
_LAST_OUTPUT_WAIT = 0.5  # seconds that the agent's own end does


# What procs and the client may ask, and what launchers report.
_REQUESTS = {
    op: f"_on_{op}"
    for op in (
        "autopsy",
        "introduce",
        "kill",
        "log_flush",
        "log_printed",
        "logging",
        "preload",
        "ready",
        "spawn",
    )
}
_REPORTS = {op: f"_on_{op}" for op in ("started", "exited")}


class _Member:
    """A proc of this host, or the client."""

    __slots__ = (
        "askers",
        "captured",
        "children",
        "exited",
        "gone",
        "launcher",
        "link",
        "parent",
        "pid",
        "pidfd",
        "ready",
        "uid",
    )

    def __init__(self, uid: int, link: Link, parent: int, launcher: _LauncherLink | None) -> None:
        self.uid = uid
        self.link = link
        self.parent = parent
        self.launcher = launcher
        self.pid = 0
        self.pidfd = -1
        self.captured = False  # its output comes by the relay
        self.exited = False
        self.ready = True
        self.gone: list[Any] | None = None  # the fields of a Verdict
        self.askers: set[int] = set()
        self.children: set[int] = set()


class _LauncherLink:
    __slots__ = ("link", "members", "pid")

    def __init__(self, link: Link, pid: int) -> None:
        self.link = link
        self.pid = pid
        self.members: set[int] = set()


class Agent:
    """See the module. `first` connects the client, whose uid is `client_uid`."""

    def __init__(
        self, first: socket.socket, client_uid: int, child_main: Any, prepare: Any
    ) -> None:
        self._child_main = child_main
        self._prepare = prepare
        self.reactor = Reactor()
        self._members: dict[int, _Member] = {}
        self._launchers: dict[Any, _LauncherLink] = {}
        self._own_key = launch_key(os.environ)
        self._client_uid = client_uid
        self._host = socket.gethostname()
        self._relay: LogRelay | None = None
        self._notices: dict[int, list[list[Any]]] = {}  # asker -> ends it is to hear of
        self._launchers[(self._own_key, sys.executable)] = self._fork_launcher(first)
        link = self._connect(first, "the client")
        link.uid = client_uid
        self._members[client_uid] = _Member(client_uid, link, 0, None)

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

    def _read(self, link: Link) -> None:
        try:
            for frame in link.receive(self.reactor.scratch):
                self._handle(link, frame)
            if link.reader.refused is not None:
                raise link.reader.refused
        except (ProtocolError, ValueError, TypeError, LookupError) as error:
            print(f"monarch: {link.peer} sent what it must not: {error}", file=sys.stderr)
            link.lose(str(error))
            member = self._members.get(link.uid)
            if member is not None and member.uid != self._client_uid:
                self._kill(member)  # it cannot be spoken to any more
        if link.lost is not None and link.fileno >= 0:
            self.reactor.unregister(link.fileno)
            link.close(link.lost)
            link.fileno = -1
            self._link_lost(link)

    def _link_lost(self, link: Link) -> None:
        if isinstance(link.owner, _LauncherLink):
            self._launcher_lost(link.owner)
        elif link.uid == self._client_uid:
            self._end()
        # A proc's control link closes when it ends: its exit is reported by the launcher.

    def _tell(self, link: Link, message: dict[str, Any], fds: list[int] | None = None) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        link.send(pack(CONTROL, 0, 0, 0, b"", body, nfd=len(fds or ())), fds)

    def _handle(self, link: Link, frame: Frame) -> None:
        fds = link.take_fds(frame.nfd)
        message = json.loads(frame.body)
        table = _REPORTS if isinstance(link.owner, _LauncherLink) else _REQUESTS
        kept = getattr(self, table[message["op"]])(link, message, fds)
        for fd in fds:
            if fd not in (kept or ()):
                os.close(fd)

    # -- requests --------------------------------------------------------------------------------

    def _on_spawn(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        spec = message["spec"]
        parent = self._members[message["parent"]]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Each takes two that stay (its control link and a pidfd), or four with its output, and as
        # many again on their way to the launcher.
        coming = sum(member.gone is None and member.pidfd < 0 for member in self._members.values())
        taken = len(os.listdir("/dev/fd")) + coming
        if taken + 8 * len(message["uids"]) + _SPARE > limit:
            error = (
                f"error creating proc: the host agent may open no more than {limit} descriptors "
                "(ulimit -n); start fewer processes, or raise the limit"
            )
            gone = [[uid, FAILED, error] for uid in message["uids"]]
            self._tell(link, {"op": "gone", "procs": gone})
            return
        launcher = self._launcher_for(spec)
        passed: list[int] = []
        ours: list[int] = []
        procs: list[dict[str, Any]] = []
        for index, uid in enumerate(message["uids"]):
            mine, theirs = socket.socketpair()
            control = self._connect(mine, f"proc {uid:x}")
            control.uid = uid
            self._members[uid] = _Member(uid, control, parent.uid, launcher)
            member = self._members[uid]
            # A fork of ours is sure to come.
            member.ready = "command" not in message["procs"][index]
            parent.children.add(uid)
            launcher.members.add(uid)
            handed = [theirs.detach()]
            proc = message["procs"][index]
            if spec["logs"] is not None:
                handed += self._capture(uid, proc, spec["logs"])
            ours += handed
            passed += [fds[index], *handed]
            procs.append({**proc, "parent": parent.uid})
        self._tell(
            launcher.link,
            {
                "op": "fork",
                "spec": spec,
                "preload": spec["preload"],
                "path": spec["path"],
                "procs": procs,
            },
            passed,
        )
        for fd in ours:
            os.close(fd)
        uids = [uid for uid in message["uids"] if not self._members[uid].ready]
        if uids:
            patience = spec["ready_timeout"]
            self.reactor.call_later(patience, lambda: self._check_ready(uids, patience))

    def _on_ready(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        self._members[link.uid].ready = True

    def _check_ready(self, uids: list[int], patience: float) -> None:
        """Give up on executed commands that did not become procs."""
        for uid in uids:
            member = self._members.get(uid)
            if member is not None and not member.ready and member.gone is None:
                self._kill(member)
                error = (
                    f"error creating proc: its command did not become a proc within {patience:g} s "
                    "(configuration key host_spawn_ready_timeout)"
                )
                self._gone(uid, FAILED, error)

    def _capture(self, uid: int, proc: dict[str, Any], options: dict[str, Any]) -> list[int]:
        """Pipes for the output of a new proc; what it is to have as stdout and stderr."""
        if self._relay is None:
            client = self._members[self._client_uid].link
            run = f"{self._client_uid & (1 << 63) - 1:x}"
            self._relay = LogRelay(lambda message: self._tell(client, message), run)
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self._relay.add(uid, proc["label"], proc["rank"], options, (out, err))
        self._members[uid].captured = True
        return [theirs_out, theirs_err]

    def _on_introduce(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        member = self._members.get(message["to"])
        if member is not None and member.gone is None:
            self._tell(member.link, {"op": "peer", "uid": message["from"]}, fds)
        # Otherwise the descriptor closes, and the asker asks why.

    def _on_autopsy(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        uid = message["uid"]
        member = self._members.get(uid)
        if member is None:
            error = "the process does not exist, or ended long ago"
            self._tell(link, {"op": "gone", "procs": [[uid, FAILED, error]]})
        elif member.gone is not None:
            self._tell(link, {"op": "gone", "procs": [[uid, *member.gone]]})
        else:
            member.askers.add(link.uid)
            # A live process that closed a link to a peer misbehaves only towards that peer, but a
            # caller must not wait for it: say so unless it is seen to end within a second.
            self.reactor.call_later(1.0, lambda: self._still_alive(uid, link))

    def _still_alive(self, uid: int, asker: Link) -> None:
        member = self._members.get(uid)
        if member is not None and member.gone is None and asker.uid in member.askers:
            member.askers.discard(asker.uid)
            error = "the process this actor was running on closed its connection"
            if asker.uid == member.parent:
                self._kill(member)  # its owner can no longer reach it, not even to stop it
            self._tell(asker, {"op": "gone", "procs": [[uid, FAILED, error]]})

    def _on_kill(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        for uid in message["uids"]:
            member = self._members.get(uid)
            if member is not None:
                self._kill(member)

    def _on_preload(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        spec = {"env": message["env"], "python": None}
        self._tell(self._launcher_for(spec).link, {**message, "op": "preload"})

    def _on_logging(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        uids = message["uids"]

        def tell_procs(captured: set[int]) -> None:
            for rank, uid in enumerate(uids):
                member = self._members.get(uid)
                if member is not None and member.gone is None:
                    notice = {
                        "op": "log_level",
                        "level": message["level"],
                        "captured": uid in captured,
                        "from": link.uid,
                        "port": message["port"],
                        "rank": rank,
                    }
                    self._tell(member.link, notice)

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

    def _on_log_flush(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        answer = {"op": "log_flushed", "id": message["id"]}
        if self._relay is None:
            self._tell(link, answer)
        else:
            self._relay.flush(lambda: self._tell(link, answer))

    def _on_log_printed(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        if self._relay is not None:
            self._relay.acknowledge(message["size"])

    # -- launchers -------------------------------------------------------------------------------

    def _launcher_for(self, spec: dict[str, Any]) -> _LauncherLink:
        python = spec.get("python") or sys.executable
        key = (launch_key(spec["env"]), python)
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._exec_launcher(spec["env"], python)
        return launcher

    def _fork_launcher(self, first: socket.socket) -> _LauncherLink:
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            mine.close()
            first.close()
            self.reactor.close()
            die_with_parent()
            Launcher(theirs, self._child_main, self._prepare).run()
            os._exit(0)
        theirs.close()
        return self._launcher_link(mine, pid)

    def _exec_launcher(self, environ: dict[str, str], python: str) -> _LauncherLink:
        mine, theirs = socket.socketpair()
        fd = theirs.fileno()
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
        code = (
            f"import sys; sys.path.insert(0, {root!r}); "
            f"from monarch._engine.runtime.bootstrap import launcher_main; launcher_main({fd})"
        )
        process = subprocess.Popen(
            [python, "-c", code], env=environ, pass_fds=[fd], stdin=subprocess.DEVNULL
        )
        process.returncode = 0  # `_launcher_lost` waits for it, the object need not
        theirs.close()
        return self._launcher_link(mine, process.pid)

    def _launcher_link(self, sock: socket.socket, pid: int) -> _LauncherLink:
        link = self._connect(sock, "a launcher")
        launcher = link.owner = _LauncherLink(link, pid)
        return launcher

    def _launcher_lost(self, launcher: _LauncherLink) -> None:
        for key, known in list(self._launchers.items()):
            if known is launcher:
                del self._launchers[key]
        with contextlib.suppress(ChildProcessError):
            os.waitpid(launcher.pid, 0)  # its socket closed: it is ending
        for uid in list(launcher.members):
            self._gone(uid, FAILED, "the process was killed: its launcher ended unexpectedly")

    def _on_started(self, link: Link, message: dict[str, Any], fds: list[int]) -> list[int]:
        kept: list[int] = []
        for index, (uid, pid) in enumerate(message["procs"]):
            member = self._members.get(uid)
            if member is not None and member.gone is None:
                member.pid = pid
                if fds:
                    member.pidfd = fds[index]
                    kept.append(fds[index])
        return kept

    def _on_exited(self, link: Link, message: dict[str, Any], fds: list[int]) -> None:
        for exited in message["procs"]:
            kind, text, cause = _cause(exited)
            member = self._members.get(exited["uid"])
            if member is not None and not member.ready and "status" in exited:
                kind = FAILED
                text = (
                    "error creating proc: its command ended before it became a proc "
                    f"({_status(exited['status'])}); does its interpreter have monarch?"
                )
            if self._relay is None or member is None or not member.captured:
                self._gone(exited["uid"], kind, text, cause)
            else:
                self._after_output(member, kind, text, cause)

    def _after_output(self, member: _Member, kind: str, text: str, cause: str) -> None:
        """Announce an end once what the process printed is out."""
        assert self._relay is not None
        self._exited(member)

        def known(tail: list[str]) -> None:
            self._gone(member.uid, kind, text, cause, tail if kind == FAILED else [])

        def late() -> None:  # the terminal takes nothing
            self._gone(member.uid, kind, text, cause)

        self._relay.finish(member.uid, lambda tail: self.reactor.call_soon(known, tail))
        self.reactor.call_later(_OUTPUT_WAIT, late)

    # -- ends ------------------------------------------------------------------------------------

    def _gone(
        self,
        uid: int,
        kind: str,
        error: str,
        cause: str = INFRASTRUCTURE,
        tail: list[str] | None = None,
    ) -> None:
        member = self._members.get(uid)
        if member is None or member.gone is not None:
            return
        now = drivers.current.wall_time()
        verdict = Verdict(kind, error, cause, self._host, member.pid, now, tuple(tail or ()))
        member.gone = verdict.to_fields()
        self._exited(member)
        if member.launcher is not None:
            member.launcher.members.discard(uid)
        if member.link.fileno >= 0:
            self.reactor.unregister(member.link.fileno)
            member.link.close("the process ended")
            member.link.fileno = -1
        if not self._notices:
            self.reactor.call_soon(self._send_notices)  # ends often come in crowds
        for asker in {member.parent, *member.askers}:
            self._notices.setdefault(asker, []).append([uid, *member.gone])
        parent = self._members.get(member.parent)
        if parent is not None:
            parent.children.discard(uid)
        for child in list(member.children):
            self._kill(self._members[child])
        self._forget_old()

    def _send_notices(self) -> None:
        notices, self._notices = self._notices, {}
        for asker, procs in notices.items():
            other = self._members.get(asker)
            if other is not None and other.gone is None:
                self._tell(other.link, {"op": "gone", "procs": procs})

    def _exited(self, member: _Member) -> None:
        """There is no process to signal any more."""
        member.exited = True
        if member.pidfd >= 0:
            os.close(member.pidfd)
            member.pidfd = -1

    def _forget_old(self) -> None:
        """Keep the last ends for autopsies, not all of them."""
        if len(self._members) > 10_000:
            for uid, member in list(self._members.items())[:5_000]:
                if member.gone is not None:
                    del self._members[uid]

    def _kill(self, member: _Member) -> None:
        if member.exited:
            return
        if member.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it has ended, the news is under way
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
        elif member.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        else:  # not started yet: it ends as soon as it looks at its control link
            member.link.sock.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        """The client is gone: so is everything it started."""
        for member in list(self._members.values()):
            if member.uid != self._client_uid:
                self._kill(member)
        if self._relay is not None:
            self._relay.end(_LAST_OUTPUT_WAIT)
        os._exit(0)


def _cause(message: dict[str, Any]) -> tuple[str, str, str]:
    """Kind, text and cause of an end that a launcher reports."""
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
