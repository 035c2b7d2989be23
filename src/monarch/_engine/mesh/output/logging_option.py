"""Streaming of the output of procs to the client: `ProcMesh.logging_option`, flushes, notebooks.

A line passes a proc's pipe, the relay in the host agent (`runtime.output.relay`), the agent's link
to the client (or to the client's agent), and the printer (`runtime.output.printer`). The pipes
exist if `capture_options` asked for them when the procs were spawned.

`logging_option` sends its request to the agent, which passes it to the agents of the other hosts.
Each agent first updates its relay, then sends each proc its level; each proc answers the caller. So
when `logging_option` returns, the new settings apply to all that procs print from then on.

Lines are printed by the process of the script, even if an actor called `logging_option`: that is
where people read them.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings
from monarch._engine.mesh.output.log_level import set_level
from monarch._engine.mesh.results.future import VALUE, Future
from monarch._engine.mesh.results.gather import Gather
from monarch._engine.runtime.agent.client import client_proc, current_proc, when_forked, when_ready
from monarch._engine.runtime.proc.body import decode_body
from monarch._engine.runtime.proc.links import LostLink
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.runtime.proc.proc import Proc, new_uid
from monarch._engine.transport.frame_link import FrameLink

if TYPE_CHECKING:
    from monarch._engine.mesh.meshes.proc_mesh import ProcMesh
    from monarch._engine.runtime.output.printer import LogPrinter

__all__ = [
    "LoggingManager",
    "capture_options",
    "close_printer",
    "flush_all_proc_mesh_logs",
    "set_logging",
    "when_printed",
]

_FLUSH_WAIT = 3.0


# -- asking for it -------------------------------------------------------------------------------


def capture_options() -> dict[str, Any] | None:
    """Return how the agent captures the output of procs spawned now; None if it does not."""
    notebook = _shell()
    forwarding = settings.enable_log_forwarding or (
        notebook is not None and settings.origin("enable_log_forwarding") == "default"
    )
    files = settings.enable_file_capture and settings.force_file_log
    if not (forwarding or files or settings.tail_log_lines):
        return None
    if notebook is not None:
        _flush_after_cells(notebook)
    return {
        "files": files,
        "ranked": settings.prefix_with_rank,
        "tail": settings.tail_log_lines,
    }


async def set_logging(
    mesh: ProcMesh, stream_to_client: bool, aggregate_window_sec: int | None, level: int
) -> None:
    """Do what `ProcMesh.logging_option` describes; first wait until the procs run."""
    _check(stream_to_client, aggregate_window_sec, level)
    await mesh.initialized
    captured = await _Settled.of(mesh, stream_to_client, aggregate_window_sec, level)
    if stream_to_client and not captured:
        warnings.warn(
            "logging_option(stream_to_client=True) has no effect: the output of these procs is not "
            "captured. Call configure(enable_log_forwarding=True), or set "
            "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING=true, before they are spawned.",
            UserWarning,
            stacklevel=3,
        )


def _check(stream_to_client: object, window: Any, level: int) -> None:
    if level < 0 or level > 255:
        raise ValueError(f"Invalid logging level: {level} (it must be 0 .. 255)")
    if not isinstance(stream_to_client, bool):
        raise TypeError(f"stream_to_client must be a bool, not {stream_to_client!r}")
    if window is None:
        return
    if operator.index(window) < 0:
        raise OverflowError(f"aggregate_window_sec must not be negative, but it is {window}")
    if not stream_to_client:
        raise RuntimeError("cannot set aggregate window without streaming to client")


class _Settled(Gather[bool]):
    """Resolves when every proc has set its level or has exited.

    The result is whether the output of all these procs is captured.
    """

    __slots__ = ("_captured",)

    _captured: bool

    @classmethod
    def of(cls, mesh: ProcMesh, streaming: bool, window: int | None, level: int) -> _Settled:
        self: _Settled = cls._new()
        proc = client_proc()
        self._captured = True
        port = self._open(proc, mesh._links_of(mesh._dense_shape()))
        proc.reactor.call_soon(self._skip_lost)
        request = {
            "op": "logging",
            "uids": mesh._uids(),
            "ranks": list(range(len(mesh))),
            "hosts": mesh._host_names(mesh._dense_shape()),
            "streaming": streaming,
            "group": new_uid(),
            "window": window,
            "level": level,
            "port": port,
        }
        if proc.agent is not None:
            proc.tell_agent(request)
        else:  # without an agent no procs were spawned, and the mesh is this process
            own = {"level": level, "from": proc.uid, "port": port, "rank": 0}
            set_level(proc, {**own, "captured": False})
        return self

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        self._captured = self._captured and decode_body(body)
        self._done(rank)

    def _lost(self, rank: int, verdict: Verdict) -> None:
        self._done(rank)

    def _skip_lost(self) -> None:
        for rank, link in enumerate(self._links):
            if isinstance(link, LostLink):
                self._done(rank)

    def _done(self, rank: int) -> None:
        if self._book(rank, True) and not self._missing:
            self._resolve(VALUE, self._captured)


# -- printing ------------------------------------------------------------------------------------


class _Flush:
    """A flush in progress."""

    __slots__ = ("answers", "awaited", "done")

    def __init__(self, done: Callable[[], object]) -> None:
        self.done = done
        self.answers = 0
        self.awaited: int | None = None  # answers of other hosts; None: not known yet


_printer: LogPrinter | None = None  # made by the first lines that arrive
_flushes: dict[int, _Flush] = {}
_flush_ids = itertools.count()


def _listen(proc: Proc) -> None:
    proc.notices["log"] = lambda message: _print(proc, message)
    proc.notices["log_flushed"] = _flushed


def _print(proc: Proc, message: dict[str, Any]) -> None:
    global _printer
    if _printer is None:
        from monarch._engine.runtime.output.printer import LogPrinter

        def acknowledge(agent: str, size: int) -> None:
            proc.tell_agent({"op": "log_printed", "agent": agent, "size": size})

        _printer = LogPrinter(acknowledge)
    _printer.take(message)


def _flushed(message: dict[str, Any]) -> None:
    """Count the answer of an agent: all that its procs printed so far has been sent here.

    The client's own agent also reports how many agents of other hosts answer.
    """
    flush = _flushes.get(message["id"])
    if flush is None:
        return
    flush.answers += 1
    flush.awaited = message.get("others", flush.awaited)
    if flush.awaited is None or flush.answers <= flush.awaited:
        return
    del _flushes[message["id"]]
    done = flush.done
    if _printer is None:
        done()
    else:
        _printer.flush(done)


def _forget_printer() -> None:
    """In a forked child: drop the printer, whose thread does not exist here."""
    global _printer
    _printer = None


def when_printed(callback: Callable[[], object]) -> None:
    """Call `callback()` once all lines that have arrived so far are printed."""
    if _printer is None:
        callback()
    else:
        _printer.call(callback)


def close_printer(timeout: float) -> None:
    """Print all lines that have arrived, aggregates included; blocks at most `timeout` seconds."""
    global _printer
    printer, _printer = _printer, None
    if printer is not None:
        printer.close(timeout)


class _Flushed(Future[None]):
    """Resolves when all that procs have printed so far, aggregates included, is printed here."""

    __slots__ = ()

    @classmethod
    def of(cls) -> _Flushed:
        self: _Flushed = cls._new()
        proc = current_proc()
        if proc is None or proc.agent is None:
            self._resolve(VALUE, None)
            return self
        ident = next(_flush_ids)
        _flushes[ident] = _Flush(lambda: self._resolve(VALUE, None))
        proc.tell_agent({"op": "log_flush", "id": ident})
        return self


def flush_all_proc_mesh_logs() -> None:
    """Print all that procs of any mesh have printed so far, aggregates included.

    Blocks until that is done, at most three seconds.
    """
    done = threading.Event()
    _Flushed.of()._notify(done.set)
    done.wait(_FLUSH_WAIT)


class LoggingManager:
    """The log settings of one proc mesh; programs use `ProcMesh.logging_option` instead."""

    def __init__(self, mesh: ProcMesh | None = None) -> None:
        self._mesh = mesh

    async def init(self, proc_mesh: ProcMesh, stream_to_client: bool) -> None:
        """Manage `proc_mesh`; with `stream_to_client`, start to stream its output."""
        self._mesh = proc_mesh
        if stream_to_client:
            await self.logging_option()

    async def logging_option(
        self,
        stream_to_client: bool = True,
        aggregate_window_sec: int | None = 3,
        level: int = 20,
    ) -> None:
        """As `ProcMesh.logging_option`, with other defaults."""
        if self._mesh is None:
            raise RuntimeError("the logging manager has no mesh yet; await init(mesh, ...) first")
        await set_logging(self._mesh, stream_to_client, aggregate_window_sec, level)

    def flush(self) -> None:
        """As `flush_all_proc_mesh_logs`."""
        flush_all_proc_mesh_logs()

    async def flush_async(self) -> None:
        """As `flush`, without blocking the event loop."""
        import asyncio

        await asyncio.wait([_Flushed.of().as_asyncio()], timeout=_FLUSH_WAIT)

    def register_flusher_if_in_ipython(self) -> None:
        """In IPython, flush after every cell from now on; does nothing elsewhere."""
        shell = _shell()
        if shell is not None:
            _flush_after_cells(shell)


LoggingManager.__module__ = "monarch._src.actor.logging"


# -- notebooks -----------------------------------------------------------------------------------

_shells: list[Any] = []  # IPython shells that flush after every cell


def _shell() -> Any:
    """Return the IPython shell or Jupyter kernel that runs in this process, or None."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def _flush_after_cells(shell: Any) -> None:
    if shell not in _shells:
        _shells.append(shell)
        shell.events.register("post_run_cell", _after_cell)


def _after_cell(_result: object) -> None:
    flush_all_proc_mesh_logs()


when_ready(_listen)
when_forked(_forget_printer)
