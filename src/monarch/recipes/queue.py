"""A bounded queue between actors on any host.

The items lie in an actor, in the process where the queue was made or on a process that is named.
A producer of a full queue waits at that actor, and so does a consumer of an empty one. Waiting
callers are served in the order in which they came.

A caller that gives up (a time limit, Ctrl-C, a cancelled task) takes its request back. An item that
was on its way to it is put in again, in front. A consumer that exits, with its process or its host,
loses the items that were handed to it, as with any queue that does not ask for receipts. Consumers
that wait ask again every few seconds, so an item is not kept for one that has exited long ago.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from monarch.actor import (
    Actor,
    ActorError,
    Future,
    ProcMesh,
    concurrent_endpoint,
    context,
    this_proc,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Closed", "Queue"]

T = TypeVar("T")
Ticket: TypeAlias = "tuple[str, int]"
"""The caller of a request, and its number there."""

_numbers = itertools.count()
_ROUND = 5.0  # seconds for which an item may be handed to a consumer that has exited


class Closed(Exception):
    """The queue was closed: it takes no more items, or there are none left."""


class Queue(Generic[T]):
    """A queue of at most `maxsize` items (0: any number), which can be sent to actors.

    Args:
        maxsize: how many items may wait.
        procs: where the items lie: a mesh of one process. None: in this process.

    `put` and `get` block the calling thread; `put_async` and `get_async` are for async endpoints,
    with the same arguments. `close` ends it: iterations over it stop when the items that were put
    before are taken. All copies of a queue, in all processes, are the same queue.

    >>> tasks = Queue(maxsize=2)
    >>> tasks.put("a"); tasks.put("b")
    >>> tasks.put("c", timeout=0.01)
    Traceback (most recent call last):
    queue.Full: the queue has had 2 items for 0.01 s
    >>> tasks.get(), tasks.qsize()
    ('a', 1)
    >>> tasks.close()
    >>> list(tasks)
    ['b']
    >>> tasks.shutdown()

    The items live until `shutdown`, or until the process with them or the maker of the queue exits.
    A method raises `SupervisionError` when the process with the items has exited.
    """

    def __init__(self, maxsize: int = 0, *, procs: ProcMesh | None = None) -> None:
        if maxsize < 0:
            raise ValueError(f"maxsize must not be negative, got {maxsize}; 0 means any number")
        if procs is not None and procs.size() != 1:
            raise ValueError(f"the items lie in one process, and the mesh has {procs.size()}")
        home = this_proc() if procs is None else procs
        self._actor: Any = home.spawn("queue", _Items, maxsize)

    # -- blocking --------------------------------------------------------------------------------

    def put(self, item: T, *, timeout: float | None = None) -> None:
        """Add an item; wait for room, at most `timeout` seconds.

        Raises `queue.Full` then, and `Closed` for a queue that was closed.
        """
        ticket = _ticket()
        call = self._actor.put.call_one(ticket, item, timeout)
        with self._waiting(ticket, call):
            _get(call)

    def put_nowait(self, item: T) -> None:
        """Add an item, or raise `queue.Full`."""
        self.put(item, timeout=0.0)

    def get(self, *, timeout: float | None = None) -> T:
        """Take the oldest item; wait for one, at most `timeout` seconds.

        Raises `queue.Empty` then, and `Closed` for a queue that was closed and is empty.
        """
        return self.get_batch(1, timeout=timeout)[0]

    def get_nowait(self) -> T:
        """Take the oldest item, or raise `queue.Empty`."""
        return self.get(timeout=0.0)

    def get_batch(self, most: int, *, timeout: float | None = None) -> list[T]:
        """Take the oldest items, at least one and at most so many; wait for one as `get` does."""
        for seconds, is_last in _rounds(most, timeout):
            ticket = _ticket()
            call = self._actor.get.call_one(ticket, most, seconds)
            with self._waiting(ticket, call), _unless_empty(is_last, timeout):
                items: list[T] = _get(call)
                return items
        raise AssertionError

    def qsize(self) -> int:
        """Return how many items wait."""
        size: int = _get(self._actor.length.call_one())
        return size

    def close(self) -> None:
        """Take no more items. Producers that wait get `Closed`, as do consumers once it is empty.

        May be called again.
        """
        _get(self._actor.close.call_one())

    def shutdown(self) -> None:
        """End the queue and its actor, with the items that are left.

        Only the script or actor that made the queue may do so; the end of a ``with`` does it. Other
        calls raise `SupervisionError` from then on.
        """
        self._actor.stop().get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items, and take each, until the queue is closed and empty."""
        while True:
            try:
                item = self.get()
            except Closed:
                return
            yield item

    # -- for async endpoints -----------------------------------------------------------------------

    async def put_async(self, item: T, *, timeout: float | None = None) -> None:
        """Do as `put`."""
        ticket = _ticket()
        call = self._actor.put.call_one(ticket, item, timeout)
        with self._waiting(ticket, call):
            await _await(call)

    async def get_async(self, *, timeout: float | None = None) -> T:
        """Do as `get`."""
        return (await self.get_batch_async(1, timeout=timeout))[0]

    async def get_batch_async(self, most: int, *, timeout: float | None = None) -> list[T]:
        """Do as `get_batch`."""
        for seconds, is_last in _rounds(most, timeout):
            ticket = _ticket()
            call = self._actor.get.call_one(ticket, most, seconds)
            with self._waiting(ticket, call), _unless_empty(is_last, timeout):
                items: list[T] = await _await(call)
                return items
        raise AssertionError

    async def __aiter__(self) -> AsyncIterator[T]:
        """Iterate as ``for`` does."""
        while True:
            try:
                item = await self.get_async()
            except Closed:
                return
            yield item

    @contextlib.contextmanager
    def _waiting(self, ticket: Ticket, call: Future[Any]) -> Generator[None, None, None]:
        """Take a request back if its caller gives up, and any items that are on their way to it."""

        def put_back(call: Future[Any]) -> None:
            if call.exception() is None and call.result():
                self._actor.put_back.broadcast(call.result())

        try:
            yield
        except Exception:
            raise
        except BaseException:  # Ctrl-C, or the task of the caller was cancelled
            self._actor.give_up.broadcast(ticket)
            call.add_done_callback(put_back)
            raise


