"""Streaming of the output of procs to the client: `ProcMesh.logging_option`, flushes.

A line passes a proc's pipe, the `relay` in the host agent, the agent's link to the client (or to
the client's agent), and the `printer`. The pipes exist if `process.capture_options` asked for them
when the procs were spawned.

`logging_option` sends its request to the agent, which passes it to the agents of the other hosts.
Each agent first updates its relay, then sends each proc its level; each proc answers the caller. So
when `logging_option` returns, the new settings apply to all that procs print from then on.

Lines are printed by the process of the script, even if an actor called `logging_option`: that is
where people read them.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._output.log_level import set_level
from monarch._spi import (
    RAISED,
    VALUE,
    Gather,
    LostLink,
    client_proc,
    current_proc,
    decode_body,
    new_uid,
)
from monarch.actor import Future

if TYPE_CHECKING:
    from monarch._spi import FrameLink, Proc, Verdict
    from monarch.actor import ProcMesh

__all__ = [
    "LoggingManager",
    "flush_all_proc_mesh_logs",
    "set_logging",
]

_FLUSH_WAIT = 3.0


# -- settings ------------------------------------------------------------------------------------


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
        proc.when_agent_fails(_settle_none)
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


def _settle_none(verdict: Verdict) -> None:
    """Fail the requests that the agent may not have passed to the procs."""
    for sink in list(client_proc().ports.values()):
        if isinstance(sink, _Settled):
            text = f"logging_option may have had no effect on some procs: {verdict.error}"
            sink._end(RAISED, RuntimeError(text))


# -- flushes -------------------------------------------------------------------------------------


class _Flush:
    """A flush in progress."""

    __slots__ = ("answers", "awaited", "done")

    def __init__(self, done: Callable[[], object]) -> None:
        self.done = done
        self.answers = 0
        self.awaited: int | None = None  # answers of other hosts; None: not known yet


_flushes: dict[int, _Flush] = {}
_flush_ids = itertools.count()


def _flushed(proc: Proc, message: dict[str, Any]) -> None:
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
    if proc.printer is None:
        flush.done()
    else:
        proc.printer.flush(flush.done)


def _flush_no_more(_: Verdict) -> None:
    """End the flushes that the agent does not answer."""
    for ident in list(_flushes):
        _flushes.pop(ident).done()


class _Flushed(Future[None]):
    """Resolves when all that procs have printed so far, aggregates included, is printed here.

    Also resolves when the agent has failed: then that is printed which has arrived.
    """

    __slots__ = ()

    @classmethod
    def of(cls) -> _Flushed:
        self: _Flushed = cls._new()
        proc = current_proc()
        if proc is None or proc.agent is None:
            self._resolve(VALUE, None)
            return self
        proc.notices["log_flushed"] = functools.partial(_flushed, proc)
        proc.when_agent_fails(_flush_no_more)
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


LoggingManager.__module__ = "monarch._src.actor.logging"
