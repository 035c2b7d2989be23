"""How processes become part of the runtime: the client, the agent, launchers, and procs.

    client --exec--> agent --fork--> launcher --fork--> proc, proc, ...
                                  \\--exec--> launcher of another launch environment
                                                       \\--exec--> proc with a command of its own

`client_proc` makes the calling process a client on first use. `agent_main` and `launcher_main` are
what the executed helpers run, `proc_main` what a forked proc runs, and `main` is behind
``python -m monarch._src.actor.bootstrap_main``: a proc started by an executed command.

A proc's main thread runs the reactor until it is told to stop; then it stops the actors, runs `atexit` handlers,
drops the user's modules (so that module-level objects are finalised), and exits without tearing
down what came from the launcher, which is most of an interpreter's exit time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from typing import Any

from monarch._engine.base.settings import settings
from monarch._engine.launch.launcher import BOOT_VARIABLE, Launcher, die_with_parent
from monarch._engine.runtime.cell import Cell, Identity
from monarch._engine.runtime.dispatch import error_body, run_async, run_sync
from monarch._engine.runtime.body import decode_body
from monarch._engine.runtime.proc import Proc, new_uid
from monarch._engine.wire.frame import STOP, Frame

__all__ = [
    "agent_main",
    "client_proc",
    "close_client",
    "current_proc",
    "launch_spec",
    "launcher_main",
    "main",
    "proc_main",
]

# Flags of a SPAWN frame.
ASYNC = 1  # the actor needs an event loop
SETUP = 2  # the actor runs the bootstrap callable: others wait for it

_current: Proc | None = None
_lock = threading.Lock()
_agent_process: subprocess.Popen[bytes] | None = None
_inherited: set[str] = set()  # modules that came from the launcher
_launcher_variables: dict[str, str] = {}
_ready: list[Any] = []  # what higher layers want to do once this process has a proc
spec_of_this_proc: dict[str, Any] = {}


def current_proc() -> Proc | None:
    """This process's proc, or None before first use."""
    return _current


def when_ready(callback: Any) -> None:
    """Call `callback(proc)` when this process gets its proc (also in launcher-forked procs)."""
    _ready.append(callback)


# -- the client ----------------------------------------------------------------------------------


def client_proc() -> Proc:
    """The proc of this process, made on first use: then it is the client of a new runtime."""
    global _current
    if _current is not None:
        return _current
    with _lock:
        if _current is not None:
            return _current
        _raise_descriptor_limit()
        proc = Proc(new_uid(), "local", _spawn_cell, _refuse_stop, client=True)
        proc.agent_lost = _agent_died
        proc.start()
        _become(proc)
    return proc


def _become(proc: Proc) -> None:
    global _current
    _current = proc
    os.register_at_fork(after_in_child=_after_fork)
    for callback in _ready:
        callback(proc)


def start_agent() -> None:
    """Start the host agent in the background, if there is none; returns at once."""
    global _agent_process
    proc = _current
    assert proc is not None
    if not proc.client or _agent_process is not None:
        return
    with _lock:
        if _agent_process is not None:
            return
        ours, theirs = socket.socketpair()
        proc.adopt_agent(ours)
        root = os.path.dirname(__file__.rsplit("_engine", 1)[0].rstrip("/"))
        code = (
            f"import sys; sys.path.insert(0, {root!r}); "
            "from monarch._engine.runtime.bootstrap import agent_main; "
            f"agent_main({theirs.fileno()}, {proc.uid})"
        )
        environ = dict(os.environ)
        # Keep what was freed: fresh pages cost more than the copies into them. Setting one
        # threshold turns off glibc's own adaption of the other, so both are set.
        tunables = "glibc.malloc.trim_threshold=268435456:glibc.malloc.mmap_threshold=33554432"
        environ["MONARCH_AGENT_TUNABLES"] = environ.get("GLIBC_TUNABLES", "")
        environ["GLIBC_TUNABLES"] = environ.get("GLIBC_TUNABLES", tunables)
        _agent_process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        message = {
            "op": "preload",
            "preload": _preloads(),
            "path": _paths(),
            "env": dict(os.environ),
        }
        proc.tell_agent(message)


def _agent_died(reason: str) -> None:
    proc = _current
    if proc is not None:
        proc.bury_everyone("the host agent of this machine ended unexpectedly")


