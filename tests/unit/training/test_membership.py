"""Membership per step: simulated ranks ask, compute, vote and die in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.training.membership import (
    DISK,
    VOTE,
    Aborted,
    Begin,
    Closed,
    Effect,
    Expelled,
    Failed,
    Membership,
    Released,
    Source,
)


class Simulated:
    """A rank as the protocol wants it. `state` is the list of the rounds that it has applied."""

    def __init__(self, world: World, rank: int, ticket: int) -> None:
        self.world, self.rank, self.ticket = world, rank, ticket
        self.position = rank % world.core.width
        self.state: tuple[int, ...] | None = None
        self.snapshots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.asleep = True  # it is about to act, else it waits for an answer
        self.round, self.phase = 0, -1  # -1: it is about to ask
        self.stuck = False
        self.over = False

    @property
    def mark(self) -> int | None:
        return None if self.state is None else (0, *self.state)[-1]

    @property
    def done(self) -> bool:
        return self.state is not None and len(self.state) >= self.world.goal

    def act(self) -> None:
        self.asleep = False
        core = self.world.core
        if self.phase >= 0:
            vote: bool | None = self.world.chance.random() > self.world.doubt
            if self.done:
                vote, self.phase = None, VOTE  # a newcomer got the last step: nothing to compute
            self.world.perform(
                core.arrive(self.rank, self.ticket, self.round, self.phase, vote, "")
            )
            return
        every = core.copy_every
        if every and self.state and len(self.state) % every == 0:
            self.snapshots[self.position, self.state[-1]] = self.state
        host = f"host{self.rank // 2}"
        self.world.perform(
            core.ask(
                self.rank,
                self.ticket,
                self.mark,
                host=host,
                done=self.done,
                stock=tuple(self.snapshots),
            )
        )


class World:
    """Ranks around one core, and what has to hold at each of its effects."""

    def __init__(
        self, seed: int, core: Membership, goal: int, doubt: float = 0.0, slow: bool = False
    ) -> None:
        self.chance, self.core, self.goal, self.doubt = random.Random(seed), core, goal, doubt
        self.slow = slow  # copies of neighbours take a while
        # The states that each rank is about to copy, with the round that ordered them.
        self.copies: dict[int, tuple[int, dict[tuple[int, int], tuple[int, ...]]]] = {}
        self.ranks: dict[int, Simulated] = {}
        self.tickets = 0
        self.fenced: set[int] = set()
        self.round: Begin | None = None
        self.history: list[Effect] = []
        self.closed = False
        self.failed = ""
        for rank in range(core.groups * core.width):
            self.start(rank)

    def start(self, rank: int) -> None:
        self.tickets += 1
        self.ranks[rank] = Simulated(self, rank, self.tickets)

    def kill(self, rank: int) -> None:
        old = self.ranks.pop(rank)
        self.copies.pop(rank, None)
        self.fenced.add(old.ticket)
        self.perform(self.core.lost(rank, old.ticket, f"rank {rank} was killed"))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.history.append(effect)
            getattr(self, f"on_{type(effect).__name__.lower()}")(effect)

    def on_begin(self, effect: Begin) -> None:
        self.round = effect
        lent = {rank: self.lend(rank, effect) for rank in effect.roles}
        members = [rank for rank, role in effect.roles.items() if role.member]
        assert len(members) == len(effect.groups) * self.core.width >= self.core.min_groups
        assert set(effect.owners) <= set(effect.groups)
        for rank, role in effect.roles.items():
            mine = self.ranks[rank]  # else a rank that is not there would get an answer
            assert not mine.asleep
            assert role.shares == () or role.member
            if role.source is not None and role.source.rank != DISK:
                source = role.source
                assert (source.position, source.mark) in effect.roles[source.rank].serve
                mine.state = lent[source.rank][source.position, source.mark]
            elif role.member and mine.state is None:
                mine.state = ()
            if role.pull:
                states = {
                    (each.position, each.mark): lent[each.rank][each[1:]] for each in role.pull
                }
                self.copies[rank] = (effect.round, states)
            if self.core.copy_every and not effect.version and role.source is None and role.member:
                mine.snapshots[mine.position, 0] = ()
            mine.snapshots = {
                key: state
                for key, state in mine.snapshots.items()
                if key[1] in effect.keep or key[1] in {pull.mark for pull in role.pull}
            }
            assert not role.member or mine.mark == effect.mark
            assert not role.member or len(mine.state or ()) == effect.version
            mine.asleep = True
            mine.round, mine.phase = effect.round, 0 if role.member else -1
        shares = [share for rank in members[:: self.core.width] for share in self.shares(rank)]
        assert sorted(shares) == list(range(len(effect.owners)))
        for position in range(self.core.width):
            at = {self.ranks[rank].state for rank in members if rank % self.core.width == position}
            assert len(at) == 1
        while self.copies and not self.slow:
            self.copy()

    def shares(self, rank: int) -> tuple[int, ...]:
        assert self.round is not None
        return self.round.roles[rank].shares

    def lend(self, rank: int, effect: Begin) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the states that a rank serves; it must have them."""
        mine = self.ranks[rank]
        states = dict(mine.snapshots)
        if mine.mark is not None or effect.version == 0:
            states[mine.position, mine.mark or 0] = mine.state or ()
        return {key: states[key] for key in effect.roles[rank].serve}

    def on_released(self, effect: Released) -> None:
        assert self.round is not None
        assert effect.round == self.round.round
        for rank in effect.ranks:
            mine = self.ranks[rank]
            assert (mine.round, mine.phase, mine.asleep) == (effect.round, effect.phase, False)
            mine.asleep = True
            mine.phase = -1 if effect.phase == VOTE else mine.phase + 1
            if effect.committed:
                assert mine.state is not None
                mine.state = (*mine.state, effect.round)
        if effect.phase == VOTE:
            members = tuple(rank for rank, role in self.round.roles.items() if role.member)
            assert effect.ranks == members
            self.round = None

    def on_aborted(self, effect: Aborted) -> None:
        if self.round is not None and self.round.round == effect.round:
            self.round = None
        for rank in effect.ranks:
            mine = self.ranks[rank]
            if mine.round == effect.round:
                mine.asleep, mine.phase = True, -1

    def on_closed(self, effect: Closed) -> None:
        self.closed = True
        states: dict[int, set[Any]] = {}
        for rank in effect.ranks:
            self.ranks[rank].over = True
            states.setdefault(self.ranks[rank].position, set()).add(self.ranks[rank].state)
        assert all(len(each) == 1 for each in states.values())

    def on_expelled(self, effect: Expelled) -> None:
        self.fenced.add(effect.ticket)
        self.ranks.pop(effect.rank, None)
        self.copies.pop(effect.rank, None)

    def on_failed(self, effect: Failed) -> None:
        self.failed = effect.reason

    def is_copied(self) -> bool:
        """Whether the loss of any one rank leaves a snapshot of every position."""
        held = [key for each in self.ranks.values() for key in each.snapshots]
        positions = range(self.core.width)
        return any(
            all(held.count((position, mark)) >= 2 for position in positions) for _, mark in held
        )

    def copy(self) -> None:
        """Complete a copy that is being made."""
        rank = self.chance.choice(sorted(self.copies))
        mine = self.ranks[rank]
        number, states = self.copies.pop(rank)
        for state, value in states.items():
            why = "no connection" if self.chance.random() < self.doubt else ""
            if not why:
                mine.snapshots[state] = value
            self.perform(self.core.copied(rank, mine.ticket, number, state, why))

    def turn(self) -> bool:
        """Let one rank act, or complete a copy. Return False if all wait."""
        if self.copies and self.chance.random() < 0.03:
            self.copy()
            return True
        able = [each for each in self.ranks.values() if each.asleep and not each.stuck]
        if not able and self.copies:
            self.copy()
            return True
        if not able:
            return False
        self.chance.choice(able).act()
        return True

    def finish(self) -> None:
        """Without further faults, training comes to its end: all groups have the last step."""
        self.doubt = 0.0
        for _ in range(100_000):
            if self.closed or self.failed:
                return
            for rank in range(self.core.groups * self.core.width):
                if rank not in self.ranks:
                    self.start(rank)
            if not self.turn():
                self.perform(self.core.expire())
        raise AssertionError("no progress")


