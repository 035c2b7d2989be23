"""The runtime's part in this process: its proc and, in the user's script, the host agent.

The first call that needs a proc makes the process a *client* (`client_proc`): a reactor thread and
a root that owns the meshes of the script. The host agent is started later, in the background, when
the program first asks for its host (`start_agent`). In worker processes, `bootstrap` makes the proc
instead. A child that a script or an actor starts by itself joins the program of its parent (a
feature, `monarch._children`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from monarch._engine.base.features import HOOKS, find, hook
from monarch._engine.base.home import HOME
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE
from monarch._engine.launch.cores import THREADS, read_by_libraries
from monarch._engine.launch.interpreter import working_directory
from monarch._engine.runtime.actor.spawn import spawn_cell
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.descriptors import raise_descriptor_limit
from monarch._engine.runtime.proc.agent_watch import why_silent
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.runtime.proc.proc import Proc, new_uid

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from monarch._engine.wire.frame import Frame

__all__ = [
    "become",
    "child_proc",
    "client_proc",
    "close_client",
    "current_proc",
    "expect_async_actors",
    "forget_saved",
    "inheritance",
    "launch_spec",
    "save_handle",
    "start_agent",
    "succeed",
    "when_ready",
]

_RUN_ASYNC = "monarch._engine.runtime.actor.dispatch_async"

_current: Proc | None = None
_lock = threading.Lock()
_agent_process: subprocess.Popen[bytes] | _FoundAgent | None = None
_ready: list[Callable[[Proc], None]] = []
_forked: list[Callable[[], None]] = []
_async_actors = False
_inherited: Proc | None = None  # in a child that was forked from a process of a program


def current_proc() -> Proc | None:
    """Return this process's proc, or None before its first use."""
    return _current


def when_ready(callback: Callable[[Proc], None]) -> None:
    """Call `callback(proc)` when this process gets its proc (also in launcher-forked procs)."""
    _ready.append(callback)


def when_forked(callback: Callable[[], None]) -> None:
    """Call `callback()` in a child that user code forks from this process."""
    _forked.append(callback)


def expect_async_actors() -> None:
    """Have launchers load the event loop, which an async actor needs."""
    global _async_actors
    _async_actors = True


def client_proc() -> Proc:
    """Return the proc of this process.

    The first use makes the process the client of a new runtime, or has it join its parent's.
    """
    if _current is not None:
        return _current
    with _lock:
        proc = current_proc()  # another thread may have made it before the lock was taken
        if proc is None:
            join = find("join_parent")
            proc = _inherited if join is None else join(_inherited)
            if proc is None:
                proc = _make_client(new_uid(), 0)
            else:
                raise_descriptor_limit()
                proc.start()
            become(proc)
    return proc


def save_handle(owner: Any, uid: int, mesh: Any) -> None:
    """Leave a handle of a new mesh to the next script of the job, if the job is kept."""
    proc = client_proc()
    if proc.job:
        hook("save_handle")(proc, owner, uid, mesh)


def forget_saved(uid: int) -> None:
    """Drop the saved handle of a mesh that was stopped or has ended as a whole."""
    proc = client_proc()
    if uid in proc.kept:
        proc.kept.discard(uid)
        proc.tell_agent({"op": "forget", "uid": uid})


def _make_client(uid: int, reign: int) -> Proc:
    raise_descriptor_limit()
    proc = Proc(uid, "local", spawn_cell, _refuse_stop, client=True, reign=reign)
    proc.agent_lost = _agent_died
    proc.agent_silent = _agent_is_silent
    proc.start()
    return proc


def succeed(uid: int, reign: int, agent: tuple[socket.socket, int] | None) -> Proc:
    """Return the proc of this process, which takes the place of an earlier client.

    `agent` is the connection to the earlier client's agent, and the agent's pid; None if that agent
    has exited. Raises RuntimeError if this process is a client, or a proc, already.
    """
    global _agent_process
    with _lock:
        if _current is not None:
            raise RuntimeError("this process is part of a runtime already")
        proc = _make_client(uid, reign)
        if agent is not None:
            sock, pid = agent
            proc.adopt_agent(sock)
            _agent_process = _FoundAgent(pid)
        become(proc)
    if agent is None:
        start_agent()
    else:
        proc.tell_agent({"op": "here"})
    return proc


