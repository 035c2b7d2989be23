"""Plain functions on the processes of a mesh, by the interface of `concurrent.futures`.

The executor keeps a queue of its own. Each process has the function that it runs and the next one,
so that it never waits for the script; a slow function delays that one, and no other. A function
whose process exits is run again, if the caller allows it by `retries`, and a supervisor replaces
the process.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from monarch.actor import (
    Actor,
    ActorError,
    Future,
    ProcMesh,
    SupervisionError,
    Supervisor,
    endpoint,
)

__all__ = ["Executor"]

P = ParamSpec("P")
R = TypeVar("R")
_DEPTH = 2  # functions that a process has: one that runs, and the next


class _Task:
    """A function that was submitted, and how often it may be tried again."""

    __slots__ = ("args", "function", "future", "kwargs", "tries")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tries: int,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.tries = tries


class Executor(concurrent.futures.Executor):
    """Run functions on the processes of a mesh.

    Args:
        procs: where functions run, one at a time in each process.
        retries: how often a function is run again whose process exited. 0: its future fails.
        max_restarts: how many processes are replaced, within a minute, before the executor is
            broken: then all its futures fail.

    It is a `concurrent.futures.Executor`, so `submit`, `map`, `shutdown` and ``with`` are those of
    the standard library, as are `concurrent.futures.as_completed`, `wait` and the loop's
    ``run_in_executor``. A function, its arguments and its result are sent by cloudpickle, so a
    lambda or a function of the script will do. An exception of the function is raised by its
    future, with the remote traceback as its cause.

    >>> from monarch.actor import this_host
    >>> procs = this_host().spawn_procs({"procs": 2})
    >>> with Executor(procs) as executor:
    ...     squares = list(executor.map(lambda x: x * x, range(5)))
    ...     power = executor.submit(pow, 2, 10).result()
    >>> squares, power
    ([0, 1, 4, 9, 16], 1024)
    >>> procs.stop().get()

    A future of a function whose process exited raises `SupervisionError`.
    """

    def __init__(self, procs: ProcMesh, *, retries: int = 0, max_restarts: int = 3) -> None:
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        self._retries = retries
        self._supervisor = Supervisor(max_restarts=max_restarts)
        self._actors = self._supervisor.spawn(procs, "executor", _Runner)
        flat: Any = self._actors.flatten("rank")
        self._runners = [_Rank(flat.slice(rank=rank)) for rank in range(flat.size())]
        self._tasks: deque[_Task] = deque()
        self._broken: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = threading.Event()
        # Calls are made on a thread of its own, so that submitting never blocks, and the end of a
        # call is noticed while the caller blocks its event loop.
        threading.Thread(target=self._run, name="executor", daemon=True).start()

    def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[R]:
        """Have a function called; return its future at once.

        Raises TypeError for an async function, and RuntimeError after `shutdown` or when the
        executor is broken.
        """
        if not callable(fn):
            raise TypeError(f"an executor calls functions, and {fn!r} is none")
        if inspect.iscoroutinefunction(fn):
            raise TypeError(
                f"{fn.__qualname__} is async: an executor calls plain functions; write an actor "
                "with an async endpoint, or submit one that calls asyncio.run"
            )
        task = _Task(fn, args, kwargs, self._retries)
        with self._lock:
            if self._broken is not None:
                raise RuntimeError("the executor has lost its processes") from self._broken
            if self._closed:
                raise RuntimeError("the executor was shut down, and takes no more functions")
            self._tasks.append(task)
        self._events.put(self._dispatch)
        return task.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more functions; with `wait`, block until those that were submitted have ended.

        With `cancel_futures`, those that have not begun are cancelled. Then the actors of the
        executor end; the processes go on.
        """
        with self._lock:
            self._closed = True
            if cancel_futures:
                dropped = list(self._tasks)
                self._tasks.clear()
            else:
                dropped = []
        for task in dropped:
            task.future.cancel()
            task.future.set_running_or_notify_cancel()
        self._events.put(self._dispatch)
        if wait:
            self._ended.wait()

    # -- on the executor's thread ------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._closed and not self._tasks and not any(r.tasks for r in self._runners)):
            self._events.get()()
        if self._broken is None:
            stopping: Any = self._actors
            stopping.stop()
        self._ended.set()

    def _dispatch(self) -> None:
        """Give functions to the processes that have the least to do."""
        while self._tasks and self._broken is None:
            idle = [r for r in self._runners if not r.lost and len(r.tasks) < _DEPTH]
            if not idle:
                return
            runner = min(idle, key=lambda runner: len(runner.tasks))
            with self._lock:
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            if task.future.running() or task.future.set_running_or_notify_cancel():
                self._start(runner, task)

    def _start(self, runner: _Rank, task: _Task) -> None:
        try:
            call = runner.actor.run.call_one(task.function, task.args, task.kwargs)
        except Exception as error:  # it cannot be sent
            task.future.set_exception(error)
            return
        runner.tasks.append(task)
        ended = functools.partial(self._finish, runner, task, call)
        call.add_done_callback(functools.partial(self._notice, ended))

    def _notice(self, event: Callable[[], None], _: Future[Any]) -> None:
        self._events.put(event)

    def _finish(self, runner: _Rank, task: _Task, call: Future[Any]) -> None:
        """Take the result of a call."""
        error = call.exception()
        if isinstance(error, SupervisionError):
            self._lose(runner)
        runner.tasks.remove(task)
        if error is None:
            task.future.set_result(call.result())
        elif isinstance(error, ActorError):
            task.future.set_exception(_own(error))
        elif isinstance(error, SupervisionError) and (task.tries > 0 or task is not runner.ran):
            task.tries -= task is runner.ran  # the other one had not begun
            with self._lock:
                self._tasks.appendleft(task)
        else:
            task.future.set_exception(error)
        self._dispatch()

    def _lose(self, runner: _Rank) -> None:
        """Give nothing to this process until all run again."""
        if runner.lost:
            return
        runner.lost = True
        runner.ran = runner.tasks[0]
        healthy = self._supervisor.healthy
        healthy.add_done_callback(lambda _: self._events.put(lambda: self._recover(healthy)))

    def _recover(self, healthy: Future[None]) -> None:
        error = healthy.exception()
        if error is None:
            for runner in self._runners:
                runner.lost = False
                runner.ran = None
            self._dispatch()
            return
        with self._lock:
            self._broken = error
            tasks = list(self._tasks)
            self._tasks.clear()
        for task in tasks:
            if task.future.running() or task.future.set_running_or_notify_cancel():
                task.future.set_exception(error)


class _Rank:
    """A process: its actor, and the functions that it has, the oldest first.

    When it is lost, `ran` is the one that it ran.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.tasks: deque[_Task] = deque()
        self.lost = False
        self.ran: _Task | None = None


def _own(error: ActorError) -> BaseException:
    """Return the function's exception; its cause has the remote traceback."""
    own = error.exception
    own.__cause__ = error
    return own


class _Runner(Actor):
    @endpoint
    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return function(*args, **kwargs)
