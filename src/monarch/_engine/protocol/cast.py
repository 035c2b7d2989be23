"""Casts: one message to the procs of many hosts, down a tree of agents, and the answers back up.

A caller that sends to each of H hosts itself works H times and waits for the last of H. With a
tree of fan-out k it works k times, and so does everybody else, and the last host hears of it after
log_k(H) hops. Answers are gathered on the way back, so the caller gets about k messages with many
answers each. Message passing machines have long broadcast and reduced that way (see Thakur,
Rabenseifner and Gropp, IJHPCA 2005). What they cannot do is lose a host on the way.

**The tree is arithmetic.** Hosts are in a fixed order, and every host is responsible for a stretch
of that order that begins with itself (its `Route`). It divides the rest of the stretch into at
most k equal parts; the first host of each is its child. So nobody keeps or agrees on a tree: a
host knows its children from what it is given, and so does whoever takes its place. Ranks are the
positions in the cast; those of one host are contiguous, in the order of hosts.

**When a host is lost**, its parent in the tree accounts for its ranks, those that have not
answered, as lost, and takes its children as its own, with what they are responsible for. Whether
the lost host had forwarded the cast to them cannot be known, so they may get it twice. What makes
this safe:

- A host delivers a cast once, and knows later that it did.
- Of two parents the one nearer to the root counts: it has adopted, and takes the other for lost.
  (Which may be alive, behind a partition, and late.) The other is kept as a *suitor*, and followed
  if the chosen one is lost first.
- Who follows a new parent tells it all answers of its own ranks again, and forwards again to its
  children, who do the same. Thus what a lost host had gathered and not passed on is gathered anew.
  Only answers of own ranks need to be kept for that: nobody holds the data of others.
- Everybody counts each rank once, whatever comes twice.
- Only the root's own view makes a host lost to the root: what others cannot reach, and it can, it
  adopts itself. So a cast reaches whom its caller reaches.

So every rank is accounted for exactly once at the root: by its answer, or as lost with a host that
somebody found lost. The alternative, a new cast to whoever has not answered, would need the same
memory not to execute twice; a second way beside the tree, as gossip protocols have it (Leitao et
al., *Epidemic broadcast trees*, SRDS 2007), costs messages with every cast for the sake of the
rare one.

**The end.** When the root has all answers (or wants no more) it releases the cast down the tree,
and the kept answers go. A host that has no parent left waits `patience` seconds for being adopted,
then drops the cast: nobody is interested any more.

Answers go up when a host has all of its stretch, or `hold` seconds after the first that has not: a
rank that hangs delays no others for long, and a tree of quick ones costs one message per host.

Order between casts that take different paths is not kept here; whoever delivers to mailboxes sees
to it. Names of hosts are names of incarnations: once lost, lost for good, and nothing from a host
that was reported lost is fed in any more.
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
"""Casts that a host knows to have delivered after they are over."""


class Route(NamedTuple):
    """A stretch of hosts; the first is responsible for all.

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
        """What the first host hands on: equal parts of the rest."""
        size, longer = divmod(len(self.hosts) - 1, self.fanout)
        parts: list[Route] = []
        at = 1
        while at < len(self.hosts):
            end = at + size + (len(parts) < longer)
            parts.append(Route(self.hosts[at:end], self.starts[at : end + 1], self.fanout))
            at = end
        return parts


class Answer(NamedTuple):
    """What came of the cast at one rank."""

    rank: int
    outcome: object


class Loss(NamedTuple):
    """These ranks will not answer: their host was found lost, or is here and `dropped` the cast."""

    host: Host
    ranks: tuple[int, ...]
    reason: str
    dropped: bool = False


class Deliver(NamedTuple):
    """Deliver the cast to the ranks of this host, from `first` up to `last`; see `answered`."""

    cast: CastId
    first: int
    last: int


class Forward(NamedTuple):
    """To be fed to `on_forward` of that host, with the message itself."""

    to: Host
    cast: CastId
    level: int
    route: Route


class Reply(NamedTuple):
    """To be fed to `on_reply` of that host."""

    to: Host
    cast: CastId
    answers: list[Answer | Loss]


class Release(NamedTuple):
    """To be fed to `on_release` of that host; it may wait for something to ride on.

    `done`: the root wants no more. Else the sender only has no parent any more.
    """

    to: Host
    cast: CastId
    done: bool


class Outcomes(NamedTuple):
    """At the root: more answers; `done` when those were the last."""

    cast: CastId
    answers: list[Answer | Loss]
    done: bool


Effect: TypeAlias = Deliver | Forward | Reply | Release | Outcomes


