"""How processes become procs: forked by a launcher, or executed by one.

`warm_up` loads into a launcher what all procs need, and `prepare` sets up what the procs of one
request have in common. `proc_main` is what a forked proc runs. `main` is behind
``python -m monarch._src.actor.bootstrap_main``, for a proc started by an executed command. (How the
launcher itself starts is in `agent_start`, how a script becomes a client in `client`.)

A proc's main thread runs one of its actors (`runtime/actor/main_thread.py`) until a stop was
requested and all actors have ended. Then it runs `atexit` handlers, drops the user's modules (so
that module-level objects are finalised), and exits without tearing down what came from the
launcher, which is most of an interpreter's exit time.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import types
from typing import Any, NoReturn

from monarch._engine.base.features import find, hook
from monarch._engine.base.settings import settings
from monarch._engine.launch import black_box
from monarch._engine.launch.interpreter import with_folder
from monarch._engine.launch.launcher import BOOT_VARIABLE
from monarch._engine.launch.scratch import give_multiprocessing, install
from monarch._engine.runtime.actor.main_thread import MainThread
from monarch._engine.runtime.actor.spawn import spawn_cell
from monarch._engine.runtime.agent.client import become
from monarch._engine.runtime.io.descriptors import raise_descriptor_limit
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.wire.frame import STOP, Frame

__all__ = ["main", "prepare", "proc_main", "warm_up"]

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_SETTINGS_VARIABLES = ("MONARCH_", "HYPERACTOR_", "OTEL_", "ENABLE_", "SCUBA_", "PYSPY_")


def warm_up() -> None:
    """Load and set up what children need in any case: they inherit it.

    Modules are imported by name, since some belong to layers above this one.
    """
    for name in ("cloudpickle", "monarch.actor"):
        importlib.import_module(name)
    find("search_deadlocks")
    find("serve_output")
    find("hand_on")
    sys.breakpointhook = _breakpoint
    # A proc has threads and sockets: plain forks of it by multiprocessing would be unsafe.
    multiprocessing.set_start_method("forkserver" if sys.platform == "linux" else "spawn", True)
    install()
    if pickle_script := find("pickle_script"):
        pickle_script()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


class _Prepared:
    """The state that this process has set up from its requests so far."""

    config: dict[str, str] | None = None
    variables: dict[str, str] | None = None
    modules: frozenset[str] = frozenset()
    callbacks = 0  # `atexit` handlers


def prepare(spec: dict[str, Any]) -> None:
    """In a launcher: set up what all processes of a request have in common, before the forks.

    A page that no child writes to stays shared. So all that can be done here is done here, and not
    in the children. Raises OSError if the working directory no longer exists.
    """
    environ = spec["env"]
    for name in [name for name in os.environ if name not in environ]:
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    _announce(spec)
    os.chdir(spec["cwd"])
    sys.path[:] = with_folder(spec["path"], spec["cwd"])
    for entry, finder in list(sys.path_importer_cache.items()):
        if finder is None:  # the directory did not exist at the last look, but may exist now
            del sys.path_importer_cache[entry]
    sys.argv = [_bootstrap_file()]
    variables = {k: v for k, v in environ.items() if k.startswith(_SETTINGS_VARIABLES)}
    if (variables, spec["config"]) != (_Prepared.variables, _Prepared.config):
        settings.reset_to_defaults()
        settings.reload_from_env()
        settings.install_client_values(spec["config"])
        _Prepared.variables, _Prepared.config = variables, spec["config"]
    _Prepared.modules = frozenset(sys.modules)
    _Prepared.callbacks = atexit._ncallbacks()


def proc_main(spec: dict[str, Any], link_fd: int, agent_fd: int) -> None:
    """Run a forked proc, set up as an executed one would be. Does not return."""
    os.environ["HYPERACTOR_PROCESS_NAME"] = _process_name(spec)
    module = types.ModuleType("__main__")
    module.__file__ = _bootstrap_file()
    sys.modules["__main__"] = module
    # `threading` keeps the launcher's number; profiles read the clock of the thread by it.
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]
    # The global generators were seeded in the launcher, so all its procs would draw alike.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    _serve(spec, link_fd, agent_fd)


def main() -> None:
    """Run a proc that was executed: ``python -m monarch._src.actor.bootstrap_main``."""
    boot = os.environ.pop(BOOT_VARIABLE, None)
    if boot is None:
        sys.exit(
            "monarch: this program is started by the host agent to become a proc of a mesh; "
            "to start a host of your own use monarch.actor.run_worker_loop_forever"
        )
    spec = json.loads(boot)
    link_fd, agent_fd, box = spec["fds"]
    black_box.install(box)
    _announce(spec)
    os.environ["HYPERACTOR_PROCESS_NAME"] = _process_name(spec)
    sys.path[:] = with_folder(sys.path, os.getcwd())
    warm_up()
    settings.install_client_values(spec["config"])
    raise_descriptor_limit()
    _Prepared.modules = frozenset(sys.modules)
    _Prepared.callbacks = atexit._ncallbacks()
    _serve(spec, link_fd, agent_fd, executed=True)


def _bootstrap_file() -> str:
    return os.path.join(os.path.dirname(__file__), "bootstrap.py")


def _announce(spec: dict[str, Any]) -> None:
    """Set the variables that programs and log collectors read."""
    os.environ["HYPERACTOR_MESH_BOOTSTRAP_MODE"] = "proc"
    os.environ["HYPERACTOR_EXECUTION_ID"] = spec["execution_id"]
    os.environ["MONARCH_CLIENT_TRACE_ID"] = spec["execution_id"]


def _process_name(spec: dict[str, Any]) -> str:
    return f"{spec['label']} @ {socket.gethostname()}"


def _serve(spec: dict[str, Any], link_fd: int, agent_fd: int, *, executed: bool = False) -> None:
    give_multiprocessing(spec["scratch"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt between two messages
    proc = Proc(spec["uid"], spec["label"], spawn_cell, stop_actors, client=False)
    proc.spec = spec
    proc.adopt_agent(socket.socket(fileno=agent_fd))
    proc.adopt(socket.socket(fileno=link_fd), spec["parent"])
    for uid in spec.get("former", ()):  # those it replaces: peers also know it by their uids
        proc.links[uid] = proc.local
    become(proc)
    if "mocks" in spec:
        hook("inherit_mocks")(spec["mocks"])
    if executed:
        proc.tell_agent({"op": "ready"})
    proc.main = MainThread(proc, _finalise)
    proc.main.run()


def _breakpoint(*_args: Any, **_kwargs: Any) -> None:
    """Replace `breakpoint()` in a worker; loads the debugger when it is needed."""
    hook("breakpoint")(sys._getframe(1))


def stop_actors(proc: Proc, frame: Frame) -> None:
    """Stop all actors, in parallel; the reactor stops after the last one, or after a timeout.

    The timeout leaves an endpoint that is interrupted the time to end.

    Args:
        proc: this process.
        frame: the request of the owner; its body is the reason. Later requests are ignored.
    """
    if proc.stop_request is not None:
        return
    proc.stop_request = Frame(STOP, 0, 0, 0, 0, 0, b"", bytes(frame.body))
    cells = [*proc.cells.values(), *proc.ending]
    if not cells:
        proc.reactor.stop()
        return
    patience = settings.stop_actor_timeout + (proc.main is not None) * settings.cleanup_timeout
    proc.reactor.call_later(patience, proc.reactor.stop)
    for cell in cells:
        cell.request_stop(proc.local, proc.stop_request)


def _is_library(name: str, module: types.ModuleType) -> bool:
    """Whether a module was installed: threads and finalisers may use it to the very end."""
    if name == "__main__":
        return False
    file = getattr(module, "__file__", None) or ""
    return name.startswith("monarch.") or file.startswith(_LIBRARY) or bool(_INSTALLED.search(file))


def _finalise(proc: Proc) -> NoReturn:
    """Do what a normal exit owes the user, and no more; then exit."""
    code = 0
    try:
        if atexit._ncallbacks() > _Prepared.callbacks:
            proc.start()  # the program's handlers may want to make calls
        atexit._run_exitfuncs()
        count = len(sys.modules) - len(_Prepared.modules)
        theirs = list(itertools.islice(reversed(sys.modules), max(0, count)))
        for name in ["__main__", *theirs]:
            module = sys.modules.get(name)
            # Some programs put classes into `sys.modules`.
            if isinstance(module, types.ModuleType) and not _is_library(name, module):
                del sys.modules[name]
                vars(module).clear()
        gc.collect()
        end_output = find("end_output")
        if end_output is not None:
            end_output()
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # output of C libraries, which the exit below does not flush
    except BaseException as error:  # the last chance to report an error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    finally:
        os._exit(code)
