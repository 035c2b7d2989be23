"""OrderMerge: in-order delivery when one sender's direct messages and casts take two paths.

Between hosts a message to one proc goes through a tunnel and a cast goes down a tree, and either
path may be faster. Still, messages of one sender must reach each receiver in the order of sending.
Numbering every message would cost all programs something, and the common ones, which send a steady
stream of one kind, do not need it. So only a *change* of the path is marked:

* The casts of one sender are numbered, and each carries the number of the previous cast to the same
  host (`Line`). Casts may take different paths, too, as the tree depends on the set of hosts.
* A **mark** with number n in a tunnel stands where cast n was sent: what follows it in the tunnel
  waits for the casts up to n. The sender writes one before the first message after a cast.
* If something was sent through the tunnel between the last mark and a cast, the cast is *tied* for
  that receiver: the sender writes the cast's mark at once, and the cast waits for it.

Every wait ends. A tied cast waits for its own mark, and before that mark there are only marks of
earlier casts; a mark waits for casts up to its own number. By induction on the number both arrive,
or the tunnel or the host is lost, and with it all that waits.

Numbers of a sender only grow. A new incarnation of an agent starts anew, with links of its own.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["Line", "OrderMerge"]

T = TypeVar("T")
C = TypeVar("C")


class Line(Generic[C]):
    """The casts of one sender at one host, put in order.

    >>> line = Line()
    >>> line.cast(7, 4, "second"), line.cast(4, 0, "first")
    ([], [(4, 'first'), (7, 'second')])
    >>> line.reached
    7
    """

    __slots__ = ("_early", "reached")

    def __init__(self) -> None:
        self.reached = 0
        """The number of the last cast that was handed on."""
        self._early: dict[int, tuple[int, C]] = {}  # by the number of the previous cast

    def cast(self, number: int, previous: int, cast: C) -> list[tuple[int, C]]:
        """Accept a cast; return the casts whose turn it is now.

        `previous` is 0 for the first cast.
        """
        self._early[previous] = number, cast
        ready: list[tuple[int, C]] = []
        while (found := self._early.pop(self.reached, None)) is not None:
            self.reached = found[0]
            ready.append(found)
        return ready


class OrderMerge(Generic[T]):
    """The point where the casts of one sender are merged into its tunnel to one receiver.

    Each method returns what the receiver gets now, in order. The argument `reached` is that of the
    sender's `Line`.

    >>> merge = OrderMerge()
    >>> merge.message("a"), merge.mark(1, 0), merge.message("b")
    (['a'], [], [])
    >>> merge.blocked
    True
    >>> merge.cast(1, tied=True, item="cast 1"), merge.advance(1)
    (['cast 1'], ['b'])
    """

    __slots__ = ("_casts", "_marked", "_tunnel")

    def __init__(self) -> None:
        self._tunnel: deque[tuple[int, T | None]] = deque()  # (mark, None) or (0, message)
        self._casts: deque[tuple[int, T]] = deque()  # (its mark if tied, else 0; the cast)
        self._marked = 0  # the last mark that was reached

    @property
    def blocked(self) -> bool:
        """Whether the tunnel waits for a cast."""
        return bool(self._tunnel)

    @property
    def idle(self) -> bool:
        """Whether neither messages nor casts wait."""
        return not self._tunnel and not self._casts

    def message(self, item: T) -> list[T]:
        """Accept a message from the tunnel."""
        if not self._tunnel:
            return [item]
        self._tunnel.append((0, item))
        return []

    def mark(self, number: int, reached: int) -> list[T]:
        """Accept a mark from the tunnel."""
        self._tunnel.append((number, None))
        return self.advance(reached)

    def cast(self, number: int, *, tied: bool, item: T) -> list[T]:
        """Accept a cast for this receiver, whose turn it is among the casts."""
        if not self._casts and not (tied and number > self._marked):
            return [item]
        self._casts.append((number if tied else 0, item))
        return []

    def advance(self, reached: int) -> list[T]:
        """Report that casts up to `reached` have had their turn."""
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
