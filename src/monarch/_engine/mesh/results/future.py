"""`Future`: the result of an operation that is under way.

Threads park on a lock that the resolving thread releases; an asyncio loop is woken through its
gate. A result is kept as bytes and decoded by the first observer, on its thread. So a result that
is never observed is not unpickled, and a slow one never holds up the reactor.

A future settles once; every later observation gives the same value or raises the same error.
Observing never cancels: a `get` that timed out can be repeated. `cancel` does.

The wait functions of asyncio and `concurrent.futures` recognise futures by their attributes. Those
of `concurrent.futures` use a lock, a list and a state by private names, which a future makes when
they are first read (`_Shared`).

`returns_future` and `receive` make futures whose operation starts when they are first observed;
they override `_drive`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

from monarch._engine.base.error_page import see_page
from monarch._engine.base.errors import DeadlockError, user_stacklevel
from monarch._engine.base.features import hook
from monarch._engine.mesh.results.faults import Faults, set_looks
from monarch._engine.runtime.actor.main_thread import WAITS
from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.proc.time_limit import time_left

if TYPE_CHECKING:
    import asyncio
    import contextvars

    from typing_extensions import Self

    from monarch._engine.runtime.io.bridge import LoopGate
    from monarch._engine.runtime.io.environment import Parker
    from monarch._engine.runtime.io.stacks import Stack

__all__ = ["Future", "begins_wait", "returns_future"]

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")

PENDING = 0
RAW = 1  # arrived, not decoded
VALUE = 2
RAISED = 3
CANCELLED = 4

# Decoding happens once per future, so futures share a few locks instead of having one each.
_decoding = [threading.RLock() for _ in range(64)]

_refused: dict[Parker, BaseException] = {}  # waits that were ended with an error


class Future(Generic[R_co]):
    """The result of an operation: block with `get`, or `await` it on any asyncio loop.

    Programs cannot construct futures; endpoint calls and mesh operations return them.
    """

    __slots__ = ("__weakref__", "_content", "_parked", "_phase", "_shared")

    _content: Any
    _shared: _Shared
    _phase: int
    _parked: list[Callable[[], object]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        raise TypeError(
            "Future objects are returned by Monarch operations and cannot be constructed directly."
        )

    # -- for users -------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> R_co:
        """Return the result; block the calling thread until it is there, at most `timeout` seconds.

        Time in which `monarch debug` has stopped a rank of the program does not count.
        Raises the exception of the operation, or TimeoutError: the operation goes on, and a later
        `get` or `await` still returns its result. Inside a running event loop it warns, since it
        blocks the loop: use ``await``.
        """
        if timeout is not None:
            _check_timeout(timeout)
        if _running_loop() is not None:
            _warn_blocking()
        if self._phase == PENDING:
            self._block(timeout)
        return self._observe()

    def result(self, timeout: float | None = None) -> R_co:
        """Return the result as `get` does, without a warning if there is an outcome."""
        return self.get(timeout) if self._phase == PENDING else self._observe()

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Return the exception of the operation, or None; a TimeoutError is returned, too."""
        try:
            self.result(timeout)
        except Exception as error:
            return error
        return None

    def done(self) -> bool:
        """Whether there is an outcome: a value, an error, or a cancellation."""
        return self._phase != PENDING

    def cancelled(self) -> bool:
        """Whether `cancel` settled it."""
        return self._phase == CANCELLED

    def cancel(self) -> bool:
        """Give the operation up; True unless there is an outcome. Does not block.

        Waits for this future end with a CancelledError: asyncio's on an event loop, otherwise that
        of `concurrent.futures`. A call is recalled from its actors: a message that waits there is
        dropped, and an async endpoint that handles it is cancelled at its ``await``. A plain
        endpoint goes on, and its answer is dropped. Other operations (a stop, one element of a
        stream) go on.
        """
        if not self._resolve(CANCELLED, None):
            return self._phase == CANCELLED
        self._recall()
        return True

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(self)`` when there is an outcome.

        A callback added on an event loop runs there, soon. Otherwise it runs on a thread of the
        runtime, or at once if there is an outcome already. An error of the callback is logged, or
        left to the loop.
        """
        loop = _running_loop()
        if loop is not None:
            self._drive_async(loop)
            self._notify(_Callback(self, callback, loop))
        elif self._phase != PENDING:
            _Callback(self, callback, None).run()
        else:
            self._begin()
            self._notify(_Callback(self, callback, None))

    def remove_done_callback(self, callback: Callable[[Self], object]) -> int:
        """Remove the callback, unless it is about to run; return how often it had been added."""
        removed = 0
        for waiter in list(self._parked):
            if isinstance(waiter, _Callback) and waiter.function == callback:
                self._give_up(waiter)
                removed += 1
        return removed

    def as_asyncio(self) -> asyncio.Future[R_co]:
        """Return a real `asyncio.Future` with this one's outcome, bound to the running loop.

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
                "__await__ with no active event loop (either asyncio or tokio): under another one, "
                "such as trio's, wait with get() in a thread"
            ) from None
        return self._await(loop)

    def _await(self, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, R_co]:
        # The search for deadlocks (`monarch._deadlock`) reads `self` and `arrived` of this frame.
        if self._phase == PENDING:
            self._drive_async(loop)
        if self._phase == PENDING:
            arrived = loop.create_future()
            waiter = _gate(loop, arrived, None)
            self._notify(waiter)
            try:
                yield from arrived
            except BaseException as error:
                self._abandon(waiter, error)
                raise
        return self._observe()

    if not TYPE_CHECKING:  # for type checkers it is not there

        def __getitem__(self, key: object) -> NoReturn:
            page = see_page("future-without-get")
            raise TypeError(f"a Future cannot be indexed or iterated over: {_LOOK}{page}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle 'Future' object; send its result instead")

    def __repr__(self) -> str:
        state = ("pending", "resolved", "resolved", "failed", "cancelled")[self._phase]
        return f"<Future {state}: get() its result, or await it in a coroutine>"

    # -- for concurrent.futures.wait and as_completed ----------------------------------------------

    @property
    def _condition(self) -> threading.Condition:
        return _Shared.of(self).condition

    @property
    def _waiters(self) -> list[Any]:
        return _Shared.of(self).waiters

    @property
    def _state(self) -> str:
        return _Shared.of(self).state

    # -- for the runtime -------------------------------------------------------------------------

    @classmethod
    def _new(cls) -> Any:  # Any, since the type of the result is not known here
        self = object.__new__(cls)
        self._phase = PENDING
        self._content = None
        self._parked = []
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
    def _from_coro(coroutine: Awaitable[R]) -> Future[R]:
        """Return a future that awaits a coroutine, or a `PythonTask`, when first observed."""
        return _CoroutineFuture.starting(lambda: coroutine, None)

    def _take_inner(self) -> Any:
        """Return the operation as an object that can be started: a `PythonTask`."""
        return hook("python_task")(self)

    def _resolve(self, state: int, content: Any) -> bool:
        """Settle from any thread; False if it was settled before."""
        if self._phase != PENDING:
            return False
        self._content = content
        self._phase = state
        waiters = self._parked
        while waiters:
            try:
                waiters.pop(0)()
            except IndexError:  # a timed-out `get` removed its waiter meanwhile
                break
        return True

    def _decode(self, content: Any) -> Any:
        """Return the value of received content, or raise its error; for classes that set RAW."""
        raise NotImplementedError

    def _drive(self, timeout: float | None) -> None:
        """Start a lazy operation, or run it to completion; called before a thread blocks."""

    def _drive_async(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a lazy operation; called before a coroutine waits on `loop`."""
        self._drive(None)

    def _undrive(self) -> None:
        """Clean up after an observation that gave up."""

    def _recall(self) -> None:
        """Recall the operation; called after a cancellation."""

    def _begin(self) -> None:
        """Start a lazy operation; called before a wait without a thread or a loop."""
        self._drive(None)

    def _has_error(self) -> bool:
        """Whether the outcome is an error, as far as that is known without decoding it."""
        return self._phase == RAISED

    def _notify(self, waiter: Callable[[], object]) -> None:
        """Call `waiter` once when settled; at once if it is."""
        self._parked.append(waiter)
        if self._phase != PENDING:
            try:
                self._parked.remove(waiter)
            except ValueError:
                return  # the resolving thread calls it
            waiter()

    def _block(self, timeout: float | None) -> None:
        # The search for deadlocks reads `self`, `timeout` and `parker` of this frame, and
        # `monarch._diagnosis` reads `since`.
        self._drive(timeout)
        if self._phase != PENDING:
            return
        since = environments.current.now()
        parker = environments.current.parker()
        self._parked.append(parker.release)
        if self._phase != PENDING:
            return
        # Wait in pieces: CPython does not notice a signal that comes just before the wait (5 of
        # 10,000 Ctrl-C sent at that moment), and would handle it only afterwards.
        piece = environments.current.longest_wait
        left = timeout
        try:
            while left is None or left >= 0:
                wait = piece if left is None else left if piece < 0 else min(left, piece)
                if parker.acquire(timeout=wait):
                    if self._phase == PENDING:
                        raise _refused.pop(parker)
                    return
                if left is not None:
                    left = left - wait or (timeout and time_left(timeout, since)) or -1.0
        except BaseException as error:
            self._abandon(parker.release, error)
            raise
        self._give_up(parker.release)
        if self._phase == PENDING:  # otherwise the result arrived while this thread gave up
            late = self._overdue(timeout or 0)
            page = see_page("no-answer")
            raise TimeoutError(f"{late}; a later get() or await still has it when it comes{page}")

    def _overdue(self, timeout: float) -> str:
        """Return the text that there was no result within `timeout`."""
        return f"no result within {timeout:g} s"

    def _is_awaited(self, parker: Parker) -> bool:
        """Whether a thread waits at `parker`."""
        return parker.release in self._parked

    def _refuse(self, parker: Parker, error: BaseException) -> None:
        """End the wait at `parker`, if it goes on, and no other, with `error`."""
        _refused[parker] = error
        try:
            self._parked.remove(parker.release)
        except ValueError:
            del _refused[parker]  # the resolving thread has removed it, or the wait gave up
        else:
            parker.release()

    def _give_up(self, waiter: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):  # the resolving thread has removed it
            self._parked.remove(waiter)
        self._undrive()

    def _abandon(self, waiter: Callable[[], object], error: BaseException) -> None:
        """Handle that a wait has ended with `error`.

        A call of which the only wait has ended with a deadlock is recalled: when its actor has been
        freed by the error, the call would begin the same cycle again.
        """
        self._give_up(waiter)
        alone = isinstance(error, DeadlockError) and not self._parked
        if alone and self._resolve(RAISED, error):
            self._recall()

    def _observe(self) -> R_co:
        state = self._phase
        if state == VALUE:
            content: R_co = self._content
            return content
        if state == RAISED:
            Faults.current.given(self._content)
            raise self._content.with_traceback(None)
        with _decoding[id(self) >> 4 & 63]:
            if self._phase == RAW:
                content = self._content
                try:
                    value: R_co = self._decode(content)
                except BaseException as error:
                    self._content = error
                    self._phase = RAISED
                    Faults.current.given(error)
                    raise
                self._content = value
                self._phase = VALUE
                return value
        if self._phase == CANCELLED:
            if _on_running_loop():
                import asyncio

                raise asyncio.CancelledError
            import concurrent.futures

            raise concurrent.futures.CancelledError
        if self._phase == PENDING:  # another observer gave the content back when it gave up
            self._block(None)
        return self._observe()

    def _take_back(self) -> Any:
        """Return undecoded content, which makes this pending again, or None if there is none."""
        lock = _decoding[id(self) >> 4 & 63]
        if not lock.acquire(blocking=False):
            return None  # another thread may be decoding it right now
        try:
            if self._phase != RAW:
                return None
            content, self._content = self._content, None
            self._phase = PENDING
            return content
        finally:
            lock.release()

    def _attach(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[R_co]:
        mirror: asyncio.Future[R_co] = loop.create_future()

        def copy() -> None:
            if mirror.done():
                return
            if self._phase == CANCELLED:
                mirror.cancel()
                return
            try:
                mirror.set_result(self._observe())
            except StopIteration:
                mirror.set_exception(RuntimeError("coroutine raised StopIteration"))
            except BaseException as error:
                mirror.set_exception(error)

        self._drive_async(loop)
        if self._phase != PENDING:
            copy()
        else:
            waiter = _gate(loop, None, copy)
            mirror.add_done_callback(
                lambda done: self._give_up(waiter) if done.cancelled() else None
            )
            self._notify(waiter)
        return mirror


_LOOK = "get() its result first, or await it"


def _refuse(operator: str) -> Callable[..., NoReturn]:
    def refuse(*_operands: Any) -> NoReturn:
        raise TypeError(f"a Future has no {operator}: {_LOOK}{see_page('future-as-value')}")

    return refuse


class _OfResult:
    """The name of an attribute that the result of a call has, and its future does not."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        # With a name and an object in the error, Python would suggest a name of this kind.
        raise AttributeError(
            f"'Future' object has no attribute {self._name!r}: {_LOOK}"
            f"{see_page('future-without-get')}",
            name=None,
            obj=None,
        )


# Programs use these operators and names by mistake, on a future in place of its value. A
# `__getattr__` could give the same advice, but would make each attribute access slower: 3 % of a
# round trip.
for _sign, _names in {
    "+": "add radd",
    "-": "sub rsub",
    "*": "mul rmul",
    "/": "truediv rtruediv",
    "<": "lt",
    ">": "gt",
}.items():
    for _name in _names.split():
        setattr(Future, f"__{_name}__", _refuse(_sign))
_of_mesh = "extent failures flatten item items rename size sizes slice split successes values"
for _name in _of_mesh.split():
    setattr(Future, _name, _OfResult(_name))

Future.__module__ = "monarch._src.actor.future"


def begins_wait(call: Callable[P, R]) -> Callable[P, R]:
    """Mark a function whose caller goes on to wait for the future that it returns (decorator).

    The answer may arrive while the thread is still in there, and its failure with it.
    """
    _about_to_see.add(call.__code__)
    return call


def _looks(stack: Stack) -> bool | None:
    """Whether a thread with this stack is about to raise or return its result; None: it waits."""
    for step in stack.steps:
        if step.code in _about_to_see:
            return True
        if step.code is _BLOCK:
            return True if stack.variables[0]["self"]._phase != PENDING else None
    return False


_BLOCK = vars(Future)["_block"].__code__
WAITS.add(_BLOCK)
_about_to_see = {vars(Future)[name].__code__ for name in ("get", "_observe")}
set_looks(_looks, _BLOCK)


@functools.cache  # an import statement costs a microsecond each time
def _gates() -> Callable[[asyncio.AbstractEventLoop], LoopGate]:
    """Return `gate_of`, whose module imports asyncio: programs that never await do without."""
    from monarch._engine.runtime.io.bridge import gate_of

    return gate_of


def _gate(
    loop: asyncio.AbstractEventLoop,
    arrived: asyncio.Future[None] | None,
    callback: Callable[[], None] | None,
) -> Callable[[], None]:
    """Return the function with which another thread resumes a wait on `loop`."""
    gate = _gates()(loop)
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
            f"invalid timeout {timeout!r}: expected a non-negative, finite number of seconds"
        )