def close_client(grace: float) -> None:
    """End the host agent and with it every process of this host. Blocks at most `grace` seconds."""
    global _agent_process
    proc, process = _current, _agent_process
    if proc is None or process is None:
        return
    proc.agent_lost = lambda reason: None
    if proc.agent is not None:
        link = proc.agent
        link.sock.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _refuse_stop(proc: Proc, frame: Frame) -> None:
    """Nobody owns the client: a request that it end is ignored."""


def _raise_descriptor_limit() -> None:
    """Every proc costs a descriptor or two: use what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _preloads() -> list[str]:
    return [name for name in ("numpy", "torch") if name in sys.modules]


def _paths() -> list[str]:
    """`sys.path` as a child started here would have it: absolute, the script's folder first."""
    return [os.path.abspath(entry) for entry in sys.path]


def launch_spec() -> dict[str, Any]:
    """What a new process inherits from this one: environment, cwd, path, configuration, as of now."""
    environ = dict(os.environ)
    return {
        "env": environ,
        "cwd": os.getcwd(),
        "path": _paths(),
        "preload": _preloads(),
        "config": settings.snapshot(),
        "pdeathsig": settings.mesh_bootstrap_enable_pdeathsig,
    }


# -- helpers and procs ---------------------------------------------------------------------------


def _restore_tunables() -> None:
    """The agent's allocator settings are its own: what it starts inherits the user's."""
    original = os.environ.pop("MONARCH_AGENT_TUNABLES", None)
    if original is not None:
        del os.environ["GLIBC_TUNABLES"]
        if original:
            os.environ["GLIBC_TUNABLES"] = original


def agent_main(fd: int, client_uid: int) -> None:
    """The host agent's process."""
    # Imported here: only the helpers need them, and children inherit them warm.
    import asyncio  # noqa: F401
    import multiprocessing  # noqa: F401
    import cloudpickle  # noqa: F401

    import monarch.actor  # noqa: F401
    from monarch._engine.runtime.agent import Agent

    _restore_tunables()
    _raise_descriptor_limit()
    Agent(socket.socket(fileno=fd), client_uid, proc_main, _prepare_launcher).run()


def launcher_main(fd: int) -> None:
    """A launcher that was executed, for a launch environment other than the agent's."""
    import asyncio  # noqa: F401
    import multiprocessing  # noqa: F401
    import cloudpickle  # noqa: F401

    import monarch.actor  # noqa: F401

    die_with_parent()
    _raise_descriptor_limit()
    Launcher(socket.socket(fileno=fd), proc_main, _prepare_launcher).run()
    os._exit(0)


def proc_main(spec: dict[str, Any], link_fd: int, agent_fd: int) -> None:
    """A forked proc: become what an executed one would be, then serve. Does not return."""
    os.environ.clear()
    os.environ.update(spec["env"])
    _announce(spec)
    os.chdir(spec["cwd"])
    path = [entry for entry in spec["path"] if entry != spec["cwd"]]
    sys.path[:] = [spec["cwd"], *path]
    sys.argv = [_bootstrap_file()]
    module = types.ModuleType("__main__")
    module.__file__ = _bootstrap_file()
    sys.modules["__main__"] = module
    if _own_variables(spec["env"]) != _launcher_variables:
        settings.reload_from_env()
    if "numpy" in sys.modules:  # its global generator was seeded in the launcher
        sys.modules["numpy"].random.seed()
    _serve(spec, link_fd, agent_fd)


def main() -> None:
    """A proc that was executed: ``python -m monarch._src.actor.bootstrap_main``."""
    boot = os.environ.pop(BOOT_VARIABLE, None)
    if boot is None:
        sys.exit(
            "monarch: this program is started by the host agent to become a proc of a mesh; "
            "to start a host of your own use monarch.actor.run_worker_loop_forever"
        )
    spec = json.loads(boot)
    _announce(spec)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    import monarch.actor  # noqa: F401

    _raise_descriptor_limit()
    _serve(spec, *spec["fds"])


def _own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    prefixes = ("MONARCH_", "HYPERACTOR_", "OTEL_", "ENABLE_", "SCUBA_", "PYSPY_")
    return {k: v for k, v in environ.items() if k.startswith(prefixes)}


def _prepare_launcher() -> None:
    """What every child would compute for itself, once: a page not written stays shared."""
    _launcher_variables.update(_own_variables(os.environ))
    _inherited.update(sys.modules)


def _bootstrap_file() -> str:
    return os.path.join(os.path.dirname(__file__), "bootstrap.py")


