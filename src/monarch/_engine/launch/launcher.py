"""The launcher: a small single-threaded process that forks procs from a warm image.

The launcher has imported the runtime, and numpy or torch if the program uses them (`preload`). So a
fork gives a ready process in about a millisecond, and shares its memory pages with all others. One
launcher serves one *launch environment*: an interpreter and the values of the environment variables
that libraries read while they are imported (`launch_key`, `cores`). Everything else that a process
inherits (other variables, working directory, ``sys.path``) comes with the request, and is set after
the fork. A custom command is executed instead of forked (`BootstrapCommand`).

The launcher and its host agent exchange frames of JSON and descriptors on one socket. The launcher
reports every start (with a pidfd and the `black_box`), every exit, and every stop and continuation
by a signal. Processes that a proc leaves behind are killed as soon as the proc has exited
(`Children`).

The launcher exits after the agent's socket closes, once every process below it has exited. A
launcher that is busy with an import at that moment does not read the socket; the parent-death
signal, `SIGTERM`, interrupts the import.

The launcher never imports user code, never starts a thread, and never touches a GPU.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from monarch._engine.base.memory_file import memory_file
from monarch._engine.launch import black_box
from monarch._engine.launch.binding import apply_binding, resolve_binding
from monarch._engine.launch.children import Children, adopt_orphans, die_with_parent
from monarch._engine.launch.interpreter import SAFE_PATH, WITHOUT_CWD
from monarch._engine.launch.scratch import remove_if_empty
from monarch._engine.wire.frame import CONTROL, FrameReader, pack

__all__ = ["BOOT_VARIABLE", "ChildMain", "Launcher", "launch_key"]

BOOT_VARIABLE = "MONARCH_BOOT"
_MAIN_MODULE = "monarch._src.actor.bootstrap_main"
_FRAME_LIMIT = 64 << 20
_CROWD = 0.01  # seconds from an exit to the sweep: exits come in bursts, and one sweep serves all
_OPEN_MAX = os.sysconf("SC_OPEN_MAX")
_READ_AT_IMPORT = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "NUMEXPR_",
    "LD_",
    "PYTHON",
    "TORCH_",
    "PYTORCH_",
    "NPY_",
    "MALLOC_",
    "GLIBC_",
)

ChildMain = Callable[[dict[str, Any], int, int], None]


def launch_key(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables of `environ` that must be set before anything is imported."""
    return tuple(sorted((k, v) for k, v in environ.items() if k.startswith(_READ_AT_IMPORT)))