def _rounds(most: int, timeout: float | None) -> Iterator[tuple[float, bool]]:
    """Yield for how long to ask, again and again, and whether that is the last time."""
    if most < 1:
        raise ValueError(f"a batch has at least one item, not {most}")
    until = float("inf") if timeout is None else time.monotonic() + timeout
    while (left := until - time.monotonic()) > _ROUND:
        yield _ROUND, False
    yield left, True


@contextlib.contextmanager
def _unless_empty(is_last: bool, timeout: float | None) -> Generator[None, None, None]:
    """Let a round end without an item, unless it is the last."""
    try:
        yield
    except queue.Empty:
        if is_last:
            raise queue.Empty(f"the queue has been empty for {timeout:g} s") from None


def _ticket() -> Ticket:
    return str(context().actor_instance.actor_id), next(_numbers)


def _get(call: Future[Any]) -> Any:
    """Return the result of a call, or raise the queue's own exception."""
    try:
        return call.get()
    except ActorError as error:
        raise _own(error) from None


async def _await(call: Future[Any]) -> Any:
    try:
        return await call
    except ActorError as error:
        raise _own(error) from None


def _own(error: ActorError) -> Exception:
    cause = error.exception
    return cause if isinstance(cause, (queue.Full, queue.Empty, Closed)) else error


Line: TypeAlias = "deque[tuple[Ticket, asyncio.Future[None]]]"
"""Callers that wait, by their tickets. The first may have its turn already, and has not run yet."""


class _Items(Actor):
    """The items; `_getters` wait while there are none, and `_putters` at the limit."""

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._items: deque[Any] = deque()
        self._getters: Line = deque()
        self._putters: Line = deque()
        self._closed = False

    @concurrent_endpoint
    async def put(self, ticket: Ticket, item: Any, timeout: float | None) -> None:
        if not await self._turn(self._putters, self._has_room, ticket, timeout):
            raise queue.Full(f"the queue has had {self._maxsize} items for {timeout:g} s")
        if not self._closed:
            self._items.append(item)
        self._wake()
        if self._closed:
            raise Closed("the queue was closed, and takes no more items")

    @concurrent_endpoint
    async def get(self, ticket: Ticket, most: int, timeout: float | None) -> list[Any]:
        if not await self._turn(self._getters, self._has_item, ticket, timeout):
            raise queue.Empty
        items = [self._items.popleft() for _ in range(min(most, len(self._items)))]
        self._wake()
        if not items:
            raise Closed("the queue was closed, and is empty")
        return items

    @concurrent_endpoint
    async def give_up(self, ticket: Ticket) -> None:
        """End the wait of a caller, as its time limit would."""
        for line in (self._getters, self._putters):
            for number, turn in line:
                if number == ticket and not turn.done():
                    turn.cancel()

    @concurrent_endpoint
    async def put_back(self, items: list[Any]) -> None:
        self._items.extendleft(reversed(items))
        self._wake()

    @concurrent_endpoint
    async def length(self) -> int:
        return len(self._items)

    @concurrent_endpoint
    async def waiting(self) -> tuple[int, int]:
        """Return how many callers wait for items, and how many for room."""
        return len(self._getters), len(self._putters)

    @concurrent_endpoint
    async def close(self) -> None:
        self._closed = True
        self._wake()

    def _has_room(self) -> bool:
        return self._closed or not 0 < self._maxsize <= len(self._items)

    def _has_item(self) -> bool:
        return self._closed or bool(self._items)

    async def _turn(
        self, line: Line, is_ready: Callable[[], bool], ticket: Ticket, timeout: float | None
    ) -> bool:
        """Wait in the line until it is this caller's turn, and return whether it is.

        A caller that has its turn stays in the line until it runs, so that no later one comes
        before it.
        """
        if not line and is_ready():
            return True
        if timeout is not None and timeout <= 0:
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = ticket, turn
        line.append(place)
        try:
            await asyncio.wait([turn], timeout=timeout)
            return turn.done() and not turn.cancelled()
        finally:
            line.remove(place)
            if not turn.done() or turn.cancelled():
                self._wake()

    def _wake(self) -> None:
        """Give the first in each line its turn, if there is something for it."""
        for line, is_ready in (self._getters, self._has_item), (self._putters, self._has_room):
            if line and is_ready() and not line[0][1].done():
                line[0][1].set_result(None)
