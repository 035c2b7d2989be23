"""Shutdown of a client: stop its meshes, then the host agent and with it every process.

The shutdown is registered with `atexit` when the client is made, so calling `shutdown_context` is
optional. A client whose meshes are kept for another script (`monarch._failover`) only exits: to end
them, the program calls `shutdown_context`.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading

from monarch._engine.base.verdict import STOPPED
from monarch._engine.mesh.results.faults import Faults
from monarch._engine.mesh.results.future import RAISED, VALUE, Future
from monarch._engine.mesh.results.unobserved import leave_unobserved_to_exit, report_unobserved
from monarch._engine.runtime.agent.client import close_client, current_proc, when_ready
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.runtime.proc.proc import Proc

__all__ = ["job_id", "renounce", "shutdown_context"]

_DEFAULT_GRACE = 10.0
_EXIT_GRACE = 1.0
_REASON = "stop host: the client was shut down"
_lock = threading.Lock()
_begun = False


def job_id() -> str:
    """Return the name by which `reattach` finds the meshes of this script.

    Empty if the meshes end with the script; see the configuration key ``driver_grace``.
    """
    proc = current_proc()
    return "" if proc is None else proc.job


def renounce() -> None:
    """Keep no meshes for another script: all of them end with this one."""
    proc = current_proc()
    if proc is not None and proc.job:
        proc.job = ""
        proc.tell_agent({"op": "keep", "grace": 0})


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """Stop all processes of the client, and the client itself.

    Return a future at once; it resolves when the shutdown is complete.

    Args:
        host_timeout: seconds within which the processes must exit in good order (default 10);
            after that they are killed.

    Does nothing in a process without a client. Afterwards calls raise `SupervisionError`; a client
    cannot be started again in the same process. Raises ValueError for an impossible timeout.
    """
    global _begun
    proc = current_proc()
    with _lock:
        if proc is None or not proc.client or _begun:
            return Future._of(None)
        grace = _DEFAULT_GRACE if host_timeout is None else host_timeout
        if not (math.isfinite(grace) and 0 <= grace < 2.0**64):
            raise ValueError(
                "host_timeout must be finite, non-negative and less than 2**64 seconds, "
                f"not {host_timeout}"
            )
        _begun = True
    future: Future[None] = Future._new()

    def run() -> None:
        try:
            _shut_down(grace)
        except BaseException as error:
            future._resolve(RAISED, error)
        else:
            future._resolve(VALUE, None)

    try:
        environments.current.start_thread("monarch-shutdown", run)
    except RuntimeError:  # Python 3.12 starts no thread at its exit
        run()
    return future


def _shut_down(grace: float) -> None:
    renounce()
    proc = current_proc()
    if proc is not None and proc.context is not None:
        proc.context.actor_instance._stop_meshes(grace, _REASON)
    if proc is not None and proc.printer is not None:
        proc.printer.hide(_EXIT_GRACE)  # while there is an agent to tell
    close_client(_EXIT_GRACE, Verdict(STOPPED, _REASON))
    _close_printer()


def _close_printer() -> None:
    """Print the output of procs that has arrived, also what waits for similar lines."""
    proc = current_proc()
    if proc is not None and proc.printer is not None:
        printer, proc.printer = proc.printer, None
        printer.close(_EXIT_GRACE)


def _at_exit(proc: Proc) -> None:
    if proc.client:
        atexit.register(_exit)


def _await_children() -> None:
    """Wait for the children that multiprocessing waits for at the exit: they may still call."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        for child in processes.active_children():
            if not child.daemon:
                child.join()


def _exit() -> None:
    _await_children()
    Faults.current.close()
    leave_unobserved_to_exit()
    proc = current_proc()
    if proc is not None and proc.job and proc.kept:  # leave the meshes to the next driver
        _close_printer()
    else:
        # Normally the shutdown takes less. After the timeout this process exits, and the kernel
        # closes the agent's socket, which ends the agent and its processes as well.
        with contextlib.suppress(TimeoutError):
            shutdown_context(_EXIT_GRACE).get(timeout=3 * _EXIT_GRACE)
    report_unobserved(ending=True)
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    if Faults.current.at_exit(_EXIT_GRACE) and not interrupted:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    if interrupted and not hasattr(sys, "ps1"):  # (in a dialogue it ended a statement only)
        # Python ends an interrupted script by SIGINT, so that a shell stops, too. Before 3.14 it
        # forgets that when any thread compiles a text meanwhile, as each named tuple does that a
        # module defines. This makes it remember.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102 - a constant


when_ready(_at_exit)
