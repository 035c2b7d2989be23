"""The processes of a host, as its agent sees them: their links, descriptors, kills and exits."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from monarch._engine.base.crash import crash_trace
from monarch._engine.base.error_page import see_page
from monarch._engine.base.verdict import FAILED, NOT_CREATED, SYSTEM, Verdict
from monarch._engine.launch import black_box
from monarch._engine.launch.cores import divided, read_by_libraries
from monarch._engine.launch.exit_status import describe, why_exited
from monarch._engine.launch.interpreter import on_host
from monarch._engine.launch.out_of_memory import KillCount
from monarch._engine.launch.scratch import ScratchFolder
from monarch._engine.runtime.agent.control import Exit
from monarch._engine.runtime.agent.control_links import ControlLinks
from monarch._engine.runtime.agent.launchers import LauncherLink, Launchers
from monarch._engine.runtime.agent.output import Output, Uncaptured
from monarch._engine.runtime.io import environment as environments
from monarch._engine.transport.link import Link
from monarch._engine.transport.unix_peer import peer_of

__all__ = ["Process", "Processes"]

_ADVICE = "configure(tail_log_lines=20) would show here what it printed last"
_SPARE = 64  # descriptors reserved for everything else


class Process:
    """A member that runs on this host: its link, descriptors and process."""

    __slots__ = (
        "box",
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
        self, uid: int, link: Link, launcher: LauncherLink | None = None, scratch: str = ""
    ) -> None:
        self.uid = uid
        self.link = link
        self.launcher = launcher
        self.scratch = scratch
        self.pid = 0
        self.pidfd = -1
        self.box = -1  # for the `black_box`
        self.killed = False  # by this agent
        self.remembered = False  # whether the relay keeps its last lines


class Processes:
    """The processes of this host; see the module. These are the `Members` of the agent's core.

    Args:
        links: makes the control links.
        launchers: start procs.
        capture: returns what captures the output of procs; called for the first that ask for it.
        audit: records an event, with its fields.
    """

    def __init__(
        self,
        links: ControlLinks,
        launchers: Launchers,
        capture: Callable[[], Output],
        audit: Callable[..., None],
    ) -> None:
        self._links = links
        self._launchers = launchers
        self.output: Output = Uncaptured()
        self._capture = capture
        self._audit = audit
        self._host = socket.gethostname()
        self._scratch = ScratchFolder()
        self._kill_count: KillCount | None = None
        self._processes: dict[int, Process] = {}

    def find(self, uid: int) -> Process | None:
        """Return the process of a member of this host; None if it has exited."""
        return self._processes.get(uid)

    def capture(self) -> Output:
        """Return what captures the output of procs; make it if there is none."""
        if isinstance(self.output, Uncaptured):
            self.output = self._capture()
        return self.output

    def pids(self) -> dict[int, int]:
        """Return the pids of the procs of this host that have started, by uid."""
        return {uid: process.pid for uid, process in self._processes.items() if process.pid}

    def admit(self, uid: int, link: Link) -> None:
        """Add a member that was not launched here: the client."""
        self._processes[uid] = Process(uid, link)

    def join(self, uid: int, sock: socket.socket) -> None:
        """Add a member that another one has started by itself; `sock` leads to it."""
        link = self._links.connect(sock, f"proc {uid:x}")
        link.uid = uid
        process = self._processes[uid] = Process(uid, link)
        process.pid, _ = peer_of(sock)
        with contextlib.suppress(
            OSError
        ):  # it has exited, and its link is closed; or an old kernel
            process.pidfd = os.pidfd_open(process.pid)

    def joined(self, uid: int) -> bool:
        """Whether a member has joined, and has not exited."""
        process = self._processes.get(uid)
        return process is not None and process.launcher is None

    def remove(self, uid: int) -> bool:
        """Remove the client; return whether it was admitted."""
        return self._processes.pop(uid, None) is not None

    # -- messages --------------------------------------------------------------------------------

    def tell(self, uid: int, notice: dict[str, Any]) -> None:
        """See `Members`."""
        self._links.tell(self._processes[uid].link, notice)

    def hand(self, uid: int, notice: dict[str, Any], end: int) -> None:
        """See `Members`."""
        try:
            self._links.tell(self._processes[uid].link, notice, [end])
        finally:
            os.close(end)

    def send(self, uid: int, frame: bytes) -> None:
        """See `Members`."""
        process = self._processes.get(uid)
        if process is not None:
            process.link.send(frame)

    def discard(self, end: int) -> None:
        """See `Members`."""
        os.close(end)

    def set_output(self, request: Any, then: Callable[[set[int]], None]) -> None:
        """See `Members`."""
        self.output.configure(request, then)

    # -- launch ----------------------------------------------------------------------------------

    def launcher(self, spec: dict[str, Any]) -> LauncherLink:
        """See `Members`."""
        environ, threads = divided(spec["env"], spec["on_each"], spec["bindings"])
        loads = read_by_libraries(spec["preload"])
        return self._launchers.find(environ, spec.get("python"), threads if loads else {})

    def localized(self, spec: dict[str, Any]) -> dict[str, Any]:
        """See `Members`. A process inherits this host's environment, as set up for its worker."""
        path = on_host(sys.path, spec["path"])
        return {**spec, "env": dict(os.environ), "cwd": os.getcwd(), "path": path}

    def launch(
        self,
        launcher: LauncherLink,
        parent: int,
        spec: dict[str, Any],
        procs: Sequence[dict[str, Any]],
        ends: Sequence[int],
    ) -> Verdict | None:
        """See `Members`."""
        ours = list(ends)
        try:
            refused = self._refused(len(procs))
            if refused is None:
                self._start(launcher, parent, spec, procs, ours)
            return refused
        finally:
            for fd in ours:
                os.close(fd)

    def _refused(self, count: int) -> Verdict | None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Each proc takes three descriptors for good (control link, pidfd and black box), or five if
        # its output is captured, and up to three more until the launcher has received them.
        coming = 2 * sum(process.box < 0 for process in self._processes.values())
        taken = len(os.listdir("/dev/fd")) + coming
        if taken + 8 * count + _SPARE <= limit:
            return None
        error = (
            f"error creating proc: the host agent may open no more than {limit} descriptors "
            "(ulimit -n); start fewer processes, or raise the limit"
        )
        return Verdict(FAILED, error, code=NOT_CREATED)

    def _start(
        self,
        launcher: LauncherLink,
        parent: int,
        spec: dict[str, Any],
        procs: Sequence[dict[str, Any]],
        ours: list[int],
    ) -> None:
        """Order the launcher to start procs. `ours`: descriptors to close; more are added."""
        environ, threads = divided(spec["env"], spec["on_each"], spec["bindings"])
        spec = {**spec, "env": {**environ, **threads}}
        links = ours.copy()
        passed: list[int] = []
        orders: list[dict[str, Any]] = []
        for link, proc in zip(links, procs, strict=True):
            uid = proc["uid"]
            mine, theirs = socket.socketpair()
            control = self._links.connect(mine, f"proc {uid:x}")
            control.uid = uid
            scratch = self._scratch.new(spec["env"], spec["cwd"])
            process = self._processes[uid] = Process(uid, control, launcher, scratch)
            handed = [theirs.detach()]
            options = spec["logs"]
            if options is not None:
                handed += self.capture().capture(uid, proc, options)
                process.remembered = options["tail"] > 0
            ours += handed
            passed += [link, *handed]
            around = {"agent": os.getpid(), "parent": parent, "scratch": scratch}
            orders.append({**proc, **around, "captured": len(handed) > 1})
        order = {
            "op": "fork",
            "spec": spec,
            "preload": spec["preload"],
            "path": spec["path"],
            "threads": threads,
            "procs": orders,
        }
        self._links.tell(launcher.link, order, passed)

    def started(self, procs: Sequence[tuple[int, int]], fds: list[int]) -> None:
        """Record the pids of procs that were started, and take their descriptors from `fds`."""
        each = len(fds) // max(1, len(procs))  # one each where there are no pidfds
        unclaimed: list[int] = []
        for index, (uid, pid) in enumerate(procs):
            mine = fds[index * each : (index + 1) * each]
            process = self._processes.get(uid)
            if process is None:
                unclaimed += mine
                continue
            process.pid = pid
            *pidfd, process.box = mine
            process.pidfd = pidfd[0] if pidfd else -1
        fds[:] = unclaimed
        self._audit("spawned", procs=[{"uid": f"{uid:x}", "pid": pid} for uid, pid in procs])
        if self._kill_count is None:  # done here, as no request waits for the agent now
            self._kill_count = KillCount()

    # -- exits -----------------------------------------------------------------------------------

    def kill(self, uid: int) -> None:
        """See `Members`."""
        process = self._processes[uid]
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

    def killer(self, exit_: Exit) -> str:
        """Return what has killed a process that this program did not kill; empty if unknown."""
        process = self._processes[exit_["uid"]]
        if exit_.get("status") == signal.SIGKILL and not process.killed and self._kill_count:
            return self._kill_count.claim()
        return ""

    def why_exited(self, exit_: Exit, killer: str, *, ready: bool) -> Verdict:
        """Return the verdict on the exit of a proc that is not forgotten yet.

        `ready`: whether it had become a proc.
        """
        process = self._processes[exit_["uid"]]
        kind, text, cause = why_exited(exit_.get("status"), exit_.get("error"))
        code = "" if ready and "status" in exit_ else NOT_CREATED
        if not ready and "status" in exit_:
            kind = FAILED
            status = " ".join(filter(None, [describe(exit_["status"]), killer]))
            text = (
                "error creating proc: its command ended before it became a proc "
                f"({status}); does its interpreter have monarch?"
            )
        elif killer:
            text += f", {killer}"
        crashed = kind == FAILED and process.box >= 0
        trace = crash_trace(black_box.read(process.box)) if crashed else ""
        # Advise only if the proc failed without a trace and nothing else explains the failure.
        known = trace or killer or process.killed or process.remembered
        advice = (
            "" if cause != SYSTEM or kind != FAILED or known else _ADVICE + see_page("process-lost")
        )
        verdict = self.verdict(process.uid, kind, text, cause)
        return verdict._replace(trace=trace, advice=advice, code=code)

    def verdict(self, uid: int, kind: str, text: str, cause: str) -> Verdict:
        """See `Members`."""
        now = environments.current.wall_time()
        return Verdict(kind, text, cause, self._host, self._processes[uid].pid, now)

    def forget(self, uid: int, verdict: Verdict) -> None:
        """See `Members`."""
        process = self._processes.pop(uid)
        self._audit("stopped", uid=f"{uid:x}", pid=process.pid, reason=verdict.error)
        self._links.close(process.link)
        if process.pidfd >= 0:
            os.close(process.pidfd)
        if process.box >= 0:
            os.close(process.box)

    def flush(self, uid: int, verdict: Verdict, then: Callable[[Verdict], None]) -> None:
        """See `Members`."""

        def known(tail: list[str]) -> None:
            then(verdict._replace(tail=tuple(tail)) if verdict.kind == FAILED else verdict)

        self.output.finish(uid, known)

    def scratch_of(self, launcher: LauncherLink) -> list[str]:
        """Return the scratch directories of the procs of a launcher."""
        return [one.scratch for one in self._processes.values() if one.launcher is launcher]

    def end(self) -> None:
        """Remove the scratch directories, when all procs have exited."""
        self._scratch.remove()
