"""Casts: one message to the procs of many hosts over a tree of agents, and the answers back up.

A caller that sends to each of H hosts sends H times and waits for the last host. In a tree of
fan-out k, the caller and every other host send k times, and the last host receives the message
after log_k(H) hops. Answers are gathered on the way back, so the caller gets about k messages with
many answers each. Message passing systems have long implemented broadcast and reduction this way
(Thakur, Rabenseifner and Gropp, IJHPCA 2005), but they do not tolerate the loss of a host during
the operation.

**The tree is arithmetic.** Hosts are in a fixed order. Every host is responsible for a contiguous
range of that order that begins with itself (its `Route`). It divides the rest of the range into at
most k equal parts; the first host of each part is its child. No host stores the tree or agrees on
it with others: a host derives its children from the route it receives, and so does a host that
takes its place. Ranks are the positions in the cast; those of one host are contiguous, in the order
of hosts.

**Failover.** When a host is lost, its parent in the tree reports the unanswered ranks of that host
as lost and adopts its children, with their ranges. Whether the lost host had forwarded the cast to
them is unknown, so a child may receive the cast twice. These rules make that safe:

- A host delivers a cast at most once, and remembers that it did.
- Of two parents, a host follows the one nearer to the root: that parent has adopted the host
  because it considers the other parent lost. (The other may be alive behind a partition, and late.)
  The other parent is kept as a *suitor*, a parent in reserve, and followed if the chosen one is
  lost first.
- A host that follows a new parent sends it all answers of its own ranks again, and forwards the
  cast again to its children, which do the same. So the answers that a lost host had gathered but
  not passed on are gathered anew. For that a host keeps the answers of its own ranks only; it never
  stores data of others.
- Every host counts each rank once, however often an answer arrives.
- For the root, only its own view makes a host lost. A host that others report as lost but that the
  root can reach is adopted by the root itself. So a cast reaches every host that its caller can
  reach.

So every rank is accounted for exactly once at the root: by its answer, or as lost with a host that
some host found lost.

Rejected: a new cast to the ranks that have not answered, which would need the same memory to avoid
a second execution. Rejected: a second path beside the tree, as in gossip protocols (Leitao et al.,
*Epidemic broadcast trees*, SRDS 2007), which costs messages in every cast for the sake of the rare
loss.

**Release.** When the root has all answers (or wants no more) it releases the cast down the tree,
and each host drops the answers that it kept. A host without a parent waits `patience` seconds to be
adopted, then drops the cast, since no host is interested in it.

A host sends answers to its parent when it has those of its whole range, or `hold` seconds after the
first answer of an incomplete range. So a rank that hangs does not delay the others for long, and a
tree of quick ranks costs one message per host.

The order between casts that take different paths is not kept here; the code that delivers to
mailboxes restores it (`protocol.order_merge`). Names of hosts are names of incarnations. A lost
incarnation never returns, and the driver feeds in nothing from a host after it reported that host
as lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import NamedTuple, TypeAlias

__all__ = [
    "Answer",
    "CastId",
    "Casts",
    "Deliver",
    "Effect",
    "Forward",
    "Host",
    "Loss",
    "Outcomes",
    "Release",
    "Reply",
    "Route",
]

Host: TypeAlias = Hashable
CastId: TypeAlias = Hashable

REMEMBERED = 100_000
"""How many completed casts a host remembers, so that it delivers none of them again."""


class Route(NamedTuple):
    """A contiguous range of hosts; the first one is responsible for all of them.

    >>> route = Route(("a", "b", "c", "d", "e"), (0, 8, 16, 24, 32, 40), fanout=2)
    >>> [part.hosts for part in route.parts()]
    [('b', 'c'), ('d', 'e')]
    >>> route.parts()[1].starts
    (24, 32, 40)
    """

    hosts: tuple[Host, ...]
    starts: tuple[int, ...]
    """Host i has the ranks from ``starts[i]`` up to ``starts[i + 1]``."""
    fanout: int

    def parts(self) -> list[Route]:
        """Return the routes of the first host's children: equal parts of the rest of the range."""
        size, longer = divmod(len(self.hosts) - 1, self.fanout)
        parts: list[Route] = []
        at = 1
        while at < len(self.hosts):
            end = at + size + (len(parts) < longer)
            parts.append(Route(self.hosts[at:end], self.starts[at : end + 1], self.fanout))
            at = end
        return parts


