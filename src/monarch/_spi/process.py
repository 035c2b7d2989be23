"""The process of a feature: hooks into its calls, futures, streams of bytes, timers and threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from monarch._engine.mesh.call.context import _context, context
from monarch._engine.mesh.results.future import RAISED, RAW, VALUE, Future
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.reactor import Reactor, Timer
from monarch._engine.runtime.proc.side_stream import Caller
from monarch._engine.runtime.proc.time_limit import TimeLimit

if TYPE_CHECKING:
    from monarch._engine.runtime.direct.ticket import Door

__all__ = [
    "Promise",
    "at_actor_end",
    "at_call_end",
    "before_calls",
    "call_later",
    "call_within",
    "current_context",
    "failed",
    "is_gone",
    "is_simulated",
    "open_door",
    "open_stream",
    "own_uid",
    "reactor_call",
    "resolved",
    "serve_streams",
    "settled",
    "start_thread",
    "successor_of",
    "then",
    "when_gone",
]

R = TypeVar("R")

current_context = _context.get
"""Return the context of the code that runs; None outside of actors. Starts nothing."""


def at_call_end(callback: Callable[[BaseException | None], None]) -> bool:
    """Call `callback(error)` when the endpoint call that is running here has ended.

    `error` is the exception of the endpoint, or None. Return False, without registering, if the
    current code does not run in an endpoint call; a constructor, for example, does not.
    """
    here = context()
    cell = here.actor_instance._cell
    if cell is None or cell.behaviour is None:
        return False
    cell.watchers.setdefault(id(here), []).append(callback)
    return True


class _Encoder:
    """Encodes the arguments of a call after other things were done."""

    def __init__(self, encode: Callable[[Any, Any], Any]) -> None:
        self.encode = encode
        self.before: tuple[Callable[[], object], ...] = ()

    def __call__(self, args: Any, kwargs: Any) -> Any:
        for callback in self.before:
            callback()
        return self.encode(args, kwargs)


def before_calls(callback: Callable[[], object]) -> Callable[[], None]:
    """Call `callback()` before this process encodes the arguments of a call of an actor.

    It runs on the thread of the caller, which it delays, and must not raise. Return a function that
    withdraws the callback.
    """
    proc: Any = client_proc()
    encoder = proc.encode_call
    if not isinstance(encoder, _Encoder):
        encoder = proc.encode_call = _Encoder(encoder)
    encoder.before = (*encoder.before, callback)

    def withdraw() -> None:
        encoder.before = tuple(each for each in encoder.before if each is not callback)
        if not encoder.before:
            proc.encode_call = encoder.encode

    return withdraw


def at_actor_end(callback: Callable[[], object]) -> Callable[[], None] | None:
    """Call `callback()` when the actor whose code is running has ended.

    The callback runs before the end is reported to the process that stops the actor. It runs on any
    thread, and must not block or raise. Return a function that withdraws the callback; return None,
    without registering, outside actors.
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
        """Return a new, unsettled promise."""
        made: Promise[R] = cls._new()
        return made

    def resolve(self, value: R) -> bool:
        """Settle with a value. Return False if the promise was settled before."""
        return self._resolve(VALUE, value)

    def fail(self, error: BaseException) -> bool:
        """Settle with an error for `get` and `await`. Return False if settled before."""
        return self._resolve(RAISED, error)


class _Then(Future[R]):
    """The future of a function of another future's value."""

    __slots__ = ("_function", "_otherwise", "_source")

    _function: Callable[[Any], R]
    _otherwise: Callable[[Exception], object] | None
    _source: Future[Any]

    def _decode(self, content: Any) -> R:
        try:
            value = self._source.get()
        except Exception as error:
            if self._otherwise is not None:
                self._otherwise(error)
            raise
        return self._function(value)

    def _recall(self) -> None:
        self._source.cancel()


