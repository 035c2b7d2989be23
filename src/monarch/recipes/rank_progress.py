"""A progress bar of the script that processes advance: `ProgressBar`, and its two sides.

In the process that made it, a bar is a `_Total`: a sum and a thread that shows it. Everywhere else
it is a `_Sender`, which adds up what is advanced there and sends the sum, at once and then at most
ten times a second. At its end a bar asks the processes that have sent anything for the rest.

Counts go as requests without an answer (`_spi.tell`), which neither wait nor need an actor. The
counts of a process that is lost are those that it had sent.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from monarch import _spi
from monarch.recipes.progress_meter import PAUSE, Meter, thread_of_cell

__all__ = ["ProgressBar", "shared_bar"]

T = TypeVar("T")
_ADD = "progress"
_FLUSH = "progress rest"
_LOOK = 1.0  # seconds between two draws of a bar that does not advance, for the time
_REST = 1.0  # seconds that the end waits for processes


class ProgressBar:
    """A bar of the script, to which any process may add; ``with progress(...)`` makes it.

    It can be sent to actors, and used by any number of threads and processes.
    """

    def __init__(self, side: _Total | _Sender) -> None:
        self._side = side

    def advance(self, count: int = 1) -> None:
        """Add to what is done. Does not block, and raises nothing if the script has ended.

        A process sends its sums at most ten times a second, so a call costs about a microsecond.
        After the end of the ``with`` it has no effect.
        """
        self._side.add(count)

    def track(self, items: Iterable[T] | AsyncIterable[T]) -> Tracked[T]:
        """Iterate over `items`, by ``for`` or ``async for``.

        An item counts when the next one is asked for. Works in any process: what all of them
        iterate over is one bar.
        """
        return Tracked(self, items)

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, self._side.name()


class Tracked(Generic[T]):
    """What `ProgressBar.track` returns."""

    def __init__(self, bar: ProgressBar, items: Iterable[T] | AsyncIterable[T]) -> None:
        self._bar = bar
        self._items: Any = items

    def __iter__(self) -> Iterator[T]:
        for item in self._items:
            yield item
            self._bar.advance()

    async def __aiter__(self) -> AsyncIterator[T]:
        async for item in self._items:
            yield item
            self._bar.advance()


def shared_bar(meter: Meter) -> tuple[ProgressBar, Callable[..., None]]:
    """Show a bar; return it, and the function that ends it (see `_Total.end`)."""
    total = _Total(meter)
    total.begin()
    return ProgressBar(total), total.end


# -- the process of the bar ------------------------------------------------------------------------


class _Total:
    """The sum of all processes, and the thread that shows it."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._over = threading.Event()
        self._ident = next(_idents)
        self._peers: set[int] = set()  # processes that have sent counts
        self._thread = thread_of_cell(self._run)

    def name(self) -> tuple[int, int]:
        """Return what finds this bar from any process; from now on, others may add to it."""
        if not self._over.is_set():
            _totals[self._ident] = self
        _spi.serve(_ADD, _on_add)
        return _spi.own_uid(), self._ident

    def begin(self) -> None:
        self._meter.__enter__()
        self._thread.start()

    def add(self, count: int, peer: int | None = None) -> None:
        with self._lock:
            if not self._over.is_set():
                self._meter.done += count
                if peer is not None:
                    self._peers.add(peer)
        self._changed.set()

    def end(self, *, complete: bool) -> None:
        """Show the bar for the last time; if `complete`, with what processes have not sent yet."""
        try:
            if complete:
                self._collect()
        finally:
            with self._lock:
                self._over.set()
            _totals.pop(self._ident, None)
            self._changed.set()
            self._thread.join()
            self._meter.__exit__(None, None, None)

    def _collect(self) -> None:
        until = time.monotonic() + _REST
        with self._lock:
            peers = list(self._peers)
        asked = [_spi.ask(peer, _FLUSH, timeout=_REST) for peer in peers]
        for answer in asked:
            _spi.settled(answer, max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while not self._over.wait(PAUSE):
            self._changed.wait(_LOOK)
            self._changed.clear()
            if not self._over.is_set():
                self._meter.show()


_idents = itertools.count(1)
_totals: dict[int, _Total] = {}


def _on_add(request: _spi.Request) -> None:
    ident, count = json.loads(request.body)
    total = _totals.get(ident)
    if total is not None:  # otherwise it is over
        total.add(int(count), request.peer)


# -- other processes -------------------------------------------------------------------------------


class _Sender:
    """What this process adds to a bar of process `uid`."""

    def __init__(self, uid: int, ident: int) -> None:
        self._uid = uid
        self._ident = ident
        self._lock = threading.RLock()
        self._count = 0
        self._next = 0.0  # when the next message may be sent
        self._is_waiting = False

    def name(self) -> tuple[int, int]:
        return self._uid, self._ident

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count
            if self._is_waiting:
                return
            left = self._next - time.monotonic()
            if left > 0:
                self._is_waiting = True
                _spi.call_later(left, self._send_late)
            else:
                self.send()

    def send(self) -> None:
        with self._lock:
            count, self._count = self._count, 0
            if count:
                self._next = time.monotonic() + PAUSE
                _spi.tell(self._uid, _ADD, json.dumps([self._ident, count]).encode())

    def _send_late(self) -> None:
        with self._lock:
            self._is_waiting = False
            self.send()


# A sender with counts is kept by its timer.
_senders: weakref.WeakValueDictionary[tuple[int, int], _Sender] = weakref.WeakValueDictionary()
_senders_lock = threading.Lock()


def _on_flush(request: _spi.Request) -> None:
    """Send what is left to the bars of the process that asks."""
    for (uid, _), sender in list(_senders.items()):
        if uid == request.peer:
            sender.send()
    request.answer()


def _find(uid: int, ident: int) -> ProgressBar:
    """Return a bar in the process that receives it."""
    if uid == _spi.own_uid():
        total = _totals.get(ident)
        return ProgressBar(_Sender(uid, ident) if total is None else total)
    with _senders_lock:
        if not _senders:
            _spi.serve(_FLUSH, _on_flush)
        return ProgressBar(_senders.setdefault((uid, ident), _Sender(uid, ident)))