def _on_running_loop() -> bool:
    return _running_loop() is not None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    events = sys.modules.get("asyncio.events")
    return None if events is None else events._get_running_loop()


def _warn_blocking() -> None:
    """Warn once per line of the program that blocks, unless it filters warnings otherwise.

    The line may call another function of this package, which calls `get`. If that function has an
    awaitable form, ``<its name>_async`` beside it, the warning names both.
    """
    level = user_stacklevel()
    called = sys._getframe(max(0, level - 2))
    name = called.f_code.co_name
    has_other = f"{name}_async" in called.f_globals
    what, instead = (f"{name}()", f"await {name}_async(...)") if has_other else _GET
    warnings.warn(
        f"{what} was called from within an active event loop. It blocks the loop and every "
        f"task on it; use `{instead}` instead.{see_page('blocking-wait')}",
        UserWarning,
        stacklevel=level,
    )


_GET = ("Future.get()", "await")


class _Callback:
    """A waiter of a future that calls a function of the program."""

    __slots__ = ("function", "future", "gate")

    def __init__(
        self,
        future: Future[Any],
        function: Callable[[Any], object],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.future = future
        self.function = function
        self.gate: Any = None
        if loop is not None:
            self.gate = _gates()(loop)

    def __call__(self) -> None:
        if self.gate is not None:
            self.gate.post(self._call, None)
        else:  # a thread of its own, since it may take long
            environments.current.start_thread("monarch-callback", self.run)

    def _call(self, _: None) -> None:
        self.function(self.future)

    def run(self) -> None:
        try:
            self.function(self.future)
        except Exception:
            import logging

            logging.getLogger("monarch").exception("the callback of %r raised", self.future)


class _Shared:
    """The parts of a future with which `concurrent.futures` waits for its outcome."""

    __slots__ = ("_future", "condition", "state", "waiters")

    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self.condition = threading.Condition()
        self.waiters: list[Any] = []
        self.state = "PENDING"

    @staticmethod
    def of(future: Future[Any]) -> _Shared:
        with contextlib.suppress(AttributeError):
            return future._shared
        with _decoding[id(future) >> 4 & 63]:
            with contextlib.suppress(AttributeError):
                return future._shared
            shared = future._shared = _Shared(future)
        future._begin()
        future._notify(shared.settle)
        return shared

    def settle(self) -> None:
        future = self._future
        with self.condition:
            cancelled = future._phase == CANCELLED
            self.state = "CANCELLED_AND_NOTIFIED" if cancelled else "FINISHED"
            for waiter in self.waiters:
                if cancelled:
                    waiter.add_cancelled(future)
                elif future._has_error():
                    waiter.add_exception(future)
                else:
                    waiter.add_result(future)
            self.condition.notify_all()


class _CoroutineFuture(Future[R_co]):
    """A future that runs a coroutine when first observed: on the observer's loop, or in `get`."""

    __slots__ = ("_context", "_lock", "_start")

    _context: contextvars.Context | None
    _lock: threading.Lock
    _start: Callable[[], Awaitable[R_co]] | None

    @staticmethod
    def starting(
        start: Callable[[], Awaitable[R]], context: contextvars.Context | None
    ) -> Future[R]:
        self: _CoroutineFuture[R] = _CoroutineFuture._new()
        self._start = start
        self._context = context
        self._lock = threading.Lock()
        return self

    def _begin(self) -> None:
        environments.current.start_thread("monarch-coroutine", lambda: self._drive(None))

    def _recall(self) -> None:
        self._claim()  # prevents its start; a started coroutine goes on

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
            environments.current.start_thread("monarch-coroutine", run).join()
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
        import asyncio

        start = self._claim()
        if start is None:
            return
        if self._context is None:
            task = asyncio.ensure_future(start(), loop=loop)
        else:
            task = self._context.run(lambda: asyncio.ensure_future(start(), loop=loop))
        _background.add(task)
        task.add_done_callback(_background.discard)
        task.add_done_callback(self._settle)


_background: set[Any] = set()  # running tasks; a loop keeps only weak references


def returns_future(
    function: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Future[R]]:
    """Decorate an ``async def``: calling it returns a `Future` that runs it when first observed.

    The first ``await`` runs the body as a task of that loop, the first ``get`` to completion. The
    body runs at most once, and never without an observer. A ``get(timeout)`` that started the body
    cancels it on timeout. Raises TypeError for a function that is not async.
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
