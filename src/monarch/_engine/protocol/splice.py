"""One order out of two paths: what a sender sends to one receiver, and what it casts to many.

Between hosts a message to one proc goes through a tunnel, a cast down a tree, and either may be the
faster one. What a sender sent must reach each receiver in the order of sending all the same. To
number every message would cost all of them something, and the common programs, which send a steady
stream of one kind, need nothing. So only a *change* of the path is marked:

* Casts of one sender are numbered, and each says which was the one before it to the same host
  (`Line`): they may come by different paths, too, as the tree depends on who is in the cast.
* A **mark** with number n in a tunnel stands where cast n was sent: what follows it in the tunnel
  waits for the casts up to n. The sender writes one before the first message after a cast.
* A cast before which something was sent through the tunnel, since the last mark, is *tied* for that
  receiver: the sender writes its mark at once, and the cast waits for it.

Nothing waits for ever: a tied cast waits for its own mark, before which there are only marks of
earlier casts, and a mark waits for casts up to its own. By induction on the number both come, or
the tunnel or the host is lost, and with it all that waits.

Numbers of a sender only grow; an agent that is made anew begins anew, with links of its own.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["Line", "Splice"]

T = TypeVar("T")
C = TypeVar("C")


class Line(Generic[C]):
    """The casts of one sender at one host, in their order.

    >>> line = Line()
    >>> line.cast(7, 4, "second"), line.cast(4, 0, "first")
    ([], [(4, 'first'), (7, 'second')])
    >>> line.reached
    7
    """

    __slots__ = ("_early", "reached")

    def __init__(self) -> None:
        self.reached = 0
        """The last cast that had its turn."""
        self._early: dict[int, tuple[int, C]] = {}  # by the number of the one before

    def cast(self, number: int, previous: int, cast: C) -> list[tuple[int, C]]:
        """A cast has come; those whose turn it is now. `previous`: 0 for the first."""
        self._early[previous] = number, cast
        ready: list[tuple[int, C]] = []
        while (found := self._early.pop(self.reached, None)) is not None:
            self.reached = found[0]
            ready.append(found)
        return ready


class Splice(Generic[T]):
    """Where the casts of one sender join its tunnel to one receiver.

    Each method gives what goes to the receiver now, in order. `reached` is the sender's `Line`'s.

    >>> splice = Splice()
    >>> splice.message("a"), splice.mark(1, 0), splice.message("b")
    (['a'], [], [])
    >>> splice.blocked
    True
    >>> splice.cast(1, tied=True, item="cast 1"), splice.advance(1)
    (['cast 1'], ['b'])
    """

    __slots__ = ("_casts", "_marked", "_tunnel")

    def __init__(self) -> None:
        self._tunnel: deque[tuple[int, T | None]] = deque()  # a mark and None, or 0 and a message
        self._casts: deque[tuple[int, T]] = deque()  # the number of its mark if it is tied, else 0
        self._marked = 0  # the last mark that was passed

    @property
    def blocked(self) -> bool:
        """Whether the tunnel waits for a cast."""
        return bool(self._tunnel)

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._tunnel and not self._casts

    def message(self, item: T) -> list[T]:
        """The tunnel brought a message."""
        if not self._tunnel:
            return [item]
        self._tunnel.append((0, item))
        return []

    def mark(self, number: int, reached: int) -> list[T]:
        """The tunnel brought a mark."""
        self._tunnel.append((number, None))
        return self.advance(reached)

    def cast(self, number: int, *, tied: bool, item: T) -> list[T]:
        """It is the turn of a cast that this receiver gets."""
        if not self._casts and not (tied and number > self._marked):
            return [item]
        self._casts.append((number if tied else 0, item))
        return []

    def advance(self, reached: int) -> list[T]:
        """Casts up to `reached` have had their turn."""
        ready: list[T] = []
        tunnel, casts = self._tunnel, self._casts
        while True:
            while casts and casts[0][0] <= self._marked:
                ready.append(casts.popleft()[1])
            if not tunnel:
                return ready
            number, item = tunnel[0]
            if number > self._marked:
                self._marked = number
            elif number > reached:
                return ready
            else:
                tunnel.popleft()
                if item is not None:
                    ready.append(item)