class Answer(NamedTuple):
    """The outcome of the cast at one rank."""

    rank: int
    outcome: object


class Loss(NamedTuple):
    """Ranks that will not answer, because `host` was found lost or because it `dropped` the cast.

    A host that drops a cast is alive; it waited too long without a parent.
    """

    host: Host
    ranks: tuple[int, ...]
    reason: str
    dropped: bool = False


class Deliver(NamedTuple):
    """Effect: deliver the cast to this host's ranks from `first` up to, not including, `last`.

    The driver reports the outcome of each rank with `Casts.answered`.
    """

    cast: CastId
    first: int
    last: int


class Forward(NamedTuple):
    """Effect: send this, with the message itself, to host `to`, which feeds it to `on_forward`."""

    to: Host
    cast: CastId
    level: int
    route: Route


class Reply(NamedTuple):
    """Effect: send these answers to host `to`, which feeds them to `on_reply`."""

    to: Host
    cast: CastId
    answers: list[Answer | Loss]


class Release(NamedTuple):
    """Effect: send this to host `to`, which feeds it to `on_release`. It may wait for piggybacking.

    With `done` the root wants no more answers. Without it, only the sender stops being a parent.
    """

    to: Host
    cast: CastId
    done: bool


class Outcomes(NamedTuple):
    """Effect, at the root only: more answers for the caller; `done` when these are the last."""

    cast: CastId
    answers: list[Answer | Loss]
    done: bool


Effect: TypeAlias = Deliver | Forward | Reply | Release | Outcomes


class _Cast:
    """The state of one cast at one host."""

    __slots__ = (
        "children",
        "dropped",
        "flush_at",
        "forget_at",
        "gone",
        "hold",
        "left",
        "level",
        "open",
        "own",
        "parent",
        "pending",
        "route",
        "suitors",
    )

    def __init__(self, parent: Host, level: int, route: Route, hold: float) -> None:
        self.parent = parent  # the root is its own parent
        self.hold = hold
        self.level = level  # hops from the root
        self.route = route
        self.suitors: dict[Host, tuple[int, Route]] = {}
        self.children: dict[Host, Route] = {}
        self.gone: dict[Host, str] = {}  # hosts reported lost, with the reason
        self.own: list[Answer] = []
        self.dropped = False  # this host forgot the cast before, with its answers
        self.open = bytearray()  # per rank: 1 while not accounted for
        self.left = 0  # number of ranks not accounted for
        self.pending: list[Answer | Loss] = []  # accounted for, not yet sent to the parent
        self.flush_at: float | None = None
        self.forget_at: float | None = None  # set while there is no parent

    def close(self, rank: int) -> bool:
        """Mark a rank as accounted for; return False if it already is, or is not in the route."""
        index = rank - self.route.starts[0]
        if not (0 <= index < len(self.open) and self.open[index]):
            return False
        self.open[index] = 0
        self.left -= 1
        return True