class Launcher:
    """Starts, watches and reaps the procs of one launch environment; see the module.

    Args:
        sock: the connection to the host agent.
        child_main: called in a forked child with (spec, link fd, agent fd); must not return.
        prepare: called with a request's spec before its forks; children inherit what it sets.
    """

    def __init__(
        self, sock: socket.socket, child_main: ChildMain, prepare: Callable[[dict[str, Any]], None]
    ) -> None:
        self._sock = sock
        self._prepare = prepare
        self._child_main = child_main
        self._reader = FrameReader(_FRAME_LIMIT, "the host agent")
        self._fds: list[int] = []
        self._procs: dict[int, tuple[int, str]] = {}  # pid -> uid, scratch directory
        self._folders: set[str] = set()  # the parents of the scratch directories
        self._commands: dict[int, subprocess.Popen[bytes]] = {}  # a running Popen warns if dropped
        self._children = Children()
        self._pid = os.getpid()
        self._ending = False

    def run(self) -> NoReturn:
        """Serve until the agent closes the socket; then kill all processes below, and exit."""
        adopt_orphans()
        die_with_parent(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._on_terminate)
        # Python 3.12 warns of a fork with threads. The only threads here are those of numpy's BLAS,
        # which supports forks.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._children.fileno, select.POLLIN)
        self._settle()
        try:
            # The connection is reset if the agent was killed with data unread.
            with contextlib.suppress(ConnectionResetError):
                self._serve(poll)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            self._end()

    def _serve(self, poll: select.poll) -> None:
        sweep_at = math.inf
        while True:
            wait = None if sweep_at == math.inf else max(0.0, sweep_at - time.monotonic()) * 1000
            ready = poll.poll(wait)
            if time.monotonic() >= sweep_at:
                sweep_at = self._children.sweep()
            for fd, _ in ready:
                if fd == self._children.fileno:
                    self._reap()
                    sweep_at = min(sweep_at, time.monotonic() + _CROWD)
                elif not self._read():
                    return

    def _on_terminate(self, _number: int, _frame: Any) -> None:
        if not self._ending:  # else the socket has closed already
            self._end()

    def _end(self) -> NoReturn:
        self._ending = True
        if os.getpid() == self._pid:  # else a forked child that has not reset SIGTERM yet
            self._children.debris += [scratch for _, scratch in self._procs.values()]
            self._children.end()
            for folder in self._folders:  # the agent has exited, and cannot remove them
                remove_if_empty(folder)
        os._exit(0)

    def _settle(self) -> None:
        """Exempt all present objects from garbage collection: children then share their pages."""
        gc.collect()
        gc.freeze()

    def _read(self) -> bool:
        data, ancillary, _, _ = self._sock.recvmsg(1 << 18, socket.CMSG_LEN(253 * 4))
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(rights)
                self._fds.extend(fds)
        if not data:
            return False
        for frame in self._reader.feed(memoryview(data)):
            self._handle(json.loads(frame.body), frame.nfd)
        while (target := self._reader.target()) is not None:
            count = self._sock.recv_into(target)
            target.release()
            if not count:
                return False
            for frame in self._reader.filled(count):
                self._handle(json.loads(frame.body), frame.nfd)
        return True

    def _handle(self, message: dict[str, Any], nfd: int) -> None:
        fds, self._fds = self._fds[:nfd], self._fds[nfd:]
        if message["op"] == "preload":
            self._preload(message)
            return
        self._preload(message)
        try:
            self._prepare(message["spec"])
        except OSError as error:
            failed = [{"uid": proc["uid"], "error": str(error)} for proc in message["procs"]]
            self._tell({"op": "exited", "procs": failed})
            for fd in fds:
                os.close(fd)
            return
        started: list[tuple[int, int]] = []
        handles: list[int] = []
        per_proc = len(fds) // len(message["procs"])
        for index, proc in enumerate(message["procs"]):
            mine = fds[index * per_proc : (index + 1) * per_proc]
            box = memory_file()
            pid = self._start({**message["spec"], **proc}, [*mine[:2], box, *mine[2:]])
            for fd in mine:
                os.close(fd)
            if pid:
                started.append((proc["uid"], pid))
                if hasattr(os, "pidfd_open"):
                    handles.append(os.pidfd_open(pid))
                handles.append(box)
            else:
                os.close(box)
        self._tell({"op": "started", "procs": started}, handles)
        for fd in handles:
            os.close(fd)

    def _preload(self, message: dict[str, Any]) -> None:
        missing = [name for name in message["preload"] if name not in sys.modules]
        if not missing:
            return
        os.environ.update(message["threads"])
        path = sys.path[:]
        sys.path[:] = message["path"]
        try:
            for name in missing:
                # A failed import is repeated by the proc that uses the module, and reported there.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        finally:
            sys.path[:] = path
        self._settle()

    def _start(self, spec: dict[str, Any], fds: list[int]) -> int:
        """Start a process and return its pid; report to the agent and return 0 if that fails."""
        uid = spec["uid"]
        try:
            resolve_binding(spec.get("bind") or {})  # report an impossible binding before the fork
            pid = self._execute(spec, fds) if spec.get("command") else self._fork(spec, fds)
        except (OSError, ValueError) as error:
            self._tell({"op": "exited", "procs": [{"uid": uid, "error": str(error)}]})
            return 0
        self._procs[pid] = uid, spec["scratch"]
        self._folders.add(os.path.dirname(spec["scratch"]))
        self._children.own.add(pid)
        return pid

    def _fork(self, spec: dict[str, Any], fds: list[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            link, agent, box, *output = fds
            self._become_child(spec, (link, agent, box), output)
            black_box.install(box)
            self._child_main(spec, link, agent)
        except BaseException as error:  # print what happened; the process exits below
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(1)

    def _become_child(self, spec: dict[str, Any], kept: tuple[int, ...], output: list[int]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._children.leave_in_child()
        self._sock.detach()
        for standard, fd in enumerate(output, 1):
            os.dup2(fd, standard)
        # All other descriptors are the launcher's or another proc's.
        first = 3
        for fd in sorted(kept):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, _OPEN_MAX)
        adopt_orphans()
        if spec["pdeathsig"]:
            die_with_parent()
        apply_binding(spec.get("bind") or {})

    def _execute(self, spec: dict[str, Any], fds: list[int]) -> int:
        command = spec["command"]
        boot = {k: v for k, v in spec.items() if k not in ("env", "command", "path")}
        boot["fds"] = passed = fds[:3]
        out, err = fds[3:] or (None, None)
        environ = dict(spec["env"]) if command["inherit_env"] else {}
        for name, value in command["env"].items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
        environ[BOOT_VARIABLE] = json.dumps(boot)

        def in_child() -> None:
            adopt_orphans()
            if spec["pdeathsig"]:
                die_with_parent()
            apply_binding(spec.get("bind") or {})

        try:
            process = subprocess.Popen(
                [command["arg0"] or command["program"], *_arguments(command["args"])],
                executable=command["program"],
                env=environ,
                cwd=spec["cwd"],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=in_child,  # noqa: PLW1509 - this process has no threads
            )
        except subprocess.SubprocessError as error:
            raise ValueError(f"proc_bind could not be applied: {error}") from error
        self._commands[process.pid] = process
        return process.pid

    def _reap(self) -> None:
        exited: list[dict[str, int]] = []
        for pid, status in self._children.reap():
            if os.WIFSTOPPED(status):
                number = os.WSTOPSIG(status)
                self._tell({"op": "stopped", "uid": self._procs[pid][0], "signal": number})
                continue
            if os.WIFCONTINUED(status):
                self._tell({"op": "continued", "uid": self._procs[pid][0]})
                continue
            uid, scratch = self._procs.pop(pid)
            process = self._commands.pop(pid, None)
            if process is not None:
                process.returncode = os.waitstatus_to_exitcode(status)
            exited.append({"uid": uid, "status": status})
            self._children.debris.append(scratch)
        if exited:
            self._tell({"op": "exited", "procs": exited})

    def _tell(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = pack(CONTROL, 0, 0, 0, b"", json.dumps(message).encode(), nfd=len(fds or ()))
        try:
            if fds:
                sent = socket.send_fds(self._sock, [data], fds)
                if sent < len(data):
                    self._sock.sendall(data[sent:])
            else:
                self._sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):  # the agent exited: the next read sees EOF
            return


def _arguments(words: list[str]) -> list[str]:
    """Return the arguments of a command; our own does not import from the working directory."""
    if words != ["-m", _MAIN_MODULE]:
        return words
    run = f"runpy.run_module({_MAIN_MODULE!r}, run_name='__main__', alter_sys=True)"
    return [*SAFE_PATH, "-c", f"{WITHOUT_CWD}import runpy; {run}"]
