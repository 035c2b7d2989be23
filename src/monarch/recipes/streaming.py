"""`stream`: iterate over what an endpoint sends while it runs.

The endpoint gets a port, and sends items to it. The iteration waits for the next item and for the
end of the call at the same time, so an actor that is lost ends it with its error. Messages of one
sender arrive in order, and the answer is the last: when the call has ended, all items are here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

from monarch.actor import Channel, Future, Port
from monarch.recipes.completion import first

__all__ = ["stream"]

T = TypeVar("T")


class stream(Generic[T]):  # noqa: N801 - it is called as a function
    """Iterate, by ``for`` or ``async for`` and once, over the items that an endpoint sends.

    Args:
        call: called with a port, at once; calls one endpoint with it, and returns the future.
        timeout: seconds that each item may take; then TimeoutError is raised. None: no limit.

    Attributes:
        call: the future of the call.

    An error of the endpoint, and the loss of its actor, is raised after the items that came before.
    An iteration that is left early cancels the call (see `Future.cancel`); so does a time limit. A
    consumer that is slower than the endpoint makes it wait in `Port.send`.

    >>> from monarch.actor import Actor, endpoint, this_host
    >>> class Counter(Actor):
    ...     @endpoint
    ...     def count(self, port, n):
    ...         for i in range(n): port.send(i)
    ...         return "done"
    >>> procs = this_host().spawn_procs()
    >>> counter = procs.spawn("counter", Counter)
    >>> counting = stream(lambda port: counter.count.call_one(port, 3))
    >>> list(counting), counting.call.get()
    ([0, 1, 2], 'done')
    >>> procs.stop().get()

    Items that another actor sends to the port, or a thread that outlives the call, may be lost.
    """

    def __init__(
        self, call: Callable[[Port[T]], Future[Any]], *, timeout: float | None = None
    ) -> None:
        port, self._receiver = Channel[T].open()
        self._timeout = timeout
        self.call = call(port)

    def __iter__(self) -> Iterator[T]:
        """Wait for items in this thread, which they block."""
        try:
            item = self._receiver.recv()
            while True:
                ended = self.call.done()
                futures: list[Future[Any]] = [item] if ended else [item, self.call]
                first(futures, timeout=0 if ended else self._timeout)
                if item.done():
                    yield item.get()
                    item = self._receiver.recv()
                elif ended:
                    break
                elif not self.call.done():
                    raise TimeoutError(f"no item within {self._timeout:g} s")
            self.call.get()
        finally:
            self.call.cancel()

    async def __aiter__(self) -> AsyncIterator[T]:
        """Wait for items on the event loop."""
        try:
            item = self._receiver.recv()
            while True:
                ended = self.call.done()
                futures: list[Any] = [item] if ended else [item, self.call]
                await asyncio.wait(
                    futures,
                    timeout=0 if ended else self._timeout,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if item.done():
                    yield await item
                    item = self._receiver.recv()
                elif ended:
                    break
                elif not self.call.done():
                    raise TimeoutError(f"no item within {self._timeout:g} s")
            await self.call
        finally:
            self.call.cancel()