class _FoundAgent:
    """A host agent that an earlier client started: no child of this process, but awaited."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> None:
        import subprocess  # imported late, as in `start_agent`

        if not _exits(self._fd, timeout):
            raise subprocess.TimeoutExpired("the host agent", timeout or 0.0)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)


def become(proc: Proc) -> None:
    """Make `proc` this process's part of the runtime."""
    global _current
    _current = proc
    serve_output = find("serve_output")
    if serve_output is not None:
        serve_output(proc)
    if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        export = find("export")
        if export is not None:
            export(proc)
    if settings.telemetry and not proc.client:
        hook("record")(proc)
    for callback in _ready:
        callback(proc)
    _hand_on(proc)


def _hand_on(proc: Proc) -> None:
    """Let children that this process starts by itself join the program."""
    hand_on = find("hand_on")
    if hand_on is not None:
        hand_on(proc)


def start_agent() -> None:
    """Start the host agent in the background, if there is none; returns at once."""
    proc = _current
    assert proc is not None
    if not proc.client:
        return
    _start_agent(proc)
    if settings.telemetry:  # the script's own metrics and spans count, also before it spawns
        hook("record")(proc)


def _start_agent(proc: Proc) -> None:
    global _agent_process
    with _lock:
        if _agent_process is not None:
            return
        import subprocess  # imported late: a worker never needs it

        from monarch._engine.launch import helper

        environ = dict(os.environ)
        # Keep freed memory: fresh pages cost more than the copies into them. Setting one threshold
        # turns off glibc's adaptation of the other, so both are set.
        tunables = "glibc.malloc.trim_threshold=268435456:glibc.malloc.mmap_threshold=33554432"
        environ["MONARCH_AGENT_TUNABLES"] = environ.get("GLIBC_TUNABLES", "")
        environ["GLIBC_TUNABLES"] = environ.get("GLIBC_TUNABLES", tunables)
        sock, process = helper.start(
            helper.AGENT,
            proc.uid,
            HOME,
            env=environ,
            # A program may have been started without them, and their numbers then belong to other
            # files.
            stdout=None if sys.__stdout__ else subprocess.DEVNULL,
            stderr=None if sys.__stderr__ else subprocess.DEVNULL,
            cwd=_existing_directory(),
            start_new_session=True,
        )
        proc.adopt_agent(sock)
        _agent_process = process
        _hand_on(proc)
        open_door = find("open_door")
        if open_door is not None:
            open_door(proc.reactor)
        names = _preloads()
        if THREADS not in os.environ:  # the spawn says for how many threads
            names = [name for name in names if not read_by_libraries([name])]
        message = {
            "op": "preload",
            "preload": names,
            "path": _paths(),
            "env": dict(os.environ),
        }
        proc.tell_agent(message)


