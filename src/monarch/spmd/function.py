"""`run_function`: a function on each process of a mesh, as torchrun runs a script.

The processes stay when the function has ended, so the next one finds torch imported. Hence a
function that fails must not leave the others in a collective that never ends: as soon as one rank
has failed, a second actor of each process shuts down the connections of the function's process
groups (`ProcessGroups`), until the function has ended there. The errors that this raises in the
other ranks are effects, and so may be an error of a rank whose peer was killed. The cause is the
first error that can be none: anything but a RuntimeError or an OSError.

Rejected: a thread that gets an exception (`PyThreadState_SetAsyncExc`), which does not wake a
function that waits in a collective; new processes for each function, which import torch anew.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

from monarch.actor import Actor, ActorError, ProcMesh, ValueMesh, endpoint
from monarch.spmd.actor import SPMDActor
from monarch.spmd.process_groups import ProcessGroups
from monarch.spmd.setup import are_together, open_rendezvous

__all__ = ["run_function"]

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE = 10.0  # seconds for the other ranks to end after a failure
_WAKE = 0.1  # seconds until new connections are looked for
_START = 1.0  # seconds for the function to begin in a process that was sent it


def run_function(
    procs: ProcMesh, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> ValueMesh[R]:
    """Call a function on each process of a mesh, with torchrun's variables; return the results.

    The function finds `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and the others of a new rendezvous, so
    ``init_process_group()`` needs no argument, and so does a library that a script uses under
    torchrun. The last dimension of the mesh counts the processes of a host. Process groups that the
    function has made, and left, are destroyed when it has ended.

    >>> import os
    >>> from monarch.actor import this_host
    >>> procs = this_host().spawn_procs({"gpus": 2})
    >>> run_function(procs, lambda unit: os.environ["RANK"] + unit, "/2").values()
    ['0/2', '1/2']
    >>> procs.stop().get()

    The function, its arguments and its results are sent by cloudpickle, so a function of the script
    will do; results should be on the CPU. It runs on the main thread if no other actor is in the
    process, and can install signal handlers there. Blocks until all ranks have ended. The processes
    stay, with what they have imported, for the next function; a mesh runs one at a time.

    Raises the function's own exception if it failed on a rank; its cause names the rank, and has
    the remote traceback. ``sys.exit(0)`` returns None, another status is a RuntimeError. If a
    process is lost, raises `SupervisionError`. Then collectives of the other ranks fail, too, and
    the mesh can run the next function if no process was lost. A rank that does not end within ten
    seconds is interrupted, as by a stop of its actor. If it does not end by that, in native code
    perhaps, it is left behind: it goes on until it ends, or the mesh is stopped, and until then the
    mesh runs no other function.
    """
    if not callable(function):
        raise TypeError(f"run_function calls a function on each process, and {function!r} is none")
    ranks: Any = procs.spawn("ranks", _Rank)
    wakers: Any = procs.spawn("wakers", _Waker)
    try:
        store = open_rendezvous(ranks, None, are_together(ranks.host.call().get())).get()
        answers = ranks.run.stream(*store, function, args, kwargs)
        try:
            results, errors = _collect(answers, lambda: wakers.wake.broadcast(*store))
        except BaseException:
            wakers.wake.broadcast(*store)  # an interrupt ends the wait, and not the function
            raise
    finally:
        ranks.stop(timeout=_PATIENCE).get()
        wakers.stop(timeout=_PATIENCE).get()
    if errors:
        cause = _cause(errors)
        if isinstance(cause, ActorError):
            raise cause.exception from cause
        raise cause
    return ValueMesh(procs._shape, [results[rank] for rank in range(len(results))])


def _collect(answers: Any, wake: Callable[[], None]) -> tuple[dict[int, Any], list[Exception]]:
    """Return the results by their rank, and the errors in order of arrival; `wake` at the first."""
    results: dict[int, Any] = {}
    errors: list[Exception] = []
    deadline = float("inf")
    for answer in answers:
        try:
            rank, value = answer.get(
                timeout=max(deadline - time.monotonic(), 0) if errors else None
            )
            results[rank] = value
        except TimeoutError:
            break
        except Exception as error:
            if not errors:
                deadline = time.monotonic() + _PATIENCE
                wake()
            errors.append(error)
    return results, errors


def _cause(errors: list[Exception]) -> Exception:
    """Return the first of the errors, in order of arrival, that is no effect of another one."""
    return next((error for error in errors if not _may_be_effect(error)), errors[0])


def _may_be_effect(error: Exception) -> bool:
    return isinstance(error, ActorError) and isinstance(error.exception, (RuntimeError, OSError))


class _Running:
    """The function that runs in this process, or ran last; `store` is its rendezvous.

    Its process groups are destroyed when it has ended; after an error by the waker, since the error
    of this rank has to arrive before those that closed connections raise in others.
    """

    def __init__(self, name: str, store: tuple[str, int]) -> None:
        self.name = name
        self.store = store
        self.groups = ProcessGroups()
        self.ended = threading.Event()
        self._had_groups = ProcessGroups.are_formed()

    def destroy_groups(self) -> None:
        """Destroy what the function has left."""
        if not self._had_groups:
            self.groups.destroy()


_lock = threading.Lock()
_running: _Running | None = None


@contextlib.contextmanager
def _as_running(name: str, store: tuple[str, int]) -> Generator[None]:
    global _running
    with _lock:
        if _running is not None and not _running.ended.is_set():
            raise ValueError(
                f"{name} cannot run: {_running.name}, of another run_function, still runs in this "
                "process. Wait for it, or stop the mesh and spawn another"
            )
        running = _running = _Running(name, store)
    try:
        yield
        running.destroy_groups()
    finally:
        running.ended.set()


class _Rank(SPMDActor):
    @endpoint
    def run(
        self,
        master_addr: str,
        master_port: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[int, Any]:
        name = getattr(function, "__qualname__", repr(function))
        with _as_running(name, (master_addr, master_port)):
            self._setup_env(master_addr, master_port)
            try:
                return self._rank, function(*args, **kwargs)
            except SystemExit as error:
                if error.code in (None, 0):
                    return self._rank, None
                raise RuntimeError(f"{name} exited with status {error.code}") from error


class _Waker(Actor):
    @endpoint
    def wake(self, master_addr: str, master_port: int) -> None:
        """Let collectives of the function with this rendezvous fail until it has ended."""
        for tries in range(int(_PATIENCE / _WAKE)):
            running = _running
            if running is not None and running.store == (master_addr, master_port):
                if not running.ended.is_set():
                    running.groups.wake()
                if running.ended.wait(_WAKE):
                    running.destroy_groups()
                    return
            elif tries * _WAKE > _START:
                return  # it was refused, or could not be read
            else:
                threading.Event().wait(_WAKE)
