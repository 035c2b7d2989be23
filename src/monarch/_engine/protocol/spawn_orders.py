"""Spawn orders: requests to start procs on many hosts go down the tree, and each takes effect once.

An agent that spawns on more hosts than the fan-out sends one cast, whose content is for agents:
each host takes its *order* out of it and passes the rest on (`protocol.cast`). So the messages of
the sender grow with the fan-out, not with the hosts. But the sender also has direct messages for
each of these hosts (notices, requests to kill, the data of links to the new procs), and either path
may be faster. This module has the two ends of one session between agents, and makes the result the
same as if all orders were direct messages. The rules:

* The orders of a session are numbered 1, 2, 3, ..., and each has a place: the number of direct
  messages that were sent before it. The receiver carries an order out in the order of the numbers,
  and after these messages.
* The reverse costs no message per host: an order is *open* until its receiver has confirmed it, and
  the sender puts a copy of all open ones before the next direct message. Confirmations take
  milliseconds, and meanwhile there is rarely a direct message: the actors are spawned by a cast.
* A copy has the number of its order, and the receiver ignores numbers that it has reached. So each
  order is carried out once, and a sender may send copies as often as it likes: it does so, too,
  when a confirmation is late, as a host in the middle of the tree may be lost or slow.

Each wait ends: what is before an order is a direct message, or an order that has arrived if it is
confirmed, and is sent directly in the end if it is not.

Rejected: a mark in the direct messages, after which they wait for the order (`order_merge`). They
would wait for a lost host in the middle, too.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

__all__ = ["Arrivals", "Orders", "Place"]

T = TypeVar("T")


class Place(NamedTuple):
    """The place of an order among what the sender sent in this session."""

    number: int
    said: int
    """How many direct messages were sent before it."""


class Orders(Generic[T]):
    """The sender's end of a session.

    >>> orders = Orders()
    >>> orders.say(), orders.send("a"), orders.send("b")
    ([], Place(number=1, said=1), Place(number=2, said=1))
    >>> orders.confirm(1)
    >>> orders.say()
    [(2, 'b')]
    """

    __slots__ = ("_number", "_open", "_said")

    def __init__(self) -> None:
        self._number = 0
        self._said = 0
        self._open: dict[int, T] = {}

    def send(self, order: T) -> Place:
        """Number an order that goes down the tree; return its place."""
        self._number += 1
        self._open[self._number] = order
        return Place(self._number, self._said)

    def confirm(self, number: int) -> None:
        """Record that the order has arrived, by whatever path."""
        self._open.pop(number, None)

    def say(self, *, ordered: bool = True) -> list[tuple[int, T]]:
        """Count a direct message; return the orders, by number, whose copies go before it.

        The copies are direct messages and are counted here. A message that is not `ordered` has
        nothing to do with procs, and may overtake orders.
        """
        copies = self.copies() if ordered else []
        self._said += 1
        return copies

    def copies(self) -> list[tuple[int, T]]:
        """Return the open orders, by number, to be sent directly now."""
        copies = list(self._open.items())
        self._open.clear()
        self._said += len(copies)
        return copies


class Arrivals(Generic[T]):
    """The receiver's end of a session.

    Each method returns the orders to carry out now.

    >>> arrivals = Arrivals()
    >>> arrivals.by_tree(Place(2, 1), "b"), arrivals.by_tree(Place(1, 0), "a")
    ([], ['a'])
    >>> arrivals.heard()
    ['b']
    >>> arrivals.by_copy(2, "b")
    []
    """

    __slots__ = ("_early", "_heard", "_reached")

    def __init__(self) -> None:
        self._heard = 0
        self._reached = 0  # the number of the last order that was carried out
        self._early: dict[int, tuple[int, T]] = {}

    def by_tree(self, place: Place, order: T) -> list[T]:
        """Accept an order from the tree."""
        if place.number > self._reached:
            self._early[place.number] = place.said, order
        return self._ready()

    def by_copy(self, number: int, order: T) -> list[T]:
        """Accept the copy of an order, a direct message; report it with `heard` afterwards.

        The earlier orders have all arrived: open ones were copied before it.
        """
        if number <= self._reached:
            return []
        self._early.pop(number, None)
        self._reached = number
        return [order]

    def heard(self) -> list[T]:
        """Report that one more direct message was handled."""
        self._heard += 1
        return self._ready()

    def _ready(self) -> list[T]:
        ready: list[T] = []
        while (found := self._early.get(self._reached + 1)) and found[0] <= self._heard:
            self._reached += 1
            del self._early[self._reached]
            ready.append(found[1])
        return ready
