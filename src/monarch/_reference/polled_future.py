"""`Future`: the old future of the tensor engine, which polls its client while it waits.

Fetches return `monarch.actor.Future`. This class is for programs with a client of their own, which
sets results while it handles its messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["Future", "stream"]

R = TypeVar("R")


class Future(Generic[R]):
    """A result that a client sets; see the module.

    Args:
        client: an object whose ``handle_next_message(timeout)`` handles a message that may set the
            result; None if another thread sets it.

    >>> future = Future(None)
    >>> future.add_callback(lambda done: print("result", done.result()))
    >>> future.set_result(3)
    result 3
    >>> future.done(), future.exception()
    (True, None)
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[Future[R]], Any]] = []
        self._is_set = False
        self._value: Any = None
        self._error: BaseException | None = None

    def set_result(self, value: R) -> None:
        """Set the result, and call the callbacks. Raises RuntimeError if there is one."""
        self._settle(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Set the exception that `result` raises, in the same way."""
        self._settle(None, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        with self._changed:
            if self._is_set:
                raise RuntimeError("this future has a result already")
            self._is_set, self._value, self._error = True, value, error
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(self)

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result, and return it or raise its exception.

        Raises TimeoutError after `timeout` seconds.
        """
        self._wait(timeout)
        if self._error is not None:
            raise self._error
        value: R = self._value
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the result; return its exception, or None if it has none."""
        self._wait(timeout)
        return self._error

    def done(self) -> bool:
        """Return whether there is a result; handles a message of the client that is there."""
        if not self._is_set and self._client is not None:
            self._client.handle_next_message(0)
        return self._is_set

    def add_callback(self, callback: Callable[[Future[R]], Any]) -> None:
        """Call `callback(future)` when there is a result; at once if there is one."""
        with self._changed:
            if not self._is_set:
                self._callbacks.append(callback)
                return
        callback(self)

    def _wait(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            rest = None if end is None else end - time.monotonic()
            if rest is not None and rest <= 0:
                raise TimeoutError(f"no result within {timeout:g} s")
            if self._client is not None:
                self._client.handle_next_message(rest)
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._is_set, rest)


def stream(futures: Sequence[Future[R]], timeout: float | None = None) -> Iterator[Future[R]]:
    """Yield futures as they get their results.

    Raises TimeoutError if one has none within `timeout` seconds from the call of the iterator.
    """
    end = None if timeout is None else time.monotonic() + timeout
    left = list(futures)
    while left:
        ready = [future for future in left if future.done()]
        if not ready:
            left[0]._wait(None if end is None else max(0.0, end - time.monotonic()))
            continue
        left = [future for future in left if future not in ready]
        yield from ready