def _existing_directory() -> str | None:
    """Return where the agent starts: the root, if the working directory was removed.

    Python 3.13.0 cannot import its own modules in a removed directory.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.sep
    return None


def _agent_died(_reason: str) -> None:
    proc = _current
    if proc is not None:
        pid = "?" if _agent_process is None else _agent_process.pid
        error = f"the host agent of this machine (pid {pid}) ended unexpectedly"
        when = environments.current.wall_time()
        proc.bury_everyone(Verdict(FAILED, error, INFRASTRUCTURE, proc.hostname, 0, when))


def _agent_is_silent(timeout: float, _uids: list[int]) -> None:
    proc, process = _current, _agent_process
    if proc is None or process is None or proc.agent is None:
        return
    error, when = why_silent(process.pid, timeout), environments.current.wall_time()
    verdict = Verdict(FAILED, error, INFRASTRUCTURE, proc.hostname, 0, when)
    proc.agent_lost = lambda reason: proc.bury_everyone(verdict)
    process.kill()
    proc.lose(proc.agent, error)


def close_client(grace: float, verdict: Verdict) -> None:
    """Stop the host agent and with it every process of this host. Blocks at most `grace` seconds.

    Callers that still wait for one of them, and later callers, get `verdict`.
    """
    proc, process = _current, _agent_process
    if proc is None or process is None:
        return
    import subprocess

    proc.ended = verdict
    proc.agent_lost = lambda reason: proc.bury_everyone(verdict)
    if proc.agent is not None:
        link = proc.agent
        link.sock.shutdown(socket.SHUT_RDWR)
    if isinstance(process, subprocess.Popen) and hasattr(os, "pidfd_open"):
        # `Popen.wait` with a timeout sleeps between its looks, for up to 50 ms.
        with contextlib.suppress(OSError):  # the program has reaped it, or an old kernel
            handle = os.pidfd_open(process.pid)
            grace = grace if _exits(handle, grace) else 0.0
            os.close(handle)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _exits(handle: int, timeout: float | None) -> bool:
    """Wait until the process of a pidfd has exited; return False after `timeout` seconds."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def _refuse_stop(proc: Proc, frame: Frame) -> None:
    """Ignore a request to stop: neither a client nor a child of a user's has an owner."""


def _preloads() -> list[str]:
    """Return modules that launchers import for all their children: slow ones, if loaded here.

    `torch._dynamo` comes with the first optimizer and takes a second. A program that makes
    optimizers only in its actors can import it, and pays once. asyncio takes 20 ms and 3 MB;
    programs whose actors are all sync do without it. The modules that record and export take 30 ms.
    """
    records = (HOOKS[name].partition(":")[0] for name in ("record", "export"))
    slow = ("numpy", "torch", "torch._dynamo", *records)
    names: list[str] = [name for name in slow if name in sys.modules]
    if _async_actors or "asyncio" in sys.modules:
        names.append(_RUN_ASYNC)
    return names


def _paths() -> list[str]:
    """Return `sys.path` as a child started here has it: absolute, the script's folder first."""
    return [os.path.abspath(entry or working_directory()) for entry in sys.path]


def launch_spec() -> dict[str, Any]:
    """Return the inheritance of a new process, as of now: environment, cwd, path, settings."""
    environ = dict(os.environ)
    return {
        "env": environ,
        "cwd": working_directory(),
        "path": _paths(),
        "preload": _preloads(),
        "config": settings.snapshot(),
        "ready_timeout": settings.host_spawn_ready_timeout,
        "unresponsive_timeout": settings.unresponsive_timeout,
        "pdeathsig": settings.mesh_bootstrap_enable_pdeathsig,
    }


def child_proc(uid: int, spec: dict[str, Any]) -> Proc:
    """Return a proc for this process, which a process of a program has started by itself."""
    proc = Proc(uid, f"child-{os.getpid()}", spawn_cell, _refuse_stop, client=False)
    proc.spec = spec
    return proc


def inheritance(proc: Proc) -> dict[str, Any]:
    """Return the specification of the processes that the process of `proc` starts by itself."""
    started = time.strftime("%b-%d_%H:%M")
    spec = {
        "client": proc.uid,
        "execution_id": f"{os.environ.get('USER', 'user')}_{started}_{proc.pid}",
        "host": HOME,
        "agent": 0 if _agent_process is None else _agent_process.pid,
    }
    kept = ("agent", "client", "execution_id", "host", "logs", "python_override")
    return {**spec, **{key: proc.spec[key] for key in kept if key in proc.spec}}


def _before_fork() -> None:
    if _current is not None and (open_to_children := find("open_to_children")):
        open_to_children()


def _after_fork() -> None:
    """Leave the parent's part of the runtime in a forked child, which may get its own."""
    global _current, _inherited, _agent_process, _lock
    _lock = threading.Lock()  # a thread that does not exist here may have held it
    proc = _current or _inherited
    if proc is not None:
        proc.begin_anew(inheritance(proc), _refuse_stop, client_proc)
    _inherited = proc
    _current = None
    _agent_process = None
    for callback in _forked:
        callback()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
