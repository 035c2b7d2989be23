"""`progress`: a bar for a loop over results, or for what all ranks do.

It shows how many, how fast, how long it will take, how many failed. See `progress_meter` for where.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from monarch.recipes.progress_meter import Meter
from monarch.recipes.rank_progress import ProgressBar, shared_bar

__all__ = ["progress"]

T = TypeVar("T")


class progress(Generic[T]):  # noqa: N801 - used like a function
    """Iterate over `items`, and show how far the loop is; or, without items, show one bar of ranks.

    Args:
        items: what is iterated over: results, futures, or an asynchronous iterable of them, for
            ``async for``.
        label: a text before the numbers.
        total: how many items there will be; default: ``len(items)``, if it has a length. Without a
            total the time that is left is not known.
        every: seconds between two lines, where there is neither a terminal nor a notebook.

    An item counts when the loop asks for the next one. An item that is a future and has an error by
    then, or a cancellation, counts as failed. An error of the iteration itself is raised as without
    the bar. The loop may be left at any time. Standard output is never written to.

    In a terminal the bar needs ``rich`` (``pip install 'pymonarch[progress]'``), and raises
    ModuleNotFoundError without it.

    >>> sum(progress(range(5), "squares"))
    10

    Without items it is a context manager. Its value, a `ProgressBar`, can be sent to actors, which
    advance the bar from any process:

    >>> from monarch.actor import Actor, endpoint, this_host
    >>> class Trainer(Actor):
    ...     @endpoint
    ...     def train(self, bar, batches):
    ...         return sum(bar.track(batches))
    >>> procs = this_host().spawn_procs({"gpus": 2})
    >>> trainers = procs.spawn("trainers", Trainer)
    >>> with progress(label="batches", total=8) as bar:
    ...     trainers.train.call(bar, range(4)).get().values()
    [6, 6]
    >>> procs.stop().get()

    The end of the ``with`` waits for counts that processes have not sent yet, at most a second. If
    a process is lost, the bar shows what it had done by its last message, at most a tenth of a
    second before. An error in the block is raised, and leaves the bar as it is.
    """

    @overload
    def __init__(
        self,
        items: Iterable[T] | AsyncIterable[T],
        label: str = "",
        *,
        total: int | None = None,
        every: float = 10.0,
    ) -> None: ...

    @overload
    def __init__(
        self: progress[Any],
        items: None = None,
        label: str = "",
        *,
        total: int | None = None,
        every: float = 10.0,
    ) -> None: ...

    def __init__(
        self,
        items: Iterable[T] | AsyncIterable[T] | None = None,
        label: str = "",
        *,
        total: int | None = None,
        every: float = 10.0,
    ) -> None:
        self._items: Any = items
        given: object = items  # mypy takes the types for the only ones
        if total is None and isinstance(given, Sized):
            total = len(given)
        self._meter = functools.partial(Meter, total, label, every)
        self._end: Any = None

    def __iter__(self) -> Iterator[T]:
        self._check(has_items=True)
        with self._meter() as meter:
            for item in self._items:
                yield item
                meter.count(item)

    async def __aiter__(self) -> AsyncIterator[T]:
        self._check(has_items=True)
        with self._meter() as meter:
            async for item in self._items:
                yield item
                meter.count(item)

    def __enter__(self) -> ProgressBar:
        self._check(has_items=False)
        bar, self._end = shared_bar(self._meter())
        return bar

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._end(complete=kind is None)

    def _check(self, *, has_items: bool) -> None:
        if has_items and self._items is None:
            raise TypeError(
                "progress without items is a context manager: with progress(total=...) as bar"
            )
        if not has_items and self._items is not None:
            raise TypeError(
                "progress with items is iterated over; for a bar of ranks leave out the items, "
                "and use bar.track(items)"
            )
