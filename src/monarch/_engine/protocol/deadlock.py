"""Deadlocks: actors that wait for each other in a circle, found across processes.

An actor handles one message at a time. While it *waits* (its thread, or the task that serves its
mailbox, is stopped at an answer, without a time limit) it answers nobody. Waits are the nodes of a
graph; one points to every wait of an actor whose answer it needs. A wait on a cycle of this graph
can never end with a value, and nobody in it will ever notice. An actor that calls itself is a cycle
of one and needs no rule of its own.

Nothing is done about a wait while it is young. One that has become long (a fraction of a second;
who calls `Deadlocks.begin` decides) is looked into in two steps:

1. *Chase* (Chandy, Misra and Haas 1983). The wait sends a probe to every actor that owes it an
   answer; a waiting actor that gets one adds itself and passes it on. A probe that comes home has
   seen a cycle, but each of its waits at another time.
2. *Proof*. The initiator sends the cycle back the way it came: from each wait to the one that waits
   for it, **over the link on which the answer would travel**. Each checks that it is still the wait
   that the probe met and still has no answer, and passes it on. When it comes home, the cycle is a
   deadlock.

Why that is a proof. Take the moment at which the probe was home. Every wait of the cycle had begun
(the probe met it) and had not ended (the proof met it later, and a wait that has ended never comes
back), so at this moment all were in place. No answer was under way: links keep their order, so one
that was sent before the proof would have arrived before it and ended the wait. And whoever could
send one was stopped, and stays so until the circle is broken. No clock is compared with another,
and that a wait is long is no evidence. What can free such a circle is no answer: that an actor in
it dies, that a task is cancelled, that another rank of a mesh call fails, that another circle which
shares a wait has just been broken there. If it happens while the proof is on its way, one wait more
than necessary fails that would not have succeeded.

One victim per cycle, without an election: probes are passed on only by waits that are smaller than
the initiator (Chang and Roberts 1979), so of a cycle only the largest wait's probe gets round, and
this is the wait that is broken. Who gets the probe of a smaller one sends its own instead (at most
every `PAUSE` s), since the wait that closes a cycle last need not be its largest. Hence nothing
need ever be repeated. It is all the same, at growing intervals, as a second line.

A wait for several answers, as of a call to a mesh, needs all of them: the first error would end it,
but a program that counts on that is broken, too. Waits that any one of several answers could end
are not waits here: their deadlocks are knots, not cycles, and are not found.

What the driver must see to: links are FIFO, and a call's probe goes over the link of the call. An
answer that can come although the actor waits (a concurrent endpoint that has begun, an explicit
port) is not one that the waiting actor owes (`Wait.owes`, `Wait.unanswered`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

__all__ = ["Break", "Call", "Chase", "Deadlocks", "Node", "Probe", "Proof", "Story", "Wait"]

PAUSE = 0.1
"""Shortest time between two probes of one wait, in seconds."""

_FIRST_REPEAT = 1.0
_LAST_REPEAT = 60.0

Story = tuple[str, str, str]  # who waits, for which call, where in the program


class Call(NamedTuple):
    """A call that is not answered yet."""

    link: Any  # it went over this link, and its answer comes over it
    actor: int  # who is to answer: a mesh, of which a process has one rank at most
    port: int  # where the answer goes


class Wait(Protocol):
    """An actor that waits, as its process sees it."""

    actor: int
    number: int  # of this wait, and no other in the process
    story: Story

    @property
    def standing(self) -> bool:
        """Whether it goes on. Once it does not, it never will again."""
        ...

    def unanswered(self) -> Iterable[Call]:
        """The calls whose answers it needs: each of them, not any."""
        ...

    def owes(self, link: Any, port: int) -> bool:
        """Whether the call that came over `link` can only be answered once this wait has ended."""
        ...


class Node(NamedTuple):
    """A wait in the cluster; nodes are ordered."""

    proc: int
    actor: int
    wait: int


class Probe(NamedTuple):
    """What travels: the waits met so far, and on the way back their stories, last wait first."""

    round: int
    path: tuple[Node, ...]
    stories: tuple[Story, ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(self, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes | bytearray) -> Probe:
        """Raises ValueError, TypeError or LookupError for what is no probe.

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
    """Effect: send the probe after each of these calls."""

    calls: list[Call]
    probe: Probe


class Proof(NamedTuple):
    """Effect: send the probe back to `actor`, over the link of its call."""

    link: Any
    actor: int
    probe: Probe


class Break(NamedTuple):
    """Effect: end this wait with an error; the stories begin with it, each waits for the next."""

    wait: Wait
    cycle: tuple[Story, ...]


Effect = Chase | Proof | Break


class _Heard(NamedTuple):
    """The last probe of one initiator that a wait passed on, and whose call brought it."""

    round: int
    link: Any
    port: int


class _Book:
    """What is known about one wait of this process."""

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
    """The long waits of one process; takes inputs and returns effects, in order.

    Args:
        proc: which process, for nodes.
    """

    def __init__(self, proc: int) -> None:
        self.deadline: float | None = None
        """When `tick` is next wanted; None while there is no wait."""
        self._proc = proc
        self._books: dict[int, list[_Book]] = {}

    def begin(self, now: float, wait: Wait) -> list[Effect]:
        """A wait has become long."""
        book = _Book(Node(self._proc, wait.actor, wait.number), wait)
        self._books.setdefault(wait.actor, []).append(book)
        return self._initiate(now, book)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: forget what has ended, repeat what is due."""
        effects: list[Effect] = []
        self.deadline = None
        for actor in list(self._books):
            for book in self._standing(actor):
                if book.due <= now:
                    effects += self._initiate(now, book)
                self._expect(book.due)
        return effects

    def chased(self, now: float, link: Any, actor: int, port: int, probe: Probe) -> list[Effect]:
        """A probe came after the call of `actor` whose answer goes to `port` over `link`."""
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

    def proven(self, link: Any, actor: int, probe: Probe) -> list[Effect]:
        """A probe came back over `link`: whom the last wait told waits for, still waits."""
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
        """A smaller wait looks for a cycle: so must this one, which may be its largest."""
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