class Casts:
    """The casts that pass through one host or start there. See the module.

    Args:
        me: this host.
        hold: seconds that an answer may wait for others to be sent with it.
        patience: seconds that a cast without a parent is kept; longer than other hosts need to find
            that parent lost.

    >>> root, leaf = Casts("client"), Casts("b")
    >>> [forward] = root.cast(1, ["b"], [0, 2], fanout=8, now=0.0)
    >>> leaf.on_forward("client", *forward[1:], now=0.0)
    [Deliver(cast=1, first=0, last=2)]
    >>> leaf.answered(1, 0, "x", now=0.0)
    []
    >>> [reply] = leaf.answered(1, 1, "y", now=0.0)
    >>> root.on_reply(*reply[1:], now=0.0)[0].answers
    [Answer(rank=0, outcome='x'), Answer(rank=1, outcome='y')]
    """

    __slots__ = ("_casts", "_count", "_finished", "_gone", "_hold", "_me", "_patience", "_times")

    def __init__(self, me: Host, *, hold: float = 0.002, patience: float = 30.0) -> None:
        self._me = me
        self._hold = hold
        self._patience = patience
        self._casts: dict[CastId, _Cast] = {}
        self._finished: dict[CastId, None] = {}  # oldest first
        self._gone: dict[Host, str] = {}
        self._times: list[tuple[float, int, CastId]] = []  # a heap; entries may be obsolete
        self._count = 0

    def __len__(self) -> int:
        """Return the number of casts in progress here."""
        return len(self._casts)

    def __contains__(self, cast: CastId) -> bool:
        """Whether that cast is in progress here."""
        return cast in self._casts

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` may have something to do, or None."""
        return self._times[0][0] if self._times else None

    # ----------------------------------------------------------------------------------------------
    # The root
    # ----------------------------------------------------------------------------------------------

    def cast(
        self,
        cast: CastId,
        hosts: Iterable[Host],
        starts: Iterable[int],
        fanout: int,
        now: float,
        hold: float | None = None,
    ) -> list[Effect]:
        """Start a cast at the root.

        Host i of `hosts` has the ranks from starts[i] up to starts[i + 1].

        `hold` overrides the value given to the class, for this cast.
        """
        assert cast not in self._casts, "one name for each cast"
        starts = tuple(starts)
        route = Route((self._me, *hosts), (starts[0], *starts), fanout)
        state = self._casts[cast] = _Cast(self._me, 0, route, self._hold)
        if hold is not None:
            state.hold = hold
        effects: list[Effect] = []
        self._follow(cast, state, self._me, 0, route, effects)
        self._tell(cast, state, now, effects)
        return effects

    def release(self, cast: CastId) -> list[Effect]:
        """Stop the cast at the root, which wants no more answers."""
        return self._finish(cast, self._casts[cast]) if cast in self._casts else []

    # ----------------------------------------------------------------------------------------------
    # All hosts
    # ----------------------------------------------------------------------------------------------

    def on_forward(
        self,
        sender: Host,
        cast: CastId,
        level: int,
        route: Route,
        now: float,
        hold: float | None = None,
    ) -> list[Effect]:
        """Accept a cast from a parent, for the first time or because the former parent was lost."""
        effects: list[Effect] = []
        state = self._casts.get(cast)
        if state is None:
            hold = self._hold if hold is None else hold
            state = self._casts[cast] = _Cast(sender, level, route, hold)
            first, last = route.starts[:2]
            if cast not in self._finished:
                if first < last:
                    effects.append(Deliver(cast, first, last))
            else:  # dropped for lack of a parent, or over and forwarded by a late parent
                state.dropped = True
        elif sender != state.parent and state.forget_at is None:
            if level >= state.level:
                state.suitors[sender] = level, route
                return []
            state.suitors[state.parent] = state.level, state.route
        self._follow(cast, state, sender, level, route, effects)
        self._tell(cast, state, now, effects)
        return effects

    def answered(self, cast: CastId, rank: int, outcome: object, now: float) -> list[Effect]:
        """Record the outcome of a rank of this host; called once for each rank."""
        effects: list[Effect] = []
        state = self._casts.get(cast)
        if state is not None:
            answer = Answer(rank, outcome)
            state.own.append(answer)
            if state.close(rank):
                state.pending.append(answer)
            self._tell(cast, state, now, effects)
        return effects

    def on_reply(self, cast: CastId, answers: Iterable[Answer | Loss], now: float) -> list[Effect]:
        """Accept answers from a child."""
        effects: list[Effect] = []
        state = self._casts.get(cast)
        if state is None:
            return effects
        for answer in answers:
            if isinstance(answer, Answer):
                if state.close(answer.rank):
                    state.pending.append(answer)
            elif state.level or answer.dropped or answer.host in self._gone:
                self._lose(state, *answer)
            elif answer.host not in state.children:  # the reporter adopted its children
                part = self._alone(state, answer.host)
                self._hand_on(cast, state, part, effects)
        self._tell(cast, state, now, effects)
        return effects

    def on_release(self, sender: Host, cast: CastId, done: bool, now: float) -> list[Effect]:
        """Accept a release: the sender wants no more answers of this cast."""
        state = self._casts.get(cast)
        if state is None:
            return []
        if done:
            return self._finish(cast, state)
        effects: list[Effect] = []
        self._without(cast, state, sender, now, effects)
        return effects

    def host_lost(self, host: Host, reason: str, now: float) -> list[Effect]:
        """Handle the loss of a host: its children are adopted here, or another parent is chosen."""
        self._gone[host] = reason
        effects: list[Effect] = []
        for cast, state in list(self._casts.items()):
            part = state.children.pop(host, None)
            if part is not None:
                self._hand_on(cast, state, part, effects)
                self._tell(cast, state, now, effects)
            self._without(cast, state, host, now, effects)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Send answers that have waited for `hold`; drop casts that have waited for `patience`."""
        effects: list[Effect] = []
        while self._times and self._times[0][0] <= now:
            _, _, cast = heapq.heappop(self._times)
            state = self._casts.get(cast)
            if state is None:
                continue
            if state.forget_at is not None and state.forget_at <= now:
                effects += self._finish(cast, state, done=False)
            elif state.flush_at is not None and state.flush_at <= now:
                self._flush(cast, state, effects)
        return effects

    # ----------------------------------------------------------------------------------------------
    # Internals
    # ----------------------------------------------------------------------------------------------

    def _without(
        self, cast: CastId, state: _Cast, host: Host, now: float, effects: list[Effect]
    ) -> None:
        """Stop using that host as a parent or suitor; if it was the parent, follow a suitor."""
        state.suitors.pop(host, None)
        if host != state.parent or state.forget_at is not None:
            return
        if state.suitors:
            parent = min(state.suitors, key=lambda suitor: state.suitors[suitor][0])
            self._follow(cast, state, parent, *state.suitors[parent], effects)
            self._tell(cast, state, now, effects)
        else:
            state.flush_at = None
            state.forget_at = now + self._patience
            self._wake(state.forget_at, cast)

    def _follow(
        self,
        cast: CastId,
        state: _Cast,
        parent: Host,
        level: int,
        route: Route,
        effects: list[Effect],
    ) -> None:
        """Make `parent` the parent, with responsibility for `route` from now on."""
        state.parent, state.level, state.route = parent, level, route
        state.suitors.pop(parent, None)
        state.forget_at = state.flush_at = None
        state.left = route.starts[-1] - route.starts[0]
        state.open = bytearray(b"\1") * state.left
        state.pending = [answer for answer in state.own if state.close(answer.rank)]
        former, state.children = state.children, {}
        if state.dropped:
            ranks = range(*route.starts[:2])
            self._lose(state, self._me, ranks, "its answers were not collected in time", True)
        for part in route.parts():
            self._hand_on(cast, state, part, effects)
        # Former children that are no longer in the route get a release: the parent that adopted
        # them because it considered this host lost may not have reached them.
        effects += [Release(host, cast, False) for host in former if host not in state.children]

    def _hand_on(self, cast: CastId, state: _Cast, part: Route, effects: list[Effect]) -> None:
        """Make the first host of `part` a child; if it is lost, adopt its children instead."""
        head = part.hosts[0]
        reason = self._gone.get(head) or state.gone.get(head)
        if reason is None:
            state.children[head] = part
            effects.append(Forward(head, cast, state.level + 1, part))
            return
        self._lose(state, head, range(*part.starts[:2]), reason)
        for part_of_it in part.parts():
            self._hand_on(cast, state, part_of_it, effects)

    def _alone(self, state: _Cast, host: Host) -> Route:
        """Return the route that consists of this host only."""
        index = state.route.hosts.index(host)
        return Route((host,), state.route.starts[index : index + 2], state.route.fanout)

    def _lose(
        self, state: _Cast, host: Host, ranks: Iterable[int], reason: str, dropped: bool = False
    ) -> None:
        if not dropped:
            state.gone[host] = reason
        lost = tuple(rank for rank in ranks if state.close(rank))
        if lost:
            state.pending.append(Loss(host, lost, reason, dropped))

    def _tell(self, cast: CastId, state: _Cast, now: float, effects: list[Effect]) -> None:
        """Send what is complete now, or set the timer for the rest."""
        if state.forget_at is not None:
            return  # there is no parent
        if not state.left:
            if state.pending or state.level == 0:
                self._flush(cast, state, effects)
        elif state.pending and state.flush_at is None:
            state.flush_at = now + state.hold
            self._wake(state.flush_at, cast)

    def _flush(self, cast: CastId, state: _Cast, effects: list[Effect]) -> None:
        answers, state.pending = state.pending, []
        state.flush_at = None
        if state.level:
            effects.append(Reply(state.parent, cast, answers))
            return
        effects.append(Outcomes(cast, answers, not state.left))
        if not state.left:
            effects += self._finish(cast, state)

    def _finish(self, cast: CastId, state: _Cast, *, done: bool = True) -> list[Effect]:
        del self._casts[cast]
        self._finished[cast] = None
        if len(self._finished) > REMEMBERED:
            del self._finished[next(iter(self._finished))]
        return [Release(child, cast, done) for child in state.children]

    def _wake(self, time: float, cast: CastId) -> None:
        self._count += 1
        heapq.heappush(self._times, (time, self._count, cast))
