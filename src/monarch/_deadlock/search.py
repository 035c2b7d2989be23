"""Deadlock detection: actors of several processes that wait for each other in a cycle.

An actor handles one message at a time. While it *waits* it handles no message; it waits when its
thread, or the task that serves its mailbox, is blocked on an answer without a time limit. Waits are
the nodes of a graph; a wait has an edge to every wait of an actor whose answer it needs. A wait on
a cycle of this graph can never end with a value, and no actor in the cycle can notice that. An
actor that calls itself is a cycle of one and needs no rule of its own.

Young waits are left alone. A wait that has become long (a fraction of a second; the caller of
`Deadlocks.begin` decides) is examined in two steps:

1. *Chase* (Chandy, Misra and Haas 1983). The wait sends a probe to every actor that owes it an
   answer. A waiting actor that receives the probe appends its own wait and passes the probe on. A
   probe that returns to its initiator has seen a cycle, but has seen each wait at a different time.
2. *Proof*. The initiator sends the cycle back along the path of the probe: from each wait to the
   one that waits for it, **over the link on which the answer would travel**. Each actor checks that
   the wait is still the one that the probe met and still has no answer, and passes the message on.
   When it returns to the initiator, the cycle is a deadlock.

Why that is a proof. Take the moment at which the probe returned. Every wait of the cycle had begun
(the probe met it) and had not ended (the proof met it later, and a wait that has ended never
resumes), so at that moment all of them existed. No answer was in transit: links deliver in order,
so an answer that was sent before the proof would have arrived before it and ended the wait. Every
actor that could send an answer was blocked, and stays blocked until the cycle is broken. No clocks
are compared, and the length of a wait is not used as evidence. Only events other than an answer can
free such a cycle: an actor in it dies, a task is cancelled, another rank of a mesh call fails, or
another cycle that shares a wait has just been broken there. If one of these happens while the proof
is in transit, one wait more than necessary fails, and it would not have succeeded.

One victim per cycle, without an election. A wait passes on a probe only if it is smaller than the
initiator (Chang and Roberts 1979). So only the probe of the largest wait of a cycle completes the
cycle, and that wait is broken. A wait that receives the probe of a smaller one sends its own
instead (at most every `PAUSE` seconds), since the wait that closes a cycle last need not be the
largest. Hence no probe ever needs to be repeated. They are repeated nevertheless, at growing
intervals, as a second line of defence.

A wait for several answers, as for a call to a mesh, needs all of them. The first error would end
it, but a program that relies on that is broken as well. A wait that any one of several answers
could end is not a wait in this sense: deadlocks of such waits are knots, not cycles, and are not
found.

Requirements on the driver: links deliver in order, and the probe for a call goes over the link of
the call. An answer that can be sent although the actor waits (by a concurrent endpoint that has
begun, or to an explicit port) is not owed by the waiting actor (`Wait.owes`, `Wait.unanswered`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

__all__ = ["Break", "Call", "Chase", "Deadlocks", "Node", "Probe", "Proof", "Story", "Wait"]

PAUSE = 0.1
"""The shortest time between two probes of one wait, in seconds."""

_FIRST_REPEAT = 1.0
_LAST_REPEAT = 60.0

Story = tuple[str, str, str]  # the waiting actor, the call, the place in the program


class Call(NamedTuple):
    """A call that is not answered yet."""

    link: object  # the link of the call and of its answer
    actor: int  # the callee: a mesh, of which a process has at most one rank
    port: int  # the port that receives the answer


class Wait(Protocol):
    """A wait of an actor, as its own process sees it."""

    actor: int
    number: int  # identifies this wait within the process
    story: Story

    @property
    def standing(self) -> bool:
        """Whether the wait is still in progress. Once false, it stays false."""
        ...

    def unanswered(self) -> Iterable[Call]:
        """Return the calls whose answers the wait needs: every one of them, not any one."""
        ...

    def owes(self, link: object, port: int) -> bool:
        """Whether the call that came over `link` can be answered only after this wait has ended."""
        ...


class Node(NamedTuple):
    """A wait, named uniquely in the cluster; nodes are ordered."""

    proc: int
    actor: int
    wait: int


class Probe(NamedTuple):
    """The message of a chase or a proof.

    `path` has the waits met so far. On the way back `stories` describes them, the last wait first.
    """

    round: int
    path: tuple[Node, ...]
    stories: tuple[Story, ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(self, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes | bytearray) -> Probe:
        """Return the probe encoded in `data`.

        Raises ValueError, TypeError or LookupError if the data is not a probe.

        >>> probe = Probe(1, (Node(7, 8, 9), Node(7, 5, 2)), (("a", "b.f()", "p.py:1"),))
        >>> Probe.from_bytes(probe.to_bytes()) == probe
        True
        """
        count, path, stories = json.loads(data)
        probe = Probe(
            _whole(count),
            tuple(Node(*(_whole(number) for number in node)) for node in path),
            tuple((str(who), str(call), str(place)) for who, call, place in stories),
        )
        if len(probe.stories) >= len(probe.path):
            raise ValueError("a probe with too few waits")
        return probe


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


class Chase(NamedTuple):
    """Effect: send the probe along each of these calls, to the actor that is to answer it."""

    calls: list[Call]
    probe: Probe


class Proof(NamedTuple):
    """Effect: send the probe back to `actor`, over the link of its call."""

    link: object
    actor: int
    probe: Probe


class Break(NamedTuple):
    """Effect: end this wait with an error.

    The stories in `cycle` begin with this wait's; each wait waits for the next.
    """

    wait: Wait
    cycle: tuple[Story, ...]


Effect = Chase | Proof | Break


class _Heard(NamedTuple):
    """The last probe of one initiator that a wait passed on, and the call along which it came."""

    round: int
    link: object
    port: int


class _Book:
    """The state kept for one long wait of this process."""

    __slots__ = ("due", "heard", "node", "repeat", "round", "sent", "wait")

    def __init__(self, node: Node, wait: Wait) -> None:
        self.node = node
        self.wait = wait
        self.round = 0
        self.sent = 0.0
        self.due = 0.0
        self.repeat = _FIRST_REPEAT
        self.heard: dict[Node, _Heard] = {}


class Deadlocks:
    """The long waits of one process. Takes inputs and returns effects, in order.

    Args:
        proc: the process, as it is named in nodes.
    """

    def __init__(self, proc: int) -> None:
        self.deadline: float | None = None
        """When `tick` must be called next; None while there is no wait."""
        self._proc = proc
        self._books: dict[int, list[_Book]] = {}

    def begin(self, now: float, wait: Wait) -> list[Effect]:
        """Start to examine a wait that has become long."""
        book = _Book(Node(self._proc, wait.actor, wait.number), wait)
        self._books.setdefault(wait.actor, []).append(book)
        return self._initiate(now, book)

    def tick(self, now: float) -> list[Effect]:
        """Forget waits that have ended, and repeat the probes that are due."""
        effects: list[Effect] = []
        self.deadline = None
        for actor in list(self._books):
            for book in self._standing(actor):
                if book.due <= now:
                    effects += self._initiate(now, book)
                self._expect(book.due)
        return effects

    def chased(self, now: float, link: object, actor: int, port: int, probe: Probe) -> list[Effect]:
        """Handle a probe along the call to `actor` whose answer goes to `port` over `link`."""
        effects: list[Effect] = []
        first = probe.path[0]
        for book in self._standing(actor):
            if not book.wait.owes(link, port):
                continue
            if book.node == first:
                effects.append(Proof(link, probe.path[-1].actor, probe))
            elif book.node > first:
                effects += self._prompt(now, book)
            elif book.node not in probe.path:
                heard = book.heard.get(first)
                if heard is None or heard.round < probe.round:
                    book.heard[first] = _Heard(probe.round, link, port)
                    path = (*probe.path, book.node)
                    effects += self._chase(book, Probe(probe.round, path))
        return effects

    def proven(self, link: object, actor: int, probe: Probe) -> list[Effect]:
        """Handle a probe that returned over `link`: check that the wait is still in progress."""
        path = probe.path
        place = len(path) - 1 - len(probe.stories)
        answerer = path[(place + 1) % len(path)].actor
        for book in self._standing(actor):
            if book.node != path[place] or not any(
                call.link is link and call.actor == answerer for call in book.wait.unanswered()
            ):
                continue
            stories = (*probe.stories, book.wait.story)
            if place == 0:
                self._books[actor].remove(book)
                return [Break(book.wait, stories[::-1])]
            heard = book.heard.get(path[0])
            if (
                heard is not None
                and heard.round == probe.round
                and book.wait.owes(heard.link, heard.port)
            ):
                told = Probe(probe.round, path, stories)
                return [Proof(heard.link, path[place - 1].actor, told)]
        return []

    def _standing(self, actor: int) -> list[_Book]:
        books = [book for book in self._books.get(actor, ()) if book.wait.standing]
        if books:
            self._books[actor] = books
        else:
            self._books.pop(actor, None)
        return list(books)

    def _initiate(self, now: float, book: _Book) -> list[Effect]:
        book.round += 1
        book.sent = now
        book.due = now + book.repeat
        book.repeat = min(2 * book.repeat, _LAST_REPEAT)
        self._expect(book.due)
        return self._chase(book, Probe(book.round, (book.node,)))

    def _prompt(self, now: float, book: _Book) -> list[Effect]:
        """Send a probe soon for a wait that got a smaller one's probe: it may be the largest."""
        soon = book.sent + PAUSE
        if soon <= now:
            return self._initiate(now, book)
        book.due = min(book.due, soon)
        self._expect(book.due)
        return []

    def _expect(self, due: float) -> None:
        self.deadline = due if self.deadline is None else min(self.deadline, due)

    @staticmethod
    def _chase(book: _Book, probe: Probe) -> list[Effect]:
        return [Chase(list(book.wait.unanswered()), probe)]