KINDS = st.builds(
    Membership,
    st.integers(1, 4),
    st.integers(1, 3),
    shares=st.sampled_from([0, 1, 4]),
    copy_every=st.sampled_from([0, 1, 3]),
)


@given(KINDS, st.integers(0, 2**32), st.sampled_from([0.0, 0.1]))
@settings(max_examples=200, deadline=None)
def test_every_step_is_applied_by_all_of_its_ranks_or_by_none(
    core: Membership, seed: int, doubt: float
) -> None:
    core.attempts = 1000
    world = World(seed, core, goal=8, doubt=doubt)
    for _ in range(150):
        chance = world.chance.random()
        rank = world.chance.randrange(core.groups * core.width)
        if chance < 0.06 and rank in world.ranks:
            world.kill(rank)
        elif chance < 0.2 and rank not in world.ranks:
            world.start(rank)
        else:
            world.turn()
        if world.closed or world.failed:
            break
    world.finish()

    if world.failed:
        # That is right only if a state was lost.
        assert "state of some ranks is lost" in world.failed or "no rank is left" in world.failed
        return
    states = {each.state for each in world.ranks.values() if each.over}
    assert all(state is not None and len(state) == 8 for state in states)
    # An update that counts was committed, once, and what was rolled back is not in the state.
    committed = [e.round for e in world.history if isinstance(e, Released) and e.committed]
    assert len(set(committed)) == len(committed)
    for state in states:
        assert state is not None
        assert list(state) == sorted(set(state) & set(committed))
    lost = sum(e.rolled_back for e in world.history if isinstance(e, Begin))
    assert len(committed) == 8 + lost


