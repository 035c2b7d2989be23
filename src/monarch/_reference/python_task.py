"""`PythonTask`: an operation of the reference as an object that is started, or awaited.

Operations of this engine are futures, and most have begun when the program gets them. verl starts
the stop of a mesh in a finaliser, by ``mesh.stop()._take_inner().spawn_handle()``, and waits for it
later.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from monarch.actor import Future

__all__ = ["PythonTask"]

R = TypeVar("R")


class PythonTask(Generic[R]):
    """An operation that is not observed yet.

    >>> async def work(): return 3
    >>> PythonTask.from_coroutine(work()).spawn_handle().get(timeout=60)
    3
    """

    __slots__ = ("_future",)

    def __init__(self, future: Future[R]) -> None:
        self._future = future

    @staticmethod
    def from_coroutine(coroutine: Coroutine[Any, Any, R]) -> PythonTask[R]:
        """Return a task that runs a coroutine when it is started, or awaited."""
        return PythonTask(Future._from_coro(coroutine))

    def spawn_handle(self) -> Future[R]:
        """Start the operation, without blocking; return the future of its result."""
        self._future._begin()
        return self._future

    def __await__(self) -> Generator[Any, None, R]:
        return self._future.__await__()
