"""`Future`: the result of an operation that is under way.

Threads park on a lock that the resolving thread releases; an asyncio loop is woken through its
gate. What arrives is kept as bytes and decoded by whoever looks first, on that thread, so that a
result nobody looks at costs no unpickling and a slow one never holds up the reactor.

A Future resolves once; every observation after that gives the same value or raises the same
error. Observing never cancels: a timed-out `get` can be repeated.

`returns_future` and `receive` make futures that do nothing until first observed; they override
`_drive`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.client import client_proc
from monarch._engine.runtime.watch import AWAITING, BLOCKING

if TYPE_CHECKING:
    import asyncio
    import contextvars

    from typing_extensions import Self

    from monarch._engine.runtime.driver import Parker

__all__ = ["Future", "returns_future"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")

PENDING = 0
RAW = 1  # arrived, not decoded
VALUE = 2
RAISED = 3

# Decoding happens once per future; striped locks spare each future one of its own.
_decoding = [threading.RLock() for _ in range(64)]

_refused: dict[Parker, BaseException] = {}  # waits that were ended with an error


class Future(Generic[R_co]):
    """The result of an operation: block with `get`, or `await` it on any asyncio loop.

    Not constructible by programs; endpoint calls and mesh operations return it.
    """

    __slots__ = ("__weakref__", "_content", "_state", "_waiters")

    _content: Any
    _state: int
    _waiters: list[Callable[[], object]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        raise TypeError(
            "Future objects are returned by Monarch operations and cannot be constructed directly."
        )

    # -- for users -------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> R_co:
        """The result; blocks the calling thread until it is there, at most `timeout` seconds.

        Raises what the operation raised, or TimeoutError: the operation goes on, and a later
        `get` or `await` still sees its result. Inside a running event loop it warns: it blocks
        the loop, use ``await``.
        """
        if timeout is not None:
            _check_timeout(timeout)
        if _on_running_loop():
            _warn_blocking()
        if self._state == PENDING:
            self._block(timeout)
        return self._observe()

    def result(self, timeout: float | None = None) -> R_co:
        """The same as `get`."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """The exception of the operation, or None; a TimeoutError is returned, too."""
        try:
            self.get(timeout)
        except Exception as error:
            return error
        return None

    def as_asyncio(self) -> asyncio.Future[R_co]:
        """A real `asyncio.Future` with this one's outcome, bound to the running loop.

        Raises RuntimeError outside a running loop.
        """
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("as_asyncio() requires a running asyncio event loop.") from None
        return self._attach(loop)

    def __await__(self) -> Generator[Any, None, R_co]:
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ValueError(
                "__await__ with no active event loop (either asyncio or tokio)"
            ) from None
        return self._await(loop)

    def _await(self, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, R_co]:
        if self._state == PENDING:
            self._drive_async(loop)
        if self._state == PENDING:
            arrived = loop.create_future()
            waiter = _gate(loop, arrived, None)
            self._notify(waiter)
            try:
                yield from arrived
            except BaseException:
                self._give_up(waiter)
                raise
        return self._observe()

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle 'Future' object; send its result instead")

    def __repr__(self) -> str:
        state = ("pending", "resolved", "resolved", "failed")[self._state]
        return f"<Future {state}>"

    # -- for the runtime -------------------------------------------------------------------------

    @classmethod
    def _new(cls) -> Any:  # Any, since nothing here says of what type the result will be
        self = object.__new__(cls)
        self._state = PENDING
        self._content = None
        self._waiters = []
        return self

    @staticmethod
    def _of(value: R) -> Future[R]:
        self: Future[R] = Future._new()
        self._resolve(VALUE, value)
        return self

    @staticmethod
    def _failed(error: BaseException) -> Future[Any]:
        self: Future[Any] = Future._new()
        self._resolve(RAISED, error)
        return self

    @staticmethod
    def _from_coro(coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """A future that runs `coroutine` when first observed."""
        return _CoroutineFuture.starting(lambda: coroutine, None)

    def _resolve(self, state: int, content: Any) -> bool:
        """Settle from any thread; False if it was settled before."""
        if self._state != PENDING:
            return False
        self._content = content
        self._state = state
        waiters = self._waiters
        while waiters:
            try:
                waiters.pop(0)()
            except IndexError:  # a timed-out get took its waiter back meanwhile
                break
        return True

    def _decode(self, content: Any) -> Any:
        """The value of what arrived; raises for errors. Overridden by what sets RAW."""
        raise NotImplementedError

    def _drive(self, timeout: float | None) -> None:
        """Called before a thread blocks: lazy operations start, or run to their end, here."""

    def _drive_async(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called before a coroutine waits on `loop`."""
        self._drive(None)

    def _undrive(self) -> None:
        """Called when an observation gave up."""

    def _notify(self, waiter: Callable[[], object]) -> None:
        """Call `waiter` once when settled; at once if it is."""
        self._waiters.append(waiter)
        if self._state != PENDING:
            try:
                self._waiters.remove(waiter)
            except ValueError:
                return  # the resolving thread calls it
            waiter()

    def _block(self, timeout: float | None) -> None:
        self._drive(timeout)
        if self._state != PENDING:
            return
        parker = drivers.current.parker()
        self._waiters.append(parker.release)
        if self._state != PENDING:
            return
        try:
            if parker.acquire(timeout=-1 if timeout is None else timeout):
                if self._state == PENDING:
                    raise _refused.pop(parker)
                return
        except BaseException:
            self._give_up(parker.release)
            raise
        self._give_up(parker.release)
        if self._state == PENDING:  # else the result came while we gave up: it is ours
            raise TimeoutError

    def _is_awaited(self, parker: Parker) -> bool:
        """Whether a thread waits at `parker`."""
        return parker.release in self._waiters

    def _refuse(self, parker: Parker, error: BaseException) -> None:
        """Make the wait at `parker`, if it goes on, and nothing else, end with `error`."""
        _refused[parker] = error
        try:
            self._waiters.remove(parker.release)
        except ValueError:
            del _refused[parker]  # the resolving thread has it, or it gave up
        else:
            parker.release()

    def _give_up(self, waiter: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):  # the resolving thread has it already
            self._waiters.remove(waiter)
        self._undrive()

    def _observe(self) -> R_co:
        state = self._state
        if state == VALUE:
            content: R_co = self._content
            return content
        if state == RAISED:
            raise self._content.with_traceback(None)
        with _decoding[id(self) >> 4 & 63]:
            if self._state == RAW:
                content = self._content
                try:
                    value: R_co = self._decode(content)
                except BaseException as error:
                    self._content = error
                    self._state = RAISED
                    raise
                self._content = value
                self._state = VALUE
                return value
        if self._state == PENDING:  # what had arrived was given back, by another who gave up
            self._block(None)
        return self._observe()

    def _take_back(self) -> Any:
        """What arrived and nobody has looked at yet, or None; then this is pending again."""
        lock = _decoding[id(self) >> 4 & 63]
        if not lock.acquire(blocking=False):
            return None  # somebody may be looking right now
        try:
            if self._state != RAW:
                return None
            content, self._content = self._content, None
            self._state = PENDING
            return content
        finally:
            lock.release()

    def _attach(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[R_co]:
        mirror: asyncio.Future[R_co] = loop.create_future()

        def copy() -> None:
            if mirror.done():
                return
            try:
                mirror.set_result(self._observe())
            except StopIteration:
                mirror.set_exception(RuntimeError("coroutine raised StopIteration"))
            except BaseException as error:
                mirror.set_exception(error)

        self._drive_async(loop)
        if self._state != PENDING:
            copy()
        else:
            waiter = _gate(loop, None, copy)
            mirror.add_done_callback(
                lambda done: self._give_up(waiter) if done.cancelled() else None
            )
            self._notify(waiter)
        return mirror


Future.__module__ = "monarch._src.actor.future"
AWAITING.add(vars(Future)["_await"].__code__)
BLOCKING.add(vars(Future)["_block"].__code__)


def _gate(
    loop: asyncio.AbstractEventLoop,
    arrived: asyncio.Future[None] | None,
    callback: Callable[[], None] | None,
) -> Callable[[], None]:
    """What another thread calls to resume a wait on `loop`."""
    from monarch._engine.runtime.bridge import gate_of

    gate = gate_of(loop)
    if gate.on_wait is not None and arrived is not None:
        gate.on_wait(arrived)
    if callback is not None:
        return functools.partial(gate.post, _run, callback)
    return functools.partial(gate.post, _arrive, arrived)


def _run(callback: Callable[[], None]) -> None:
    callback()


def _arrive(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


def _check_timeout(timeout: Any) -> None:
    if not (isinstance(timeout, (int, float)) and math.isfinite(timeout) and timeout >= 0):
        raise ValueError(
            f"invalid timeout {timeout}: expected a non-negative, finite number of seconds"
        )


def _on_running_loop() -> bool:
    events = sys.modules.get("asyncio.events")
    return events is not None and events._get_running_loop() is not None


def _warn_blocking() -> None:
    import logging

    warnings.warn(
        "Future.get() was called from within an active event loop. It blocks the loop and every "
        "task on it; use `await` instead.",
        UserWarning,
        stacklevel=3,
    )
    logging.getLogger(__name__).warning("Future.get() called from within an active event loop")


class _CoroutineFuture(Future[R_co]):
    """Runs a coroutine when first observed: on the observer's loop, or to its end in `get`."""

    __slots__ = ("_context", "_lock", "_start")

    _context: contextvars.Context | None
    _lock: threading.Lock
    _start: Callable[[], Coroutine[Any, Any, R_co]] | None

    @staticmethod
    def starting(
        start: Callable[[], Coroutine[Any, Any, R]], context: contextvars.Context | None
    ) -> Future[R]:
        self: _CoroutineFuture[R] = _CoroutineFuture._new()
        self._start = start
        self._context = context
        self._lock = threading.Lock()
        return self

    def _claim(self) -> Any:
        with self._lock:
            start, self._start = self._start, None
        return start

    def _drive(self, timeout: float | None) -> None:
        start = self._claim()
        if start is None:
            return
        if _on_running_loop():
            run = functools.partial(self._run_here, start, timeout)
            drivers.current.start_thread("monarch-coroutine", run).join()
        else:
            self._run_here(start, timeout)

    def _run_here(self, start: Any, timeout: float | None) -> None:
        import asyncio

        async def body() -> None:
            task = asyncio.ensure_future(start())
            done, _ = await asyncio.wait([task], timeout=timeout)
            if not done:
                task.cancel()
                await asyncio.wait([task], timeout=1.0)
                self._resolve(RAISED, TimeoutError())
            else:
                self._settle(task)

        loop = asyncio.new_event_loop()
        try:
            if self._context is None:
                loop.run_until_complete(body())
            else:
                self._context.run(loop.run_until_complete, body())
        except BaseException as error:
            self._resolve(RAISED, error)
            raise
        finally:
            loop.close()

    def _settle(self, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            import asyncio

            self._resolve(RAISED, asyncio.CancelledError())
            return
        error = task.exception()
        if error is not None:
            self._resolve(RAISED, error)
        else:
            self._resolve(VALUE, task.result())

    def _drive_async(self, loop: asyncio.AbstractEventLoop) -> None:
        start = self._claim()
        if start is None:
            return
        if self._context is None:
            task = loop.create_task(start())
        else:
            task = self._context.run(lambda: loop.create_task(start()))
        _background.add(task)
        task.add_done_callback(_background.discard)
        task.add_done_callback(self._settle)


_background: set[Any] = set()  # running tasks; a loop keeps only weak references


def returns_future(
    function: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Future[R]]:
    """Decorate an ``async def``: calling it returns a `Future` that runs it when first observed.

    The first ``await`` runs the body as a task of that loop, the first ``get`` to its end; it runs
    at most once, and never if nobody looks. A ``get(timeout)`` that started the body cancels it on
    timeout. Raises TypeError for a function that is not async.
    """
    import inspect

    if not inspect.iscoroutinefunction(function):
        raise TypeError("returns_future requires an async function")

    @functools.wraps(function)
    def start(*args: P.args, **kwargs: P.kwargs) -> Future[R]:
        import contextvars

        client_proc()
        captured = contextvars.copy_context()
        return _CoroutineFuture.starting(lambda: function(*args, **kwargs), captured)

    return start
