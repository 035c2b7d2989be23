"""A supervisor's decisions: which children are restarted, together with which, when, how often."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch._restarts.policy import Child, Effect, GiveUp, Restarts, Start, Terminate

STRATEGIES = ["one_for_one", "one_for_all", "rest_for_one"]
A, B, C, D = CHILDREN = (0, 0), (0, 1), (1, 0), (1, 1)


def supervisor(
    strategy="one_for_one",
    max_restarts=10,
    within=60.0,
    backoff=1.0,
    max_backoff=8.0,
    min_size=None,
):
    core = Restarts(
        strategy,
        max_restarts=max_restarts,
        within=within,
        backoff=backoff,
        max_backoff=max_backoff,
        min_size=min_size,
    )
    assert [] == core.add_children(0, [0, 1]) == core.add_children(1, [0, 1])
    return core


def same(expected: list[Effect], actual: list[Effect]) -> None:
    """Compare with the types: effects are tuples, and tuples of two types may be equal."""
    assert expected == actual
    assert [type(effect) for effect in expected] == [type(effect) for effect in actual]


# --------------------------------------------------------------------------------------------------
# Strategies
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "failed", "terminated", "started"),
    [
        ("one_for_one", {B}, (), (B,)),
        ("one_for_one", {C, A}, (), (A, C)),
        ("one_for_all", {B}, (D, C, A), (A, B, C, D)),
        ("one_for_all", {A, B, C, D}, (), (A, B, C, D)),
        ("rest_for_one", {D}, (), (D,)),
        ("rest_for_one", {B}, (D, C), (B, C, D)),
        ("rest_for_one", {D, B}, (C,), (B, C, D)),
        ("rest_for_one", {A}, (D, C, B), (A, B, C, D)),
    ],
)
def test_strategy(strategy, failed, terminated, started) -> None:
    core = supervisor(strategy)
    effects = core.children_failed(failed, 1.0)
    if terminated:
        same([Terminate(terminated)], effects)
        *_, effects = [core.child_stopped(child, 2.0) for child in terminated]
    same([Start(started)], effects)
    assert core.deadline is None


def test_the_group_waits_for_the_last_that_ends() -> None:
    core = supervisor("one_for_all")
    core.child_failed(A, 1.0)
    assert core.child_stopped(D, 1.1) == []
    assert core.deadline is None
    assert core.tick(100.0) == []
    assert core.child_stopped(B, 100.0) == []
    same([Start(CHILDREN)], core.child_stopped(C, 101.0))


def test_failures_of_those_that_are_being_terminated_are_no_faults() -> None:
    core = supervisor("one_for_all", max_restarts=1)
    core.child_failed(A, 1.0)
    assert core.children_failed({B, C}, 1.0) == []
    same([Start(CHILDREN)], core.child_failed(D, 1.0))


def test_an_earlier_failure_widens_a_pending_restart() -> None:
    core = supervisor("rest_for_one")
    same([Terminate((D,))], core.child_failed(C, 1.0))
    same([Terminate((B,))], core.child_failed(A, 1.0))
    assert core.child_stopped(D, 1.0) == []
    same([Start(CHILDREN)], core.child_stopped(B, 1.0))


def test_a_failure_while_starting_takes_the_group_down_again() -> None:
    core = supervisor("one_for_all")
    core.children_failed(CHILDREN, 1.0)
    core.child_started(A, 1.5)
    same([Terminate((D, C, A))], core.child_failed(B, 2.0))
    core.child_started(C, 2.5)  # crossed our request; C still stops
    for child in (A, C, D):
        assert core.child_stopped(child, 2.5) == []
    assert core.deadline == 3.0  # the second failure in a row: one back-off
    same([Start(CHILDREN)], core.tick(3.0))


# --------------------------------------------------------------------------------------------------
# Intensity
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_restarts_allowed(strategy) -> None:
    core = supervisor(strategy, max_restarts=0)
    same([Terminate((D, C, A))], core.child_failed(B, 1.0))
    assert core.giving_up
    assert core.child_failed(A, 1.0) == []
    assert core.child_stopped(C, 1.0) == []
    same([GiveUp(B)], core.child_stopped(D, 1.0))
    assert [] == core.child_stopped(D, 1.0) == core.tick(1000.0)
    assert core.deadline is None


def test_window_is_closed() -> None:
    """A fault exactly `within` seconds old still counts; an older one does not."""
    for second, given_up in [(70.0, True), (70.1, False)]:
        core = supervisor(max_restarts=1, within=60.0)
        core.child_failed(A, 10.0)
        core.child_failed(B, second)
        assert core.giving_up == given_up


def test_one_event_is_one_fault() -> None:
    core = supervisor(max_restarts=1)
    same([Start((A, B))], core.children_failed({B, A}, 1.0))
    assert not core.giving_up
    core.children_failed({A, B}, 2.0)
    assert core.giving_up


def test_giving_up_waits_for_those_that_end_already() -> None:
    core = supervisor("rest_for_one", max_restarts=1)
    same([Terminate((D,))], core.child_failed(C, 1.0))
    same([Terminate((B,))], core.child_failed(A, 1.0))
    assert core.child_stopped(B, 1.0) == []
    same([GiveUp(A)], core.child_stopped(D, 1.0))


def test_children_that_come_too_late_are_terminated() -> None:
    core = supervisor(max_restarts=0)
    core.children_failed({A, B, C}, 1.0)
    same([Terminate(((2, 1), (2, 0)))], core.add_children(2, [0, 1]))
    assert [] == core.child_stopped(D, 1.0) == core.child_stopped((2, 1), 1.0)
    same([GiveUp(A)], core.child_stopped((2, 0), 1.0))
    same([Terminate(((3, 0),))], core.add_children(3, [0]))
    assert core.child_stopped((3, 0), 1.0) == []


# --------------------------------------------------------------------------------------------------
# Back-off
# --------------------------------------------------------------------------------------------------


def test_backoff_doubles_up_to_its_limit_and_is_a_childs_own() -> None:
    core = supervisor(backoff=1.0, max_backoff=5.0)
    same([Start((A,))], core.child_failed(A, 0.0))
    now = 0.0
    for delay in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert core.child_failed(A, now) == []
        assert core.deadline == now + delay
        assert core.tick(now + delay - 0.5) == []
        now += delay
        same([Start((A,))], core.tick(now))
    same([Start((B,))], core.child_failed(B, now))


@pytest.mark.parametrize(
    ("ran", "delay", "within"),
    [(7.9, 1.0, 60.0), (8.0, 0.0, 60.0), (4.9, 1.0, 5.0), (5.0, 0.0, 5.0)],
)
def test_a_long_run_clears_the_record(ran, delay, within) -> None:
    core = supervisor(within=within, backoff=1.0, max_backoff=8.0)
    core.child_failed(A, 0.0)
    core.child_started(A, 10.0)
    effects = core.child_failed(A, 10.0 + ran)
    assert core.deadline == (10.0 + ran + delay if delay else None)
    same([] if delay else [Start((A,))], effects)


def test_children_replaced_for_another_do_not_pay() -> None:
    core = supervisor("one_for_all", backoff=1.0)
    for _ in range(2):
        core.child_failed(A, 0.0)
        for child in (D, C, B):
            core.child_stopped(child, 0.0)
        core.tick(1.0)
    core.child_failed(B, 1.0)
    for child in (D, C):
        core.child_stopped(child, 1.0)
    same([Start(CHILDREN)], core.child_stopped(A, 1.0))


def test_a_group_waits_for_the_longest_delay() -> None:
    core = supervisor("one_for_all", backoff=1.0)
    core.children_failed(CHILDREN, 0.0)
    core.children_failed({A}, 0.0)
    for child in (D, C, B):
        core.child_stopped(child, 0.25)
    assert core.deadline == 1.0
    same([Start(CHILDREN)], core.tick(1.0))


# --------------------------------------------------------------------------------------------------
# Deliberate stops
# --------------------------------------------------------------------------------------------------


def test_a_child_that_was_stopped_stays_so() -> None:
    core = supervisor("one_for_all")
    assert core.child_stopped(B, 0.0) == []
    same([Terminate((D, C))], core.child_failed(A, 1.0))
    core.child_stopped(D, 1.0)
    same([Start((A, C, D))], core.child_stopped(C, 1.0))


def test_a_stop_calls_off_a_restart_that_is_due_later() -> None:
    core = supervisor()
    core.child_failed(A, 0.0)
    core.child_failed(A, 0.0)
    assert core.deadline == 1.0
    assert core.child_stopped(A, 0.5) == []
    assert core.deadline is None


def test_nobody_waits_for_a_mesh_that_was_removed() -> None:
    core = supervisor("one_for_all")
    core.child_failed(A, 0.0)
    core.child_stopped(B, 0.0)
    same([Start((A, B))], core.remove(1, 1.0))
    assert core.child_failed(C, 1.0) == []
    assert core.remove(0, 1.0) == []


def test_reports_about_strangers_are_no_news() -> None:
    core = supervisor("one_for_all", max_restarts=0)
    assert [] == core.child_failed((7, 7), 0.0) == core.child_stopped((7, 7), 0.0)
    core.child_started((7, 7), 0.0)
    assert not core.giving_up


# --------------------------------------------------------------------------------------------------
# Children without a place
# --------------------------------------------------------------------------------------------------


def lose(core: Restarts, *children: Child, now: float = 1.0) -> list[Effect]:
    """Let children fail, and turn out to have no host when they are to be started."""
    effects = core.children_failed(children, now)
    for effect in list(effects):
        if isinstance(effect, Terminate):
            for child in effect.children:
                effects += core.child_stopped(child, now)
    return core.children_vacant(children, now)


@pytest.mark.parametrize(
    ("strategy", "terminated"),
    [("one_for_one", ()), ("rest_for_one", (D, C)), ("one_for_all", (D, C, A))],
)
def test_a_vacant_child_is_started_when_there_is_a_place(strategy, terminated) -> None:
    core = supervisor(strategy, max_restarts=1, min_size=1)
    assert lose(core, B) == []
    for child in (A, C, D):
        core.child_started(child, 1.5)
    assert core.settled
    assert core.is_vacant(B)
    assert not core.runs(B)
    effects = core.children_placed({B}, 500.0)
    if terminated:
        same([Terminate(terminated)], effects)
        *_, effects = [core.child_stopped(child, 500.0) for child in terminated]
    same([Start(tuple(sorted({B, *terminated})))], effects)
    assert not core.giving_up  # growing is no fault


@pytest.mark.parametrize("min_size", [None, 2])
def test_a_mesh_that_becomes_too_small_is_given_up(min_size) -> None:
    core = supervisor(max_restarts=5, min_size=min_size)
    core.child_failed(B, 1.0)
    same([Terminate((D, C, A))], core.children_vacant({B}, 1.0))
    assert core.children_placed({B}, 1.0) == []
    for child in (A, C):
        assert core.child_stopped(child, 2.0) == []
    same([GiveUp(B)], core.child_stopped(D, 2.0))


def test_a_vacant_child_can_be_stopped() -> None:
    core = supervisor(min_size=1)
    lose(core, A)
    assert core.has_children(0)
    assert [] == core.child_stopped(A, 1.0) == core.children_placed({A}, 1.0)
    core.child_stopped(B, 1.0)
    assert not core.has_children(0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_size": 0},
        {"strategy": "all_for_one"},
        {"max_restarts": -1},
        {"within": 0.0},
        {"within": float("nan")},
        {"backoff": -1.0},
        {"backoff": 9.0},
    ],
)
def test_nonsense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        supervisor(**wrong)


# --------------------------------------------------------------------------------------------------
# Any history
# --------------------------------------------------------------------------------------------------

STARTING, UP, ENDING = "starting", "up", "ending"


class Supervised(RuleBasedStateMachine):
    """A model of processes that start, run, fail and stop in any order, driven by the core."""

    @initialize(
        strategy=st.sampled_from(STRATEGIES),
        max_restarts=st.integers(0, 4),
        within=st.sampled_from([1.0, 5.0, 30.0]),
        backoff=st.sampled_from([0.0, 0.5, 4.0]),
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        min_size=st.sampled_from([None, 1, 2]),
    )
    def begin(self, strategy, max_restarts, within, backoff, sizes, min_size) -> None:
        self.strategy, self.max_restarts, self.within = strategy, max_restarts, within
        self.core = Restarts(
            strategy,
            max_restarts=max_restarts,
            within=within,
            backoff=backoff,
            max_backoff=backoff * 4,
            min_size=min_size,
        )
        self.now = 0.0
        self.min_size = min_size
        self.vacant: set[Child] = set()  # the wanted children that have no place
        self.world: dict[Child, str] = {}  # the live incarnation of each child
        self.wanted: set[Child] = set()  # the children that were not stopped deliberately
        self.faults: list[float] = []  # the times of faults that led to a restart
        self.gave_up: Child | None = None
        self.meshes = 0
        for size in sizes:
            self.spawn(size)

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert self.gave_up is None or isinstance(effect, Terminate)
            if isinstance(effect, Terminate):
                assert list(effect.children) == sorted(effect.children, reverse=True)
                for child in effect.children:
                    assert self.world[child] in (STARTING, UP), "asked twice, or already gone"
                    self.world[child] = ENDING
            elif isinstance(effect, Start):
                assert not self.core.giving_up
                assert list(effect.children) == sorted(set(effect.children))
                assert self.wanted.issuperset(effect.children)
                assert not self.vacant.intersection(effect.children)
                assert not self.world.keys() & set(effect.children), "two incarnations of one child"
                if self.strategy != "one_for_one":
                    assert ENDING not in self.world.values(), "the new ones meet the old ones"
                self.world.update(dict.fromkeys(effect.children, STARTING))
            else:
                assert self.core.giving_up
                assert not self.world, "gave up with children left"
                self.gave_up = effect.cause

    @rule(size=st.integers(1, 3))
    @precondition(lambda self: self.meshes < 5)
    def spawn(self, size) -> None:
        mesh, self.meshes = self.meshes, self.meshes + 1
        children = [(mesh, rank) for rank in range(size)]
        self.world.update(dict.fromkeys(children, STARTING))
        self.wanted.update(children)
        self.carry_out(self.core.add_children(mesh, range(size)))

    @rule(data=st.data())
    @precondition(lambda self: self.world)
    def fail(self, data) -> None:
        """Let some processes fail in one event, in any state."""
        dead = data.draw(st.sets(st.sampled_from(sorted(self.world)), min_size=1, max_size=3))
        were = {self.world.pop(child) for child in dead}
        effects = self.core.children_failed(dead, self.now)
        if were != {ENDING} and not self.core.giving_up:
            self.faults.append(self.now)
        self.carry_out(effects)

    @rule(data=st.data())
    @precondition(lambda self: self.wanted - self.world.keys())
    def report_again(self, data) -> None:
        """Report once more that a child which is down has failed; this has no effect."""
        child = data.draw(st.sampled_from(sorted(self.wanted - self.world.keys())))
        self.carry_out(self.core.child_failed(child, self.now))

    @rule(data=st.data())
    @precondition(lambda self: STARTING in self.world.values())
    def come_up(self, data) -> None:
        starting = sorted(child for child, state in self.world.items() if state == STARTING)
        child = data.draw(st.sampled_from(starting))
        self.world[child] = UP
        self.core.child_started(child, self.now)

    @rule(data=st.data())
    @precondition(lambda self: STARTING in self.world.values())
    def find_no_place(self, data) -> None:
        """Let some children that were to be started turn out to have no host."""
        starting = sorted(child for child, state in self.world.items() if state == STARTING)
        lost = data.draw(st.sets(st.sampled_from(starting), min_size=1, max_size=3))
        for child in lost:
            del self.world[child]
        self.vacant |= lost
        was = self.core.giving_up
        effects = self.core.children_vacant(lost, self.now)
        if not was:
            left = self.wanted - self.vacant
            sizes = [sum(child[0] == mesh for child in left) for mesh, _ in lost]
            assert self.core.giving_up == (self.min_size is None or min(sizes) < self.min_size)
        self.carry_out(effects)

    @rule(data=st.data())
    @precondition(lambda self: self.vacant)
    def find_a_place(self, data) -> None:
        placed = data.draw(st.sets(st.sampled_from(sorted(self.vacant)), min_size=1, max_size=3))
        effects = self.core.children_placed(placed, self.now)
        if not self.core.giving_up:
            self.vacant -= placed
        self.carry_out(effects)

    @rule(data=st.data())
    @precondition(lambda self: self.vacant)
    def stop_what_has_no_place(self, data) -> None:
        child = data.draw(st.sampled_from(sorted(self.vacant)))
        self.vacant.discard(child)
        self.wanted.discard(child)
        self.carry_out(self.core.child_stopped(child, self.now))

    @rule(data=st.data())
    @precondition(lambda self: ENDING in self.world.values())
    def end_as_asked(self, data) -> None:
        ending = sorted(child for child, state in self.world.items() if state == ENDING)
        child = data.draw(st.sampled_from(ending))
        del self.world[child]
        self.carry_out(self.core.child_stopped(child, self.now))

    @rule(data=st.data())
    @precondition(lambda self: {STARTING, UP} & set(self.world.values()))
    def stop_deliberately(self, data) -> None:
        alive = sorted(child for child, state in self.world.items() if state != ENDING)
        child = data.draw(st.sampled_from(alive))
        del self.world[child]
        self.wanted.discard(child)
        self.carry_out(self.core.child_stopped(child, self.now))

    @rule(data=st.data())
    def remove(self, data) -> None:
        mesh = data.draw(st.integers(0, self.meshes - 1))
        self.wanted = {child for child in self.wanted if child[0] != mesh}
        self.vacant = {child for child in self.vacant if child[0] != mesh}
        self.world = {child: state for child, state in self.world.items() if child[0] != mesh}
        self.carry_out(self.core.remove(mesh, self.now))

    @rule(step=st.sampled_from([0.1, 0.5, 1.0, 7.0, 40.0]))
    def wait(self, step) -> None:
        self.now += step
        self.carry_out(self.core.tick(self.now))

    @rule()
    @precondition(lambda self: self.core.deadline is not None)
    def wait_for_deadline(self) -> None:
        self.now = max(self.now, self.core.deadline)
        before = self.core.deadline
        self.carry_out(self.core.tick(self.now))
        assert self.core.deadline is None or self.core.deadline > before

    @invariant()
    def intensity_is_kept(self) -> None:
        limit = self.max_restarts
        for first, beyond in zip(self.faults, self.faults[limit:], strict=False):
            assert beyond - first > self.within

    @invariant()
    def somebody_is_at_work(self) -> None:
        """Check that a child that is down is awaited, or that its restart has a deadline."""
        down = self.wanted - self.world.keys() - self.vacant
        if down and not self.core.giving_up:
            assert self.core.deadline is not None or ENDING in self.world.values()

    def teardown(self) -> None:
        """Left alone, either all wanted children come up, or all are down and given up."""
        if not hasattr(self, "core"):
            return
        for child in sorted(self.world):
            if self.world[child] == ENDING:
                del self.world[child]
                self.carry_out(self.core.child_stopped(child, self.now))
        while self.core.deadline is not None:
            self.wait_for_deadline()
        if self.core.giving_up:
            assert self.gave_up is not None
            assert not self.world
        else:
            assert self.wanted == self.world.keys() | self.vacant


TestSupervised = Supervised.TestCase
TestSupervised.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