@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_no_step_is_lost_as_long_as_one_group_lives(groups: int, width: int, seed: int) -> None:
    """Kills strike one group after the other, each after the last one has caught up."""
    world = World(seed, Membership(groups, width), goal=12)
    victim = 0
    for _ in range(1000):
        caught_up = world.round is not None and len(world.round.groups) == groups
        if caught_up and world.core.committed and world.chance.random() < 0.2:
            world.kill(victim * width + world.chance.randrange(width))
            victim = (victim + 1) % groups
        for rank in range(groups * width):
            if rank not in world.ranks:
                world.start(rank)
        if world.closed or not world.turn():
            break
    world.finish()

    assert not world.failed
    assert all(e.rolled_back == 0 for e in world.history if isinstance(e, Begin))
    assert len({each.state for each in world.ranks.values() if each.over}) == 1


@given(st.integers(2, 5), st.sampled_from([1, 3]), st.integers(0, 2**32), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_copy_of_a_neighbour_loses_no_more_than_its_age(
    width: int, every: int, seed: int, slow: bool
) -> None:
    """One group, so that no other rank has the state of a rank; one of them dies at a time."""
    world = World(seed, Membership(1, width, copy_every=every), goal=20, slow=slow)
    for _ in range(2000):
        if world.is_copied() and not world.closed and world.chance.random() < 0.02:
            world.kill(world.chance.randrange(width))
        for rank in range(width):
            if rank not in world.ranks:
                world.start(rank)
                mark = len(world.history)
                while not any(isinstance(e, Begin | Closed) for e in world.history[mark:]):
                    assert world.turn()
        if world.closed or not world.turn():
            break
    world.finish()

    assert not world.failed
    # The newest snapshot may not have reached the neighbour yet; the one before it has.
    lost = [e.rolled_back for e in world.history if isinstance(e, Begin)]
    assert max(lost) <= 2 * every - 1


@given(st.integers(1, 2), st.integers(2, 4), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_slow_copies_do_not_pile_up(groups: int, width: int, seed: int) -> None:
    """A rank holds two states, its newest one, and one that it has just got from another."""
    world = World(seed, Membership(groups, width, copy_every=1), goal=60, slow=True)
    safe = 0
    while not world.closed and world.turn():
        for each in world.ranks.values():
            assert len({mark for _, mark in each.snapshots}) <= 4
        if world.is_copied():
            safe += 1
    assert world.closed
    assert safe


class Ranks:
    """Four ranks on two hosts. Both ranks of a position are on one, so their two are not enough."""

    def __init__(self, **options: Any) -> None:
        self.core = Membership(2, 2, **options)
        self.hosts = {0: "one", 1: "two", 2: "one", 3: "two"}
        self.stock: dict[int, set[tuple[int, int]]] = {rank: {(rank % 2, 0)} for rank in range(4)}

    def begin(self, mark: int | None) -> Begin:
        effects: list[Effect] = []
        for rank in range(4):
            if mark is not None and mark % self.core.copy_every == 0:
                self.stock[rank].add((rank % 2, mark))
            effects = self.core.ask(
                rank, rank, mark, host=self.hosts[rank], stock=self.stock[rank] if mark else ()
            )
        (begin,) = effects
        assert isinstance(begin, Begin)
        return begin

    def vote(self, number: int) -> list[Effect]:
        return [
            effect
            for rank in range(4)
            for effect in self.core.arrive(rank, rank, number, VOTE, True)
        ]

    def copy(self, begin: Begin, why: str = "") -> list[Effect]:
        effects: list[Effect] = []
        for rank, role in begin.roles.items():
            for pull in role.pull:
                assert self.hosts[pull.rank] != self.hosts[rank]
                if not why:
                    self.stock[rank].add((pull.position, pull.mark))
                effects += self.core.copied(rank, rank, begin.round, pull[1:], why)
        return effects


def pulls(begin: Begin) -> set[Source]:
    return {pull for role in begin.roles.values() for pull in role.pull}


def test_a_commit_waits_until_the_state_before_it_outlives_a_host() -> None:
    ranks = Ranks(copy_every=1)
    begin = ranks.begin(None)
    for number in (1, 2, 3):
        mark = number - 1
        assert pulls(begin) == {Source(0, 0, mark), Source(1, 1, mark)}
        assert begin.keep == {max(0, mark - 1), mark}
        assert ranks.vote(number) == []
        (released,) = ranks.copy(begin)
        assert isinstance(released, Released)
        assert released.committed
        begin = ranks.begin(number)


def test_copies_have_as_many_steps_as_lie_between_two() -> None:
    ranks = Ranks(copy_every=2)
    begin = ranks.begin(None)
    assert pulls(begin) == {Source(0, 0, 0), Source(1, 1, 0)}
    (released,) = ranks.vote(1)
    assert isinstance(released, Released)
    begin = ranks.begin(1)  # asks again for what is not complete
    assert pulls(begin) == {Source(0, 0, 0), Source(1, 1, 0)}
    assert ranks.vote(2) == []
    assert [type(effect) for effect in ranks.copy(begin)] == [Released]


def test_a_copy_that_fails_voids_the_round_that_needs_it_and_is_made_again() -> None:
    ranks = Ranks(copy_every=1)
    begin = ranks.begin(None)
    assert ranks.vote(1) == []
    (aborted,) = ranks.copy(begin, "no connection")
    assert isinstance(aborted, Aborted)
    assert "rank 2 could not copy the state of position 1: no connection" in aborted.reason
    begin = ranks.begin(0)
    assert len(pulls(begin)) == 2
    ranks.copy(begin)
    (released,) = ranks.vote(2)
    assert isinstance(released, Released)


def test_the_loss_of_a_rank_that_copies_voids_the_round_that_needs_it() -> None:
    """Rank 2 alone would copy position 1 to the other host, and takes no part in the round."""
    ranks = Ranks(copy_every=1)
    ranks.core.lost(3, 3, "killed")
    for rank in (0, 1, 2):
        ranks.core.ask(rank, rank, None, host=ranks.hosts[rank])
    (begin,) = ranks.core.expire()
    assert isinstance(begin, Begin)
    assert begin.groups == (0,)
    puller = next(rank for rank, role in begin.roles.items() if not role.member and role.pull)
    for rank in (0, 1):
        assert ranks.core.arrive(rank, rank, 1, VOTE, True) == []
    aborted, *_ = ranks.core.lost(puller, puller, "killed")
    assert isinstance(aborted, Aborted)
    assert aborted.ranks == (0, 1)


def test_copies_that_never_end_are_given_up_in_time() -> None:
    ranks = Ranks(copy_every=1)
    ranks.begin(None)
    assert ranks.vote(1) == []
    assert ranks.core.waits is not None
    (aborted,) = ranks.core.expire()
    assert isinstance(aborted, Aborted)
    assert "have not copied the states of others in time" in aborted.reason


@given(KINDS, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_ranks_that_hang_are_expelled_and_the_others_go_on(core: Membership, seed: int) -> None:
    core.attempts = 1000
    world = World(seed, core, goal=6)
    for _ in range(200):
        rank = world.chance.randrange(core.groups * core.width)
        if world.chance.random() < 0.05 and rank in world.ranks:
            world.ranks[rank].stuck = True
        elif not world.turn():
            world.perform(core.expire())
        if world.closed or world.failed:
            break
    waits = [each for each in world.ranks.values() if not each.asleep]
    if waits and not world.closed and not world.failed:
        for _ in range(2000):
            if not world.turn():
                if core.waits is None:
                    break
                world.perform(core.expire())
            if world.closed or world.failed:
                break
        # No rank waits without an end: each got an answer.
        assert world.closed or world.failed or core.waits is None


def two(**options: Any) -> Membership:
    core = Membership(2, **options)
    core.ask(0, "a", None)
    core.ask(1, "b", None)
    return core


def commit(core: Membership, number: int) -> None:
    for rank, ticket in enumerate("ab"):
        core.arrive(rank, ticket, number, VOTE, True)


def test_one_vote_against_a_step_voids_it_for_all() -> None:
    core = two()
    core.arrive(0, "a", 1, VOTE, True)
    effects = core.arrive(1, "b", 1, VOTE, False, "no route to rank 0")
    assert [Aborted(1, (0, 1), "rank 1: no route to rank 0")] == effects
    assert core.committed == 0


def test_a_step_that_fails_again_and_again_ends_the_training() -> None:
    core = two(attempts=2)
    core.arrive(1, "b", 1, 0, False, "cannot")
    core.ask(0, "a", 0)
    core.ask(1, "b", 0)
    *_, failed = core.arrive(1, "b", 2, 0, False, "cannot")
    assert isinstance(failed, Failed)
    assert "step 0 failed 2 times in a row" in failed.reason
    assert isinstance(core.ask(0, "a", 0)[-1], Failed)


def test_the_death_of_a_rank_ends_the_wait_of_the_others_at_once() -> None:
    core = two()
    core.arrive(0, "a", 1, 0, True)
    aborted, *rest = core.lost(1, "b", "killed")
    assert (aborted, rest) == (Aborted(1, (0,), "killed"), [])
    (begin,) = core.ask(0, "a", 0)
    assert isinstance(begin, Begin)
    assert begin.groups == (0,)


def test_a_rank_that_was_expelled_is_fenced() -> None:
    core = two()
    core.arrive(0, "a", 1, 0, True)
    assert core.waits is not None
    expelled, aborted = core.expire()
    assert expelled == Expelled(1, "b", "rank 1 was expelled: others waited for it for too long")
    assert isinstance(aborted, Aborted)
    with pytest.raises(PermissionError, match="rank 1 was expelled"):
        core.arrive(1, "b", 1, 0, True)
    with pytest.raises(PermissionError, match="rank 1 was expelled"):
        core.ask(1, "b", 0)


def test_a_rank_that_loads_from_one_that_hangs_is_not_expelled_with_it() -> None:
    core = Membership(3)
    for rank in range(3):
        core.ask(rank, rank, None)
    for rank in range(3):
        core.arrive(rank, rank, 1, VOTE, True)
    core.lost(2, 2, "it was killed")
    for rank, mark in ((3, None), (0, 1), (1, 1)):
        effects = core.ask(min(rank, 2), rank, mark)
    (begin,) = effects
    assert isinstance(begin, Begin)
    assert begin.roles[2].source == Source(0, 0, 1)
    core.arrive(1, 1, begin.round, 0, True)
    expelled = [effect.rank for effect in core.expire() if isinstance(effect, Expelled)]
    assert expelled == [0]
    core.ask(1, 1, 1)
    assert [effect.rank for effect in core.expire() if isinstance(effect, Expelled)] == [2]


def test_a_rank_that_computes_is_not_late_because_a_newcomer_waits() -> None:
    core = Membership(3)
    for rank, ticket in enumerate("abc"):
        core.ask(rank, ticket, None)
    core.lost(2, "c", "killed")
    core.ask(0, "a", 0)
    core.ask(1, "b", 0)
    core.ask(2, "d", None)
    assert core.waits is None


def test_a_newcomer_has_no_share_until_it_has_the_state() -> None:
    core = two()
    commit(core, 1)
    core.lost(1, "b", "killed")
    core.ask(1, "c", None)
    (begin,) = core.ask(0, "a", 1)
    assert isinstance(begin, Begin)
    assert begin.roles[0].shares == (0,)
    assert begin.roles[0].serve == ((0, 1),)
    assert begin.roles[1].source == Source(0, 0, 1)
    assert begin.roles[1].shares == ()


def test_a_fixed_number_of_shares_is_divided_among_those_that_are_there() -> None:
    core = two(shares=3)
    core.lost(1, "b", "killed")
    (begin,) = core.ask(0, "a", 0)
    assert isinstance(begin, Begin)
    assert begin.owners == (0, 0, 0)


def test_the_neighbour_is_on_another_host_if_there_is_one() -> None:
    core = Membership(2, 2)
    for rank, host in enumerate(["x", "x", "y", "y"]):
        core.ask(rank, str(rank), None, host=host)
    assert [core.neighbour(rank) for rank in range(4)] == [2, 2, 0, 0]


def test_a_state_that_was_lost_is_an_error_and_no_start_from_scratch() -> None:
    core = two()
    commit(core, 1)
    for rank, ticket in enumerate("ab"):
        core.lost(rank, ticket, "killed")
    core.ask(0, "c", None)
    (failed,) = core.ask(1, "d", None)
    assert isinstance(failed, Failed)
    assert "the state of some ranks is lost" in failed.reason


def test_a_checkpoint_on_disk_is_the_last_resort() -> None:
    core = two(save_every=1)
    commit(core, 1)
    core.ask(0, "a", 1)
    (begin,) = core.ask(1, "b", 1)
    assert isinstance(begin, Begin)
    assert begin.write == 0
    core.saved(1)
    commit(core, 2)
    for rank, ticket in enumerate("ab"):
        core.lost(rank, ticket, "killed")
    (begin,) = core.ask(0, "c", None)
    assert isinstance(begin, Begin)
    assert (begin.version, begin.rolled_back) == (1, 1)
    assert begin.roles[0].source == Source(DISK, 0, 1)


def test_too_few_groups_end_the_training_after_the_time_for_a_replacement() -> None:
    core = two(min_groups=2)
    core.lost(1, "b", "killed")
    assert core.ask(0, "a", 0) == []
    (failed,) = core.expire()
    assert isinstance(failed, Failed)
    assert "only 1 of 2 replica groups are complete" in failed.reason
    assert "missing ranks: 1" in failed.reason


def test_ranks_average_in_one_way_whatever_the_size_of_their_part() -> None:
    core = Membership(2, width=2)
    for rank, ticket in enumerate("abcd"):
        effects = core.ask(rank, ticket, None, direct=rank % 2 == 0)
    (begin,) = effects
    assert isinstance(begin, Begin)
    assert not begin.direct


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_that_want_different_numbers_of_steps_end_the_training(
    order: tuple[int, int],
) -> None:
    """One waits at the vote for no step, the other at the first barrier of a step."""
    core = two()
    arrivals: dict[int, tuple[str, int, bool | None]] = {0: ("a", VOTE, None), 1: ("b", 0, True)}
    effects: list[Effect] = []
    for rank in order:
        ticket, phase, vote = arrivals[rank]
        effects += core.arrive(rank, ticket, 1, phase, vote)
    aborted, failed = effects
    assert isinstance(aborted, Aborted)
    assert sorted(aborted.ranks) == [0, 1]
    assert isinstance(failed, Failed)
    assert "after 0 steps ranks 0 want no more of them, and ranks 1 do" in failed.reason
    (again,) = core.ask(0, "a", 0)
    assert isinstance(again, Failed)


def test_a_round_whose_ranks_wait_at_different_barriers_is_void() -> None:
    core = two()
    assert core.arrive(0, "a", 1, 0, True) == []
    assert core.arrive(1, "b", 1, 1, True) == []
    (aborted,) = core.expire()
    assert isinstance(aborted, Aborted)
    assert sorted(aborted.ranks) == [0, 1]
    assert not core.failed


def test_the_end_of_a_training_answers_those_that_wait_in_a_round() -> None:
    core = two()
    core.arrive(0, "a", 1, 0, True)
    aborted, failed = core.stop("the script has had enough")
    assert isinstance(aborted, Aborted)
    assert aborted.ranks == (0,)
    assert isinstance(failed, Failed)
    assert core.stop("again") == []
    (late,) = core.arrive(1, "b", 1, 0, True)
    assert isinstance(late, Aborted)
    (told,) = core.ask(1, "b", 0)
    assert isinstance(told, Failed)
    assert told.reason == "the script has had enough"


def test_a_checkpoint_may_become_complete_rounds_later() -> None:
    core = two(save_every=1)
    for number in (1, 2, 3):
        commit(core, number)
        core.ask(0, "a", number)
        core.ask(1, "b", number)
    assert [core.may_save(mark) for mark in (0, 1, 2, 3, 99)] == [False, True, True, True, False]
    core.saved(2)
    assert [core.may_save(mark) for mark in (1, 2, 3)] == [False, False, True]


def test_a_rank_without_a_state_that_comes_after_the_end_is_refused() -> None:
    """No rank is left that could give it the state."""
    core = Membership(2, 1)
    core.closed = True
    (failed,) = core.ask(1, 1, None)
    assert isinstance(failed, Failed)
    assert failed.ranks == (1,)
    assert "training has ended without this rank" in failed.reason
    assert core.closed
