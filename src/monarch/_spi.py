"""What features may use of the engine beyond the public interface.

`monarch._debug`, `monarch._telemetry`, `monarch.rdma`, jobs and others of their kind import the
engine only through here. Small on purpose: a name that is added becomes a promise.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from monarch._engine.base import instrument
from monarch._engine.base.duration import parse_duration
from monarch._engine.base.memory_file import memory_file
from monarch._engine.base.settings import settings
from monarch._engine.launch import own_folder
from monarch._engine.launch.interpreter import (
    WITHOUT_CWD,
    python_command,
    with_folder,
    working_directory,
)
from monarch._engine.mesh.attachment import let_go
from monarch._engine.mesh.context import context
from monarch._engine.mesh.future import RAISED, VALUE, Future
from monarch._engine.mesh.keepsake import end_job, is_kept, keep_job, renounce
from monarch._engine.mesh.progress import progress
from monarch._engine.mesh.service import Refused, Request, Unreachable, ask, serve, tell
from monarch._engine.mesh.transport import attach_hosts, greet_worker, serve_host
from monarch._engine.protocol.handshake import HandshakeError
from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.client import client_proc, when_forked
from monarch._engine.runtime.greeting import Wire, why_unreachable
from monarch._engine.runtime.invitation import Door, Invitation, come
from monarch._engine.runtime.reactor import WRITE, Reactor, Timer
from monarch._engine.runtime.secret import SecretError
from monarch._engine.runtime.side_stream import Caller

__all__ = [
    "WITHOUT_CWD",
    "WRITE",
    "Caller",
    "Door",
    "HandshakeError",
    "Invitation",
    "Promise",
    "Reactor",
    "Refused",
    "Request",
    "SecretError",
    "Timer",
    "Unreachable",
    "Wire",
    "ask",
    "at_actor_end",
    "at_call_end",
    "attach_hosts",
    "call_later",
    "come",
    "end_job",
    "failed",
    "greet_worker",
    "instrument",
    "is_kept",
    "is_simulated",
    "keep_job",
    "let_go",
    "memory_file",
    "open_door",
    "open_stream",
    "own_folder",
    "own_uid",
    "parse_duration",
    "progress",
    "python_command",
    "reactor_call",
    "renounce",
    "resolved",
    "serve",
    "serve_host",
    "serve_streams",
    "settings",
    "start_thread",
    "successor_of",
    "tell",
    "when_forked",
    "when_gone",
    "why_unreachable",
    "with_folder",
    "working_directory",
]

R = TypeVar("R")


def at_call_end(callback: Callable[[BaseException | None], None]) -> bool:
    """Call `callback(error)` when the endpoint call that is running here has ended.

    `error` is what the endpoint raised, or None. False, and nothing is registered, when the
    current code does not run in an endpoint call: a constructor, for one, is none.
    """
    here = context()
    cell = here.actor_instance._cell
    if cell is None or cell.behaviour is None:
        return False
    cell.watchers.setdefault(id(here), []).append(callback)
    return True


def at_actor_end(callback: Callable[[], object]) -> Callable[[], None] | None:
    """Call `callback()` when the actor whose code is running has done its last act.

    Before whoever stops it is told that it has. On any thread; it must not block or raise. What
    comes back withdraws the request; None, and nothing is registered, outside actors.
    """
    cell = context().actor_instance._cell
    if cell is None:
        return None
    cell.at_end[callback] = None
    return lambda: cell.at_end.pop(callback, None)


# -- futures -------------------------------------------------------------------------------------


class Promise(Future[R]):
    """A future that a feature settles, from any thread. Make it with `Promise.pending()`."""

    __slots__ = ()

    @classmethod
    def pending(cls) -> Promise[R]:
        """A new one."""
        made: Promise[R] = cls._new()
        return made

    def resolve(self, value: R) -> bool:
        """Settle with a value; False if it was settled before."""
        return self._resolve(VALUE, value)

    def fail(self, error: BaseException) -> bool:
        """Settle with what `get` and `await` will raise; False if it was settled before."""
        return self._resolve(RAISED, error)


resolved = Future._of
failed = Future._failed


# -- processes -----------------------------------------------------------------------------------


def own_uid() -> int:
    """This process in the cluster; a script becomes a client by it."""
    return client_proc().uid


def successor_of(uid: int) -> int:
    """The process that is in the place of `uid` today: itself, unless it was restarted."""
    return client_proc().newest(uid)


def when_gone(uid: int, callback: Callable[[str], None]) -> None:
    """Call `callback(how it ended)` on the reactor thread once process `uid` is gone."""
    client_proc().when_gone(uid, lambda verdict: callback(verdict.error))


# -- side streams: bytes between processes, beside the links (see runtime.side_stream) -------------


def serve_streams(purpose: str, handler: Callable[[socket.socket, Caller], None]) -> None:
    """Call `handler(stream, caller)` on the reactor thread when another process opens one."""
    client_proc().streams[purpose] = handler


def open_stream(uid: int, purpose: str) -> socket.socket:
    """A stream of bytes to process `uid`; it does not block, and can be written to at once.

    It is at its end as soon as nobody there takes it, or the process or its host is lost.
    """
    return client_proc().open_stream(uid, purpose)


def open_door(reactor: Reactor, address: str, tls: bool) -> Door:
    """What lets in peers by invitation, see runtime.invitation; it reports to the audit log."""
    proc = client_proc()

    def report(peer: str, certificate: str, refused: str) -> None:
        told = {"peer": peer, "certificate": certificate, "refused": refused}
        proc.tell_agent({"op": "data_connection", **told})

    return Door(reactor, address, tls, report)


# -- time and threads ----------------------------------------------------------------------------


def reactor_call() -> Callable[..., None]:
    """`call_soon(callback, *args)` of this process's reactor: in order, safe in finalisers."""
    return client_proc().reactor.call_soon


def call_later(delay: float, callback: Callable[[], None]) -> Timer:
    """Run `callback()` on the reactor thread after `delay` seconds, unless cancelled."""
    return client_proc().reactor.call_later(delay, callback)


def start_thread(name: str, run: Callable[[], None]) -> None:
    """Run something on a daemon thread; `name` begins with ``monarch-``."""
    drivers.current.start_thread(name, run)


def is_simulated() -> bool:
    """Whether this program runs in the simulator, where one thread runs at a time."""
    return type(drivers.current) is not drivers.Driver
