"""Membership per step: which replicas compute a step, and whether the step counts.

This is the pure core of `monarch.training`. It knows no torch, no sockets and no clock. Inputs are
the requests of ranks, their losses, and the end of the coordinator's patience. Outputs are effects,
which the coordinator carries out.

A **replica group** is `width` ranks that hold one copy of the model together; rank r is at the
position ``r % width`` of group ``r // width``. The ranks of one position hold the same state, and
average their gradients with each other. A **version** is the number of committed steps that a state
contains. A **mark** identifies a state: it is the number of the round that committed its last step,
or 0 for the first state. (After steps were lost there may be two states of one version, so versions
do not identify states.) A **ticket** identifies one incarnation of a rank.

A **round** is one attempt at one step, by the groups that are complete when it begins. A rank is in
one of three places: it has asked for a round, it computes in one, or it has arrived at a barrier of
the round and waits there. The last barrier of a round is the vote.

Invariants:

- A step is committed when all ranks of its round have voted for it, and only then. Each of them
  applies the step, or is lost. A rank that did not take part in the step has an older version.
- A round is aborted as soon as one of its ranks is lost or votes against it. No rank applies it.
- Either all ranks of a round want a step, or none does. (Ranks that have different numbers of
  steps would wait for each other, so that ends training with an error.)
- A round begins when all ranks that are known to compute have asked for it. So no state changes
  while a rank copies it: the states of a round change after its commit only.
- In a round all ranks start from one mark, the newest that is available for every position. A state
  is available from a rank that has it, from a snapshot in the memory of a rank, or from disk. A
  rank with another state gets it from there before it computes.
- A ticket that was fenced (lost, replaced or expelled) has no effect, and gets no answer but that.
- With ``copy_every=n`` the commit that makes version ``k * n`` waits until the copies of version
  ``(k - 1) * n`` are complete. So one lost host, or one lost rank, costs at most ``2 * n - 1``
  committed steps, which is one step for n = 1, if the losses before it were made good: the rounds
  since then have copied the states to another host again.

If no newer state is available for one position, the others go back to an older snapshot: `Begin`
says how many steps that loses. A state that nobody holds is lost, and training ends with an error.
It does not start from scratch silently.

Rejected: ranks that agree among themselves. They would need a second failure detector and a
consensus protocol, while the process that supervises the ranks knows their losses anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple, TypeAlias

__all__ = [
    "DISK",
    "Aborted",
    "Begin",
    "Closed",
    "Effect",
    "Expelled",
    "Failed",
    "Membership",
    "Released",
    "Role",
    "Source",
    "State",
    "Ticket",
]

Ticket: TypeAlias = Hashable
"""One incarnation of a rank."""

State: TypeAlias = tuple[int, int]
"""A position, and the mark of its state."""

DISK = -1
"""The rank that stands for the checkpoint on disk as the source of a state."""

EARLIER = -1
"""The mark of a checkpoint of an earlier training."""


class Source(NamedTuple):
    """The place of a state: `rank` (or `DISK`) holds the state of `position` with `mark`."""

    rank: int
    position: int
    mark: int


class Role(NamedTuple):
    """The part of one rank in a round.

    Attributes:
        member: whether the rank takes part. If not, it only serves its states, and asks again.
        shares: the shares of the batch that this rank computes.
        source: the place to load the state from, or None if the rank has it.
        serve: the states that others load from this rank.
        pull: snapshots of other ranks that this rank is to copy into its memory.
    """

    member: bool
    shares: tuple[int, ...]
    source: Source | None
    serve: tuple[State, ...]
    pull: tuple[Source, ...]


class Begin(NamedTuple):
    """Effect: a round begins; answer the requests of all ranks in `roles`.

    Attributes:
        round: the number of the round.
        version: the version of all states in the round; the round computes the next one.
        mark: their mark. If the round is committed, its number is the mark of the next ones.
        owners: for each share of the batch the group that computes it.
        groups: the groups that take part.
        roles: the part of each rank.
        keep: the marks of snapshots that may still be needed; others can be dropped.
        rolled_back: how many committed steps are lost, because no copy of their result is left.
        direct: whether all ranks have so little to average that one barrier suffices.
        write: the group that writes a checkpoint of this version to disk, or None.
    """

    round: int
    version: int
    mark: int
    owners: tuple[int, ...]
    groups: tuple[int, ...]
    roles: dict[int, Role]
    keep: frozenset[int]
    rolled_back: int
    direct: bool
    write: int | None


class Released(NamedTuple):
    """Effect: all ranks have arrived at barrier `phase`; answer them."""

    round: int
    phase: int
    ranks: tuple[int, ...]
    committed: bool


class Aborted(NamedTuple):
    """Effect: the round is void; answer these ranks, which wait at a barrier of it."""

    round: int
    ranks: tuple[int, ...]
    reason: str


class Closed(NamedTuple):
    """Effect: training is complete; answer these ranks, which asked for a round."""

    ranks: tuple[int, ...]


class Expelled(NamedTuple):
    """Effect: a rank is fenced, since it did not arrive in time; end its process."""

    rank: int
    ticket: Ticket
    reason: str


class Failed(NamedTuple):
    """Effect: training cannot continue; answer these ranks with the reason."""

    ranks: tuple[int, ...]
    reason: str


Effect: TypeAlias = Begin | Released | Aborted | Closed | Expelled | Failed

_TOO_LATE = (
    "training has ended without this rank, and no rank is left to give it the state: the others "
    "have returned"
)

VOTE = 2  # the last barrier of a round: after the gradients (0) and the partial sums (1)


class _Rank:
    """An incarnation that takes part: it asks, computes, or waits at a barrier."""

    __slots__ = ("arrived", "asked", "direct", "done", "host", "mark", "stock", "ticket", "vote")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.mark: int | None = None  # None: it has no state
        self.host = ""
        self.asked = False
        self.done = False
        self.arrived: int | None = None  # the barrier at which it waits
        self.vote: bool | None = None  # there
        self.direct = True
        self.stock: frozenset[State] = frozenset()  # snapshots in its memory

    @property
    def waits(self) -> bool:
        return self.asked or self.arrived is not None


class Membership:
    """Decides the rounds of a training. See the module.

    Args:
        groups: the number of replica groups.
        width: the number of ranks in each.
        min_groups: a round begins with at least so many complete groups.
        shares: the parts that the batch of a step is divided into; 0: one for each group that takes
            part and is up to date. With a fixed number the result of a step does not depend on the
            membership.
        copy_every: each rank keeps a snapshot of every so many versions, from the first one on, and
            a neighbour copies it; 0: there are none.
        save_every: one group writes every so many versions to disk; 0: none does.
        attempts: rounds of one step that may be aborted in a row without the loss of a rank.

    >>> core = Membership(2)
    >>> core.ask(0, "a", None)
    []
    >>> (begin,) = core.ask(1, "b", None)
    >>> begin.groups, begin.roles[1].source
    ((0, 1), Source(rank=0, position=0, version=0))
    >>> core.arrive(0, "a", 1, 2, True)
    []
    >>> core.arrive(1, "b", 1, 2, True)
    [Released(round=1, phase=2, ranks=(0, 1), committed=True)]
    """

    def __init__(
        self,
        groups: int,
        width: int = 1,
        *,
        min_groups: int = 1,
        shares: int = 0,
        copy_every: int = 0,
        save_every: int = 0,
        attempts: int = 5,
    ) -> None:
        if groups < 1 or width < 1:
            raise ValueError(f"expected at least one group of one rank, got {groups} of {width}")
        if not 1 <= min_groups <= groups:
            raise ValueError(f"min_groups must be between 1 and {groups}, got {min_groups}")
        for name, value in (
            ("shares", shares),
            ("copy_every", copy_every),
            ("save_every", save_every),
        ):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self.groups = groups
        self.width = width
        self.min_groups = min_groups
        self.shares = shares
        self.copy_every = copy_every
        self.save_every = save_every
        self.attempts = attempts
        self.committed = 0  # the version of the newest step that was committed, and not lost
        self.disk: int | None = None  # the mark of the newest complete checkpoint on disk
        self.closed = False  # training is complete
        self.failed = ""  # the reason why training cannot go on
        # The states of the present timeline, with their versions: others are of no use.
        self._line = {0: 0}
        self._ranks: dict[int, _Rank] = {}
        self._fenced: dict[Ticket, str] = {}
        self._round = 0
        self._open = False  # whether the round is under way
        self._members: tuple[int, ...] = ()  # of the round
        self._begun = False
        self._voided = 0  # aborted rounds in a row without a loss
        self._settled = False  # patience has ended: do not wait for ranks that are missing
        self._sources: dict[int, int] = {}  # of the round: rank -> the rank that it loads from
        # The copies that were ordered with the round: (by which rank, of what) -> from which rank.
        self._awaited: dict[tuple[int, State], int] = {}

    # -- what the driver looks at ----------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether any rank takes part."""
        return bool(self._ranks)

    @property
    def waits(self) -> Hashable | None:
        """The barrier at which some wait for others, or None. If it stays the same, call `expire`.

        It is None while all ranks compute, since the core does not know how long a step takes.
        """
        waiting = frozenset(each.arrived for each in self._concerned() if each.waits)
        if not waiting or self.failed or self.closed:
            return None
        return self._round, self._open, self._settled, waiting

    def known(self, rank: int) -> Ticket | None:
        """Return the ticket of the incarnation of `rank` that takes part, or None."""
        each = self._ranks.get(rank)
        return each.ticket if each is not None else None

    def neighbour(self, rank: int) -> int | None:
        """Return the rank that holds the copy of a rank's snapshots: on another host if possible.

        Ranks of another group come first among those of one host. None if there is no other rank.
        """
        total = self.groups * self.width
        here = self._ranks[rank].host

        def order(other: int) -> tuple[bool, bool, int]:
            same_group = other // self.width == rank // self.width
            return (self._ranks[other].host == here, same_group, (other - rank) % total)

        return min((other for other in self._ranks if other != rank), key=order, default=None)

    # -- inputs ----------------------------------------------------------------------------------

    def ask(
        self,
        rank: int,
        ticket: Ticket,
        mark: int | None,
        *,
        host: str = "",
        done: bool = False,
        stock: Collection[State] = (),
        direct: bool = True,
    ) -> list[Effect]:
        """A rank asks for a round. `done`: it has all the steps that it wants.

        `stock` are the snapshots in its memory, its own and those of others. `direct`: what it
        averages is small.

        Raises PermissionError for a ticket that was fenced.
        """
        if not 0 <= rank < self.groups * self.width:
            raise ValueError(f"rank {rank} is not one of {self.groups} groups of {self.width}")
        effects = self._admit(rank, ticket)
        each = self._ranks[rank]
        if self.failed:
            return [*effects, Failed((rank,), self.failed)]
        if self.closed:
            if mark is None:
                del self._ranks[rank]
                return [*effects, Failed((rank,), _TOO_LATE)]
            self.resume()  # ranks that have a state go on
        if self._open and rank in self._members:
            effects += self._abort(f"rank {rank} left the round")
        each.asked, each.arrived = True, None
        each.mark, each.host, each.done = mark, host, done
        each.stock, each.direct = frozenset(stock), direct
        return [*effects, *self._form()]

    def arrive(
        self, rank: int, ticket: Ticket, number: int, phase: int, vote: bool | None, why: str = ""
    ) -> list[Effect]:
        """A member of round `number` arrives at a barrier of it.

        `vote` is False if its part has failed, for the reason `why`, and None if it wants no step.
        Raises PermissionError for a ticket that was fenced.
        """
        self._check(ticket)
        each = self._ranks.get(rank)
        if each is None or not self._open or number != self._round or rank not in self._members:
            return [Aborted(number, (rank,), "the round was aborted")]
        each.arrived, each.vote = phase, vote
        if vote is False:
            return [*self._abort(f"rank {rank}: {why}"), *self._form()]
        if disagreement := self._disagreement():
            return self._fail(disagreement)
        return self._release()

    def copied(
        self, rank: int, ticket: Ticket, number: int, state: State, why: str = ""
    ) -> list[Effect]:
        """A rank has copied a snapshot that `Role.pull` of round `number` names.

        Or it has failed to, for the reason `why`: the next round asks for it again.
        """
        each = self._ranks.get(rank)
        if each is None or each.ticket != ticket or (why and number != self._round):
            return []
        if not why:
            each.stock |= {state}
        if self._awaited.pop((rank, state), None) is None or not self._open:
            return []
        if why and self._must_be_copied():
            why = f"rank {rank} could not copy the state of position {state[0]}: {why}"
            return [*self._abort(why), *self._form()]
        return self._release()

    def leave(self, rank: int, ticket: Ticket, why: str) -> list[Effect]:
        """An incarnation no longer takes part, but may ask again."""
        each = self._ranks.get(rank)
        if each is None or each.ticket != ticket:
            return []
        return self._remove(rank, why)

    def lost(self, rank: int, ticket: Ticket, why: str) -> list[Effect]:
        """An incarnation has exited."""
        self._fenced.setdefault(ticket, why)
        self._voided = 0
        return self.leave(rank, ticket, why)

    def expire(self) -> list[Effect]:
        """The state described by `waits` has lasted too long: expel the ranks that are missing."""
        if self.waits is None:
            return []
        late = {rank: each for rank, each in self._ranks.items() if not each.waits}
        if self._open:
            late = {rank: each for rank, each in late.items() if rank in self._members}
            if not late:
                why = "its ranks wait for each other at different barriers"
                if self._awaited:
                    ranks = ", ".join(map(str, sorted({rank for rank, _ in self._awaited})))
                    why = f"ranks {ranks} have not copied the states of others in time"
                return [*self._abort(why), *self._form()]
            # A rank that loads its state from one that hangs is late for that reason.
            late = {
                rank: each for rank, each in late.items() if self._sources.get(rank) not in late
            } or late
        effects: list[Effect] = []
        for rank, each in late.items():
            reason = f"rank {rank} was expelled: others waited for it for too long"
            effects.append(Expelled(rank, each.ticket, reason))
            effects += self.lost(rank, each.ticket, reason)
        if late:
            return effects
        self._settled = True  # ranks are missing: go on without them
        return self._form() or self._fail(self._missing())

    def stop(self, why: str) -> list[Effect]:
        """End the training of all ranks, with an error, at their next request."""
        return [] if self.failed else self._fail(why)

    def resume(self) -> None:
        """Let ranks train again after the end, or after a failure."""
        self.failed, self.closed = "", False
        self._begun = self._settled = False
        self._voided = 0

    def may_save(self, mark: int) -> bool:
        """Whether a checkpoint with this mark, once complete, would be the newest on disk."""
        return mark in self._line and self._line[mark] > self._line.get(self.disk or 0, 0)

    def saved(self, mark: int) -> None:
        """A checkpoint of the state with this mark is complete on disk."""
        if mark in self._line and self._line[mark] >= self._line.get(self.disk or 0, 0):
            self.disk = mark

    def found(self, version: int) -> None:
        """Before the beginning: a checkpoint of an earlier training is on disk."""
        self._line[EARLIER] = version
        self.disk = EARLIER

    # -- inside ----------------------------------------------------------------------------------

    def _concerned(self) -> list[_Rank]:
        """Return the ranks that others wait for: the members of the round, or all between two."""
        known = self._ranks
        return [known[rank] for rank in (self._members if self._open else known) if rank in known]

    def _check(self, ticket: Ticket) -> None:
        reason = self._fenced.get(ticket)
        if reason is not None:
            raise PermissionError(reason)

    def _admit(self, rank: int, ticket: Ticket) -> list[Effect]:
        self._check(ticket)
        each = self._ranks.get(rank)
        effects: list[Effect] = []
        if each is not None and each.ticket != ticket:
            effects = self.lost(rank, each.ticket, f"rank {rank} was replaced")
        if rank not in self._ranks:
            self._ranks[rank] = _Rank(ticket)
        return effects

    def _remove(self, rank: int, why: str) -> list[Effect]:
        del self._ranks[rank]
        copies = any(rank in (by, source) for (by, _), source in self._awaited.items())
        if self._open and (rank in self._members or (copies and self._must_be_copied())):
            effects = self._abort(why)
            self._voided = 0
            return [*effects, *self._form()]
        return self._form()

    def _must_be_copied(self) -> bool:
        """Whether the commit of this round has to wait for the copies that it began with."""
        return bool(self.copy_every) and (self.committed + 1) % self.copy_every == 0

    def _release(self) -> list[Effect]:
        """Let the members pass a barrier, if all have arrived, and the copies that it waits for."""
        members = [self._ranks[rank] for rank in self._members]
        phase, vote = members[0].arrived, members[0].vote
        if phase is None or any(each.arrived != phase for each in members):
            return []
        committed = phase == VOTE and vote is True
        if committed and self._awaited and self._must_be_copied():
            return []
        for each in members:
            each.arrived = None
        if phase == VOTE:
            self._open = False
            self._voided = 0
        if committed:
            self.committed += 1
            self._line[self._round] = self.committed
            self._prune()
        return [Released(self._round, phase, self._members, committed)]

    def _disagreement(self) -> str:
        """Return why some ranks that wait want a step and others do not; empty if they agree."""
        votes: dict[bool, list[int]] = {True: [], False: []}
        for rank in self._members:
            if self._ranks[rank].arrived is not None:
                votes[self._ranks[rank].vote is None].append(rank)
        if not votes[True] or not votes[False]:
            return ""
        no, yes = (", ".join(map(str, votes[wanted])) for wanted in (True, False))
        return (
            f"after {self.committed} steps ranks {no} want no more of them, and ranks {yes} do: "
            "call quorum() with the same `until` on all ranks"
        )

    def _void(self, why: str) -> list[Effect]:
        """End the round; no rank applies it."""
        waiting = tuple(
            rank
            for rank in self._members
            if rank in self._ranks and self._ranks[rank].arrived is not None
        )
        for rank in waiting:
            self._ranks[rank].arrived = None
        self._open = False
        return [Aborted(self._round, waiting, why)]

    def _abort(self, why: str) -> list[Effect]:
        """End the round; try the step again, unless it has failed too often."""
        effects = self._void(why)
        self._voided += 1
        if self._voided >= self.attempts:
            effects += self._fail(
                f"step {self.committed} failed {self._voided} times in a row, though no rank was "
                f"lost; the last reason: {why}"
            )
        return effects

    def _fail(self, reason: str) -> list[Effect]:
        """End training, and with it a round that is under way."""
        effects = self._void(reason) if self._open else []
        self.failed = reason
        asked = tuple(rank for rank, each in self._ranks.items() if each.asked)
        for rank in asked:
            self._ranks[rank].asked = False
        return [*effects, Failed(asked, reason)]

    def _complete(self) -> list[int]:
        return [
            group
            for group in range(self.groups)
            if all(rank in self._ranks for rank in self._ranks_of(group))
        ]

    def _ranks_of(self, group: int) -> range:
        return range(group * self.width, (group + 1) * self.width)

    def _enough(self) -> bool:
        return len(self._complete()) >= self.min_groups

    def _missing(self) -> str:
        missing = [rank for rank in range(self.groups * self.width) if rank not in self._ranks]
        return (
            f"only {len(self._complete())} of {self.groups} replica groups are complete, and "
            f"min_groups is {self.min_groups}; missing ranks: {str(missing)[1:-1]}"
        )

    def _form(self) -> list[Effect]:
        """Begin a round, if the time has come."""
        ranks = self._ranks
        if self._open or self.failed or self.closed or not ranks:
            return []
        if not all(each.asked for each in ranks.values()):
            return []
        everyone = len(ranks) == self.groups * self.width
        members = [ranks[rank] for rank in self._members_now()]
        if members and all(
            each.done and self._line.get(each.mark or 0) == self.committed for each in members
        ):
            # Wait for ranks that are being replaced: they could get the state from no one later.
            return self._close() if everyone or self._settled else []
        if not self._enough() or not (everyone or self._begun or self._settled):
            return []
        return self._begin()

    def _members_now(self) -> tuple[int, ...]:
        return tuple(rank for group in self._complete() for rank in self._ranks_of(group))

    def _close(self) -> list[Effect]:
        members = self._members_now()
        others = tuple(rank for rank in sorted(self._ranks) if rank not in members)
        self._ranks.clear()
        self.closed = True
        self._settled = False
        effects: list[Effect] = [Closed(members)]
        return [*effects, Failed(others, _TOO_LATE)] if others else effects

    def _begin(self) -> list[Effect]:
        ranks = self._ranks
        found = self._newest()
        if found is None:
            return self._fail(
                "the state of some ranks is lost: neither a healthy rank, nor a copy in memory, "
                "nor a checkpoint on disk has it (see copy_every and the folder of checkpoints)"
            )
        mark, holders = found
        version = self._line[mark]
        members = self._members_now()
        sources = {rank: self._source(rank, mark, holders) for rank in members}
        complete = tuple(self._complete())
        away = {rank for rank, source in sources.items() if source and source.rank != rank}
        ready = [group for group in complete if away.isdisjoint(self._ranks_of(group))]
        workers = ready or list(complete)
        count = self.shares or len(workers)
        owners = tuple(workers[share % len(workers)] for share in range(count))
        if self.copy_every and not version:
            for rank in members:  # a rank that has its first state keeps a snapshot of it
                if sources[rank] is None:
                    ranks[rank].stock |= {(rank % self.width, 0)}
        pulls = self._pulls(version)
        self._awaited = {
            (rank, (each.position, each.mark)): each.rank
            for rank, row in pulls.items()
            for each in row
        }
        keep = self._keep(version)
        wanted: dict[int, set[State]] = {rank: set() for rank in ranks}
        for source in [*sources.values(), *(each for row in pulls.values() for each in row)]:
            if source is not None and source.rank != DISK:
                wanted[source.rank].add((source.position, source.mark))
        roles = {
            rank: Role(
                member=rank in members,
                shares=tuple(
                    share for share, group in enumerate(owners) if group == rank // self.width
                )
                if rank in members
                else (),
                source=sources.get(rank),
                serve=tuple(sorted(wanted[rank])),
                pull=tuple(pulls.get(rank, ())),
            )
            for rank in sorted(ranks)
        }
        write: int | None = None
        due = self.save_every and version and version % self.save_every == 0
        if due and ready and mark not in (self.disk, EARLIER):
            write = ready[0]
        lost = max(0, self.committed - version)
        self.committed = version
        self._line = {old: at for old, at in self._line.items() if at < version or old == mark}
        self._round += 1
        self._open = self._begun = True
        self._settled = False
        self._members = members
        self._sources = {
            rank: source.rank
            for rank, source in sources.items()
            if source is not None and source.rank != rank
        }
        for each in ranks.values():
            each.asked = False
            each.arrived = None
        direct = all(ranks[rank].direct for rank in members)
        return [
            Begin(self._round, version, mark, owners, complete, roles, keep, lost, direct, write)
        ]

    def _newest(self) -> tuple[int, dict[int, list[int]]] | None:
        """Return the newest mark that every position has, and its holders by position."""
        holders: dict[State, list[int]] = {}
        for rank, each in sorted(self._ranks.items()):
            states = set(each.stock)
            if each.mark is not None:
                states.add((rank % self.width, each.mark))
            for state in states:
                holders.setdefault(state, []).append(rank)
        if self.disk is not None:
            for position in range(self.width):
                holders.setdefault((position, self.disk), []).append(DISK)
        places = range(self.width)
        for mark, version in sorted(self._line.items(), key=lambda item: -item[1]):
            if (version or self.committed) and all((at, mark) in holders for at in places):
                return mark, {at: holders[at, mark] for at in places}
        if self.committed:
            return None
        # The beginning: at each position one rank gives its first state to the others.
        first: dict[int, list[int]] = {}
        for rank in sorted(self._ranks):
            first.setdefault(rank % self.width, [rank])
        return 0, {at: holders.get((at, 0), first[at]) for at in range(self.width)}

    def _source(self, rank: int, mark: int, holders: dict[int, list[int]]) -> Source | None:
        each = self._ranks[rank]
        position = rank % self.width
        places = holders[position]
        first = each.mark is None and places == [rank] and (position, mark) not in each.stock
        if each.mark == mark or first:
            return None
        if rank in places:
            return Source(rank, position, mark)
        others = [other for other in places if other != DISK]
        if not others:
            return Source(DISK, position, mark)
        near = [other for other in others if self._ranks[other].host == each.host]
        return Source((near or others)[rank % len(near or others)], position, mark)

    def _copies(self, version: int) -> dict[int, int]:
        """Return the marks of which each position has a snapshot, with their versions.

        Later ones than `version` are of a timeline that ends.
        """
        positions: dict[int, set[int]] = {}
        for each in self._ranks.values():
            for position, mark in each.stock:
                positions.setdefault(mark, set()).add(position)
        return {
            mark: self._line[mark]
            for mark, held in positions.items()
            if len(held) == self.width and self._line.get(mark, version + 1) <= version
        }

    def _holders(self, state: State) -> list[int]:
        return [rank for rank, each in sorted(self._ranks.items()) if state in each.stock]

    def _is_safe(self, state: State) -> bool:
        """Whether a snapshot outlives any one rank and any one host, as far as it can."""
        holders = self._holders(state)
        hosts = {self._ranks[rank].host for rank in holders}
        everywhere = {each.host for each in self._ranks.values()}
        return len(holders) >= min(2, len(self._ranks)) and len(hosts) >= min(2, len(everywhere))

    def _unsafe(self, mark: int) -> list[State]:
        states = [(position, mark) for position in range(self.width)]
        return [state for state in states if not self._is_safe(state)]

    def _pulls(self, version: int) -> dict[int, list[Source]]:
        """Return the snapshots that each rank is to copy from another: the newest of each position.

        A newer one is there only when these were copied, since a commit has waited for them.
        """
        pulls: dict[int, list[Source]] = {}
        copies = self._copies(version) if self.copy_every else {}
        if not copies:
            return pulls
        for state in self._unsafe(max(copies, key=copies.__getitem__)):
            rank = self._holders(state)[0]
            holder = self.neighbour(rank)
            if holder is not None:
                pulls.setdefault(holder, []).append(Source(rank, *state))
        return pulls

    def _keep(self, version: int) -> frozenset[int]:
        """Return the marks of snapshots that are needed: the newest, and the newest safe one."""
        copies = self._copies(version)
        safe = [mark for mark in copies if not self._unsafe(mark)]
        return frozenset(max(marks, key=copies.__getitem__) for marks in (safe, copies) if marks)

    def _prune(self) -> None:
        """Forget old marks, of which no snapshot can be left."""
        limit = 1000 + 10 * max(self.copy_every, self.save_every)
        if len(self._line) > 2 * limit:
            kept = {mark: at for mark, at in self._line.items() if at > self.committed - limit}
            if self.disk is not None:
                kept[self.disk] = self._line[self.disk]
            self._line = kept


def members_at(ranks: Iterable[int], width: int, position: int) -> tuple[int, ...]:
    """Return those of `ranks` that are at `position`: they average with each other.

    >>> members_at([0, 1, 4, 5], 2, 1)
    (1, 5)
    """
    return tuple(rank for rank in ranks if rank % width == position)