def then(
    source: Future[Any],
    function: Callable[[Any], R],
    otherwise: Callable[[Exception], object] | None = None,
) -> Future[R]:
    """Return the future of ``function(value)`` for the value of a future whose operation runs.

    The first observer calls the function, once, on its thread. An error of `source` is raised,
    after a call of ``otherwise(error)``.
    """
    future: _Then[R] = _Then._new()
    future._source = source
    future._function = function
    future._otherwise = otherwise
    source._notify(lambda: future._resolve(RAW, None))
    return future


def settled(source: Future[Any], timeout: float | None = None) -> bool:
    """Wait for the outcome of a future whose operation runs; return whether it has a value.

    An error counts as unknown to the script until a call raises it.
    """
    done = threading.Event()
    source._notify(done.set)
    return done.wait(timeout) and not source._has_error()


resolved = Future._of
failed = Future._failed


# -- processes -----------------------------------------------------------------------------------


def own_uid() -> int:
    """Return the id of this process in the cluster. The first call makes a script a client."""
    return client_proc().uid


def successor_of(uid: int) -> int:
    """Return the id of the process that replaces `uid` now; `uid` itself unless restarted."""
    return client_proc().newest(uid)


def is_gone(uid: int) -> bool:
    """Whether this process knows that process `uid` has exited, is lost, or was replaced."""
    proc = client_proc()
    return uid in proc.verdicts or uid in proc.successors


def when_gone(uid: int, callback: Callable[[str], None]) -> None:
    """Call `callback(reason)` on the reactor thread once process `uid` has exited or is lost."""
    client_proc().when_gone(uid, lambda verdict: callback(verdict.error))


# -- side streams: bytes between processes, beside the links (see runtime.proc.side_stream) --------


def serve_streams(purpose: str, handler: Callable[[socket.socket, Caller], None] | None) -> None:
    """Call `handler(stream, caller)` on the reactor thread when a process opens a side stream.

    None: refuse them from now on.
    """
    streams = client_proc().streams
    if handler is None:
        streams.pop(purpose, None)
    else:
        streams[purpose] = handler


def open_stream(uid: int, purpose: str) -> socket.socket:
    """Return a stream of bytes to process `uid`. It is non-blocking and can be written at once.

    The stream reaches EOF if the other process refuses it, or if that process or its host is lost.
    """
    return client_proc().open_stream(uid, purpose)


def open_door(reactor: Reactor, address: str, tls: bool) -> Door:
    """Open a listener for invited peers, see runtime.direct.ticket; it writes to the audit log."""
    from monarch._engine.runtime.direct.ticket import Door  # few features open one

    proc = client_proc()

    def report(peer: str, certificate: str, refused: str) -> None:
        told = {"peer": peer, "certificate": certificate, "refused": refused}
        proc.tell_agent({"op": "data_connection", **told})

    return Door(reactor, address, tls, report)


# -- time and threads ----------------------------------------------------------------------------


def reactor_call() -> Callable[..., None]:
    """Return `call_soon(callback, *args)` of this process's reactor.

    Callbacks run in order on the reactor thread. The function may be called in finalisers.
    """
    return client_proc().reactor.call_soon


def call_later(delay: float, callback: Callable[[], None]) -> Timer:
    """Run `callback()` on the reactor thread after `delay` seconds, unless cancelled."""
    return client_proc().reactor.call_later(delay, callback)


def call_within(seconds: float, callback: Callable[[], None]) -> TimeLimit:
    """Run `callback()` on the reactor thread after `seconds`, unless cancelled: a time limit.

    Time in which a debugger has stopped the program does not count.
    """
    limit = TimeLimit(client_proc().reactor, seconds, environments.current.now(), callback)
    limit.start()
    return limit


def start_thread(name: str, run: Callable[[], None]) -> None:
    """Run a function on a new daemon thread; `name` begins with ``monarch-``."""
    environments.current.start_thread(name, run)


def is_simulated() -> bool:
    """Whether this program runs in the simulator, where one thread runs at a time."""
    return type(environments.current) is not environments.Environment