def _announce(spec: dict[str, Any]) -> None:
    """The variables that programs and log collectors look at."""
    os.environ["HYPERACTOR_MESH_BOOTSTRAP_MODE"] = "proc"
    name = f"{spec['label']} @ {socket.gethostname()}"
    os.environ["HYPERACTOR_PROCESS_NAME"] = name
    os.environ["HYPERACTOR_EXECUTION_ID"] = spec["execution_id"]
    os.environ["MONARCH_CLIENT_TRACE_ID"] = spec["execution_id"]


def _serve(spec: dict[str, Any], link_fd: int, agent_fd: int) -> None:
    import multiprocessing

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.breakpointhook = _breakpoint
    # A proc has threads and sockets: plain forks of it by multiprocessing would be unsafe.
    multiprocessing.set_start_method("forkserver" if sys.platform == "linux" else "spawn", True)
    settings.install_client_values(spec["config"])
    spec_of_this_proc.update(spec)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt inside the reactor
    reasons: list[str] = []

    def on_stop(proc: Proc, frame: Frame) -> None:
        if not reasons:
            reasons.append(bytes(frame.body).decode(errors="replace"))
            proc.reactor.stop()

    proc = Proc(spec["uid"], spec["label"], _spawn_cell, on_stop, client=False)
    proc.adopt_agent(socket.socket(fileno=agent_fd))
    proc.adopt(socket.socket(fileno=link_fd), spec["parent"])
    _become(proc)
    # The reactor runs here, on the main thread, which has nothing else to do: a thread less per
    # process. For the end, which runs user code on this thread, it moves to another.
    proc.reactor.run()
    proc.start()
    _stop_actors(proc, reasons[0])
    _finalise()


def _breakpoint(*args: Any, **kwargs: Any) -> None:
    """`breakpoint()` in a worker: the debugger is loaded when somebody needs it."""
    import importlib

    importlib.import_module("monarch._debug").stop_at(sys._getframe(1))


def _stop_actors(proc: Proc, reason: str) -> None:
    """Stop every actor here, side by side, within the configured time."""
    cells = [*proc.cells.values(), *proc.ending]
    frame = Frame(STOP, 0, 0, 0, 0, 0, b"", reason.encode())
    for cell in cells:
        cell.request_stop(None, frame)
    deadline = time.monotonic() + settings.stop_actor_timeout
    for cell in cells:
        cell.finished.wait(max(0.0, deadline - time.monotonic()))


def _finalise() -> None:
    """What a normal exit owes the user, and no more."""
    code = 0
    try:
        atexit._run_exitfuncs()
        theirs = [name for name in sys.modules if name not in _inherited]
        for name in ["__main__", *theirs]:
            module = sys.modules.pop(name, None)
            if module is not None and not name.startswith("monarch."):
                vars(module).clear()
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the last line of a process: say what happened, then end
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        os._exit(code)


class SetupGate:
    """Holds back the actors of a process until its bootstrap callable is done.

    Use as a context manager around the callable. If it raised, what waits is refused with the
    same error.
    """

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._done = threading.Event()
        self.answer: Any = None  # what callers get when the callable failed

    def __enter__(self) -> None:
        """The callable starts."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.answer = error_body("Actor call setup.setup failed.", error)
        self._done.set()

    def blocks(self, cell: Cell) -> bool:
        """Whether `cell` has to wait: all but the bootstrap's own actor, and what it spawned."""
        return cell.uid != self._uid and cell.owner != cell.proc.uid

    def wait(self) -> None:
        self._done.wait()


# -- actors --------------------------------------------------------------------------------------


def _spawn_cell(proc: Proc, link: Any, frame: Frame) -> Cell:
    """The actor of a SPAWN frame: started on its own thread, constructed there."""
    name, label, display = json.loads(frame.meta)

    def build(cell: Cell) -> Any:
        return decode_body(frame.body).build(cell)

    if frame.flags & SETUP:
        proc.setup = SetupGate(frame.dest)
    identity = Identity(name, label, display, build)
    is_async = bool(frame.flags & ASYNC)
    cell = Cell(proc, frame.dest, frame.rank, frame.port, identity, is_async=is_async)
    cell.start(run_async if is_async else run_sync)
    return cell


def _after_fork() -> None:
    """A child forked by user code is not part of the runtime: it must not hold our sockets."""
    global _current, _agent_process
    proc = _current
    _current = None
    _agent_process = None
    if proc is not None:
        proc.close_in_child()