class _Cast:
    """One cast at one host."""

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
        self.parent = parent  # the root is its own
        self.hold = hold
        self.level = level  # hops from the root
        self.route = route
        self.suitors: dict[Host, tuple[int, Route]] = {}
        self.children: dict[Host, Route] = {}
        self.gone: dict[Host, str] = {}  # hosts that somebody found lost
        self.own: list[Answer] = []
        self.dropped = False  # it was under way here before; its answers are gone
        self.open = bytearray()  # by rank: 1 while not accounted for
        self.left = 0  # how many are
        self.pending: list[Answer | Loss] = []  # accounted for, and not told
        self.flush_at: float | None = None
        self.forget_at: float | None = None  # set while no parent is left

    def close(self, rank: int) -> bool:
        """Account for a rank; False if it is already, or none of ours."""
        index = rank - self.route.starts[0]
        if not (0 <= index < len(self.open) and self.open[index]):
            return False
        self.open[index] = 0
        self.left -= 1
        return True


class Casts:
    """The casts that pass one host, or begin there. See the module.

    Args:
        me: this host.
        hold: how long an answer may wait for others, seconds.
        patience: how long a cast without a parent is kept, seconds; longer than it takes others to
            find that parent lost.

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
        self._finished: dict[CastId, None] = {}  # in the order of their ends
        self._gone: dict[Host, str] = {}
        self._times: list[tuple[float, int, CastId]] = []  # some of which are no longer due
        self._count = 0

    def __len__(self) -> int:
        """How many casts are under way here."""
        return len(self._casts)

    def __contains__(self, cast: CastId) -> bool:
        """Whether that cast is under way here."""
        return cast in self._casts

    @property
    def deadline(self) -> float | None:
        """When `tick` may have something to do, or None."""
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
        """Begin a cast. Host i of `hosts` has the ranks from starts[i] up to starts[i + 1].

        `hold`: as above, for this cast.
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
        """The root wants no more answers of this cast."""
        return self._finish(cast, self._casts[cast]) if cast in self._casts else []

    # ----------------------------------------------------------------------------------------------
    # Any host
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
        """A parent hands on a cast, for the first time or because the former parent was lost."""
        effects: list[Effect] = []
        state = self._casts.get(cast)
        if state is None:
            hold = self._hold if hold is None else hold
            state = self._casts[cast] = _Cast(sender, level, route, hold)
            first, last = route.starts[:2]
            if cast not in self._finished:
                if first < last:
                    effects.append(Deliver(cast, first, last))
            else:  # dropped for want of a parent, or over and forwarded by one who is late
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
        """A rank of this host is done with the cast; once for each."""
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
        """Answers from further down."""
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
            elif answer.host not in state.children:  # whoever lost it has taken its children
                part = self._alone(state, answer.host)
                self._hand_on(cast, state, part, effects)
        self._tell(cast, state, now, effects)
        return effects

    def on_release(self, sender: Host, cast: CastId, done: bool, now: float) -> list[Effect]:
        """The sender asks for no more answers of this cast."""
        state = self._casts.get(cast)
        if state is None:
            return []
        if done:
            return self._finish(cast, state)
        effects: list[Effect] = []
        self._without(cast, state, sender, now, effects)
        return effects

    def host_lost(self, host: Host, reason: str, now: float) -> list[Effect]:
        """That host cannot be reached from here any more."""
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
        """Pass on what has waited for long enough, drop what nobody wants."""
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
    # How
    # ----------------------------------------------------------------------------------------------

    def _without(
        self, cast: CastId, state: _Cast, host: Host, now: float, effects: list[Effect]
    ) -> None:
        """Do without that host as a parent."""
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
        """Be responsible for `route` to `parent` from now on."""
        state.parent, state.level, state.route = parent, level, route
        state.suitors.pop(parent, None)
        state.forget_at = state.flush_at = None
        state.left = route.starts[-1] - route.starts[0]
        state.open = bytearray(b"\1") * state.left
        state.pending = [answer for answer in state.own if state.close(answer.rank)]
        former, state.children = state.children, {}
        if state.dropped:
            ranks = range(*route.starts[:2])
            self._lose(state, self._me, ranks, "nobody asked for its answers for too long", True)
        for part in route.parts():
            self._hand_on(cast, state, part, effects)
        # Whoever took them for us, because we were lost to him, may not have reached them.
        effects += [Release(host, cast, False) for host in former if host not in state.children]

    def _hand_on(self, cast: CastId, state: _Cast, part: Route, effects: list[Effect]) -> None:
        """Make the first host of `part` a child, or if it is lost, its children."""
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
        """The stretch that is only this host of the route."""
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
        """Pass on what is known now, or see to it that it will be."""
        if state.forget_at is not None:
            return  # nobody is there to be told
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
