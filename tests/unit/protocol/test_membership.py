"""The membership notifies every process of what it must know, once, in any order of events."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from monarch._engine.base.verdict import FAILED, NOT_CREATED, STOPPED, SYSTEM, Verdict
from monarch._engine.protocol import membership as module
from monarch._engine.protocol.membership import (
    ANSWER_WITHIN,
    Condemn,
    Effect,
    Hand,
    Kill,
    Membership,
    Tell,
)

CLIENT = 1
KILLED = Verdict(FAILED, "killed", SYSTEM, "here", 7, 1.5, ("last words",))


@pytest.fixture
def membership() -> Membership:
    """Make a membership in which the client (1) spawned 10, 11 and 12."""
    membership = Membership(CLIENT)
    assert spawn(membership, CLIENT, 10, 11, 12) == []
    return membership


def spawn(membership: Membership, parent: int, *uids: int, **fields: Any) -> list[Effect]:
    procs = [{"uid": uid, **fields} for uid in uids]
    return membership.spawn(
        parent, procs, "launcher", 0.0, ready_timeout=30, unresponsive_timeout=10
    )


def gone(to: int, *ends: tuple[Any, ...]) -> Tell:
    return Tell(to, {"op": "gone", "procs": [list(end) for end in ends]})


def moved(to: int, old: int, new: int, **more: Any) -> Tell:
    return Tell(to, {"op": "moved", "uid": old, "to": new, **more})


def ended(membership: Membership, *uids: int) -> list[Effect]:
    return membership.ended([(uid, KILLED) for uid in uids])


# -- exits -----------------------------------------------------------------------------------------


def test_a_parent_hears_of_each_end_once(membership: Membership) -> None:
    assert ended(membership, 10, 12) == [gone(CLIENT, (10, *KILLED), (12, *KILLED))]
    assert ended(membership, 10) == []
    assert membership.ended([(10, Verdict(STOPPED, "again"))]) == []
    assert not membership.alive(10)
    assert membership.alive(11)


def test_with_a_proc_go_the_procs_it_spawned(membership: Membership) -> None:
    spawn(membership, 10, 20, 21)
    spawn(membership, 20, 30)
    assert membership.exited([10]) == [Kill([20, 21])]
    assert membership.exited([10, 20]) == [Kill([30])]
    assert ended(membership, 10) == [gone(CLIENT, (10, *KILLED))]
    assert ended(membership, 20, 21, 30) == [], "nothing is told to the gone"


def test_an_end_need_not_be_preceded_by_an_exit(membership: Membership) -> None:
    spawn(membership, 10, 20)
    assert ended(membership, 10) == [Kill([20]), gone(CLIENT, (10, *KILLED))]


def test_an_exit_of_an_unknown_process_or_of_the_client_is_no_exit_of_a_proc(
    membership: Membership,
) -> None:
    assert membership.exited([99, CLIENT]) == []
    assert membership.alive(CLIENT)


def test_a_child_may_end_long_after_its_parent(
    membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    spawn(membership, 10, 20)
    ended(membership, 10)
    for uid in range(100, 120):
        spawn(membership, CLIENT, uid)
        ended(membership, uid)
    assert not membership.knows(10)
    assert ended(membership, 20) == []
    assert membership.autopsy(11, 20, 0) == [gone(11, (20, *KILLED))]


def test_with_the_client_goes_everything(membership: Membership) -> None:
    spawn(membership, 10, 20)
    ended(membership, 11)
    assert membership.client_lost() == [Kill([10, 12, 20])]
    assert ended(membership, 10) == [Kill([20])], "nobody is there to hear it"


def test_a_proc_that_joins_is_a_child_of_the_member_that_started_it(
    membership: Membership,
) -> None:
    """It ends with its parent, whose spawns end with it, and it is told of what it asks about."""
    membership.join(20, 10)
    assert membership.alive(20)
    assert membership.is_ready(20)
    assert spawn(membership, 20, 30) == []
    assert membership.autopsy(20, 11, now=0.0) == []
    assert ended(membership, 11) == [gone(CLIENT, (11, *KILLED)), gone(20, (11, *KILLED))]
    assert membership.exited([20]) == [Kill([30])]
    membership.join(21, 10)
    assert membership.exited([10]) == [Kill([21])]


def test_a_proc_that_has_joined_outlives_the_client(membership: Membership) -> None:
    """It observes itself when its parent ends; a mere shutdown does not end it."""
    membership.join(20, CLIENT)
    assert membership.client_lost() == [Kill([10, 11, 12])]


def test_a_proc_that_has_joined_is_not_given_up_by_its_parent(membership: Membership) -> None:
    """Its parent did not spawn it, and merely hears that the connection is closed."""
    membership.join(20, 10)
    assert membership.autopsy(10, 20, now=0.0) == []
    [notice] = membership.tick(ANSWER_WITHIN)
    assert isinstance(notice, Tell)
    assert notice.to == 10
    assert membership.alive(20)


@pytest.mark.parametrize(("uid", "parent"), [(10, CLIENT), (CLIENT, 10), (20, 99), (20, 12)])
def test_only_a_living_member_has_a_child_join_with_a_new_uid(
    membership: Membership, uid: int, parent: int
) -> None:
    ended(membership, 12)
    with pytest.raises(ValueError, match="a process joins with a uid of its own"):
        membership.join(uid, parent)
    assert not membership.alive(20)


def test_a_kill_spares_the_dead_and_the_client(membership: Membership) -> None:
    membership.exited([11])
    assert membership.kill([CLIENT, 10, 11, 99]) == [Kill([10])]
    assert membership.kill([11]) == []


def test_a_launcher_takes_its_procs_with_it(membership: Membership) -> None:
    membership.spawn(CLIENT, [{"uid": 20}], "other", 0)
    spawn(membership, 10, 30)
    ended(membership, 12)
    effects = membership.launcher_lost("launcher")
    assert [e.uid for e in effects if isinstance(e, Condemn)] == [10, 11, 30]
    assert membership.launcher_lost("launcher") == []
    assert membership.alive(20)
    assert ended(membership, 10, 11, 30) == [gone(CLIENT, (10, *KILLED), (11, *KILLED))]


# -- a client that is away -------------------------------------------------------------------------


def away(to: int) -> Tell:
    return Tell(to, {"op": "away", "uid": CLIENT, "end": [*module._AWAY]})


def back(to: int) -> Tell:
    return Tell(to, {"op": "back", "uid": CLIENT})


def test_who_asks_for_a_client_that_is_away_hears_of_its_return(membership: Membership) -> None:
    assert membership.autopsy(10, CLIENT, 0) == [], "it may be about to go"
    assert membership.client_left() == [away(10)]
    assert membership.autopsy(11, CLIENT, 0.1) == [away(11)]
    assert membership.introduce(12, CLIENT) == [], "nobody is there to take it"
    assert membership.tick(10) == []
    assert membership.client_returned() == [back(10), back(11)]
    assert membership.introduce(12, CLIENT) == [Hand(CLIENT, 12)]


def test_procs_of_a_client_that_is_away_live_and_die_alone(membership: Membership) -> None:
    assert membership.client_left() == []
    assert ended(membership, 10) == [], "nobody is there to hear it"
    spawn(membership, 11, 20)
    assert membership.client_returned() == []
    assert membership.autopsy(CLIENT, 10, 0) == [gone(CLIENT, (10, *KILLED))], "it asks"
    assert ended(membership, 11) == [Kill([20]), gone(CLIENT, (11, *KILLED))]


def test_a_question_about_a_client_that_returns_is_answered_by_its_return(
    membership: Membership,
) -> None:
    membership.autopsy(10, CLIENT, 0)
    membership.autopsy(11, CLIENT, 0)
    ended(membership, 11)
    assert membership.client_left() == [away(10)]
    assert membership.client_returned() == [back(10)]
    assert membership.tick(10) == []


def test_who_was_late_to_lose_the_old_client_is_led_to_the_new_one(membership: Membership) -> None:
    membership.client_left()
    membership.client_returned()
    assert membership.autopsy(10, CLIENT, 0) == [away(10), back(10)]
    assert membership.tick(10) == []


def test_the_gone_do_not_hear_of_a_return(membership: Membership) -> None:
    membership.client_left()
    membership.autopsy(10, CLIENT, 0)
    ended(membership, 10)
    assert membership.client_returned() == []


def test_a_client_that_stays_away_takes_everything_along(membership: Membership) -> None:
    spawn(membership, 10, 20)
    membership.client_left()
    assert membership.client_lost() == [Kill([10, 11, 12, 20])]


# -- questions -------------------------------------------------------------------------------------


def test_an_autopsy_is_answered_with_the_end(membership: Membership) -> None:
    assert membership.autopsy(11, 10, 0) == []
    assert membership.autopsy(11, 10, 0.1) == [], "the same question"
    assert ended(membership, 10) == [gone(CLIENT, (10, *KILLED)), gone(11, (10, *KILLED))]
    assert membership.tick(10) == []


def test_an_autopsy_of_the_gone_is_answered_at_once(membership: Membership) -> None:
    ended(membership, 10)
    assert membership.autopsy(11, 10, 0) == [gone(11, (10, *KILLED))]
    (answer,) = membership.autopsy(11, 99, 0)
    assert "does not exist" in answer.notice["procs"][0][2]


def test_an_autopsy_of_the_living_is_answered_in_time(membership: Membership) -> None:
    """Proc 10 closed one link: only that peer treats it as lost."""
    membership.autopsy(11, 10, 5)
    assert membership.deadline == 5 + ANSWER_WITHIN
    assert membership.tick(5) == []
    (answer,) = membership.tick(membership.deadline)
    assert answer.to == 11
    assert answer.notice["procs"][0][:2] == [10, FAILED]
    assert membership.alive(10)
    assert ended(membership, 10) == [gone(CLIENT, (10, *KILLED))], "one answer to one question"


def test_each_question_has_its_own_time(membership: Membership) -> None:
    membership.autopsy(11, 10, 0)
    membership.autopsy(11, 10, 0.5)
    assert len(membership.tick(ANSWER_WITHIN)) == 1
    assert membership.autopsy(11, 10, 1.2) == []
    assert membership.tick(1.5) == []
    assert len(membership.tick(1.2 + ANSWER_WITHIN)) == 1


def test_an_owner_that_cannot_reach_its_proc_gives_it_up(membership: Membership) -> None:
    membership.autopsy(CLIENT, 10, 0)
    (effect,) = membership.tick(ANSWER_WITHIN)
    assert isinstance(effect, Condemn)
    assert effect.uid == 10
    assert ended(membership, 10) == [gone(CLIENT, (10, *KILLED))]


def test_who_is_known_to_be_ending_is_waited_for(membership: Membership) -> None:
    """The remaining output of the proc is still being read, which may take longer."""
    membership.autopsy(11, 10, 0)
    membership.exited([10])
    assert membership.tick(10) == []
    assert ended(membership, 10) == [gone(CLIENT, (10, *KILLED)), gone(11, (10, *KILLED))]


def test_the_dead_get_no_answers(membership: Membership) -> None:
    membership.autopsy(11, 10, 0)
    ended(membership, 11)
    assert membership.tick(10) == []
    assert membership.autopsy(11, 12, 0) == []
    assert membership.autopsy(11, 99, 0) == []
    assert ended(membership, 10) == [gone(CLIENT, (10, *KILLED))]


def test_only_the_last_ends_are_remembered(
    membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 10)
    for uid in range(100, 120):
        spawn(membership, CLIENT, uid)
        membership.introduce(11, uid)
        ended(membership, uid)
    assert len(membership._members) <= 10 + 1
    assert membership._members[11].known == {}
    assert [*membership._members[CLIENT].children] == [10, 11, 12]
    assert membership.autopsy(11, 119, 0) == [gone(11, (119, *KILLED))]
    assert "does not exist" in str(membership.autopsy(11, 100, 0))
    assert all(membership.alive(uid) for uid in (CLIENT, 10, 11, 12))


# -- introductions ---------------------------------------------------------------------------------


def test_a_link_goes_to_the_living(membership: Membership) -> None:
    assert membership.introduce(10, 11) == [Hand(11, 10)]
    assert membership.introduce(10, CLIENT) == [Hand(CLIENT, 10)]
    membership.exited([11])
    assert membership.introduce(10, 11) == []
    assert membership.introduce(10, 99) == []


def test_a_guest_that_has_left_is_no_acquaintance(membership: Membership) -> None:
    membership.admit(50)
    assert membership.introduce(50, 10) == [Hand(10, 50)]
    assert membership.left(50) == []
    assert not membership.alive(50)
    assert membership._members[10].known == {}
    assert membership.left(50) == membership.left(99) == membership.left(10) == []
    assert membership.autopsy(10, 50, 0) == [gone(10, (50, *module._LEFT))]
    assert membership.alive(10)
    assert ended(membership, 10) == [gone(CLIENT, (10, *KILLED))]


# -- spawns ----------------------------------------------------------------------------------------


def test_a_command_must_become_a_proc(membership: Membership) -> None:
    spawn(membership, CLIENT, 20, 21, 22, command={})
    assert membership.is_ready(10), "no command"
    assert membership.is_ready(CLIENT)
    membership.admit(50)
    assert membership.is_ready(50)
    assert not membership.is_ready(99)
    assert not membership.is_ready(20)
    membership.ready(99)
    membership.ready(20)
    assert membership.is_ready(20)
    assert not membership.is_ready(21)
    assert membership.deadline == 30
    assert membership.tick(29.9) == []
    membership.exited([21])
    (effect,) = membership.tick(30)
    assert isinstance(effect, Condemn)
    assert effect.uid == 22
    assert effect.error.startswith("error creating proc")
    assert effect.code == NOT_CREATED
    assert "host_spawn_ready_timeout" in effect.error
    assert membership.deadline == math.inf


def test_a_spawn_reads_its_procs_once(membership: Membership) -> None:
    membership.spawn(CLIENT, ({"uid": uid} for uid in (20, 21)), "launcher", 0)
    assert membership.alive(20)
    assert membership.alive(21)


@pytest.mark.parametrize(
    ("parent", "procs"),
    [
        (99, [{"uid": 20}]),
        (CLIENT, [{"uid": 20}, {"uid": 10}]),
        (CLIENT, [{"uid": 20}, {"uid": 20}]),
        (CLIENT, [{"uid": 20, "replaces": CLIENT}]),
        (10, [{"uid": 20, "replaces": 10}]),
        (CLIENT, [{"uid": 20, "replaces": 10}, {"uid": 21, "replaces": 10}]),
    ],
)
def test_a_spawn_that_cannot_be_changes_nothing(
    membership: Membership, parent: int, procs: list[dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=r"proc"):
        membership.spawn(parent, procs, "launcher", 0)
    assert not membership.alive(20)
    assert membership.client_lost() == [Kill([10, 11, 12])]


def test_the_dead_do_not_spawn(membership: Membership) -> None:
    membership.exited([10])
    with pytest.raises(ValueError, match="cannot spawn"):
        spawn(membership, 10, 20)


# -- stopped processes -----------------------------------------------------------------------------


def test_a_proc_that_stays_stopped_is_given_up(membership: Membership) -> None:
    membership.stopped(10, "SIGSTOP", 5)
    assert membership.tick(14.9) == []
    (effect,) = membership.tick(15)
    assert isinstance(effect, Condemn)
    assert effect.uid == 10
    assert "became unresponsive and is assumed dead" in effect.error
    assert "SIGSTOP" in effect.error
    assert "10 s" in effect.error
    assert not membership.alive(10)


def test_a_proc_that_goes_on_in_time_lives(membership: Membership) -> None:
    membership.stopped(10, "SIGSTOP", 5)
    membership.continued(10)
    membership.stopped(10, "SIGTSTP", 12)
    assert membership.tick(15) == []
    membership.continued(10)
    assert membership.tick(22) == []
    assert membership.alive(10)


def test_time_in_which_nobody_ran_does_not_count(membership: Membership) -> None:
    """The agent was stopped too, so the notice that proc 10 continues may still be in transit."""
    membership.stopped(10, "SIGSTOP", 5)
    assert membership.tick(100) == []
    assert membership.deadline == 110
    assert isinstance(membership.tick(110)[0], Condemn)


def test_who_is_stopped_may_also_end(membership: Membership) -> None:
    membership.stopped(10, "SIGSTOP", 5)
    ended(membership, 10)
    assert membership.tick(15) == []
    membership.stopped(10, "SIGSTOP", 20)
    membership.continued(10)
    membership.stopped(99, "SIGSTOP", 20)
    membership.continued(99)
    assert membership.deadline == math.inf


def test_patience_may_be_endless(membership: Membership) -> None:
    membership.spawn(CLIENT, [{"uid": 20}], "launcher", 0)
    membership.stopped(20, "SIGSTOP", 5)
    assert membership.deadline == math.inf


def test_a_tick_may_be_a_second_late(membership: Membership) -> None:
    membership.stopped(10, "SIGSTOP", 5)
    assert isinstance(membership.tick(16)[0], Condemn)


def test_families_are_the_procs_of_this_host(membership: Membership) -> None:
    membership.admit(50)
    spawn(membership, 50, 60)
    ended(membership, 12)
    assert membership.families() == [(10, CLIENT), (11, CLIENT), (12, CLIENT), (60, 50)]


# -- restarts --------------------------------------------------------------------------------------


def test_who_had_to_do_with_the_old_one_hears_of_the_new_one(membership: Membership) -> None:
    spawn(membership, CLIENT, 13, 14)
    membership.introduce(11, 10)
    membership.introduce(10, 12)
    ended(membership, 10)
    membership.autopsy(13, 10, 0)
    membership.autopsy(12, 10, 0)
    assert spawn(membership, CLIENT, 20, replaces=10) == [
        gone(11, (10, *KILLED)),  # 11 has not asked about the exit yet
        moved(CLIENT, 10, 20),
        moved(13, 10, 20),
        moved(12, 10, 20),
        moved(11, 10, 20),
    ]
    assert membership.autopsy(14, 10, 0) == [gone(14, (10, *KILLED)), moved(14, 10, 20)]


def test_the_old_one_is_ended_first(membership: Membership) -> None:
    membership.introduce(11, 10)
    assert spawn(membership, CLIENT, 20, replaces=10) == [Kill([10])]
    assert ended(membership, 10) == [
        gone(CLIENT, (10, *KILLED)),
        gone(11, (10, *KILLED)),
        moved(CLIENT, 10, 20),
        moved(11, 10, 20),
    ]


def test_an_introduction_to_the_old_one_goes_to_the_newest(membership: Membership) -> None:
    ended(membership, 10)
    spawn(membership, CLIENT, 20, replaces=10)
    assert membership.introduce(11, 10) == [Hand(20, 11), moved(11, 10, 20, handed=True)]
    ended(membership, 20)
    assert membership.introduce(11, 10) == []
    effects = spawn(membership, CLIENT, 30, replaces=10)
    assert moved(11, 20, 30) in effects
    assert membership.introduce(12, 10) == [Hand(30, 12), moved(12, 10, 30, handed=True)]
    assert membership.introduce(12, 20) == [Hand(30, 12), moved(12, 20, 30, handed=True)]


def test_a_stream_to_the_old_one_goes_to_nobody(membership: Membership) -> None:
    """A stream refers to memory of the replaced proc."""
    assert membership.introduce(11, 10, stream=True) == [Hand(10, 11)]
    ended(membership, 10)
    spawn(membership, CLIENT, 20, replaces=10)
    assert membership.introduce(11, 10, stream=True) == []
    assert membership.introduce(11, 20, stream=True) == [Hand(20, 11)]


def test_a_successor_that_looks_for_the_one_before_finds_itself(membership: Membership) -> None:
    ended(membership, 10)
    spawn(membership, CLIENT, 20, replaces=10)
    assert membership.introduce(20, 10) == [Hand(20, 20), moved(20, 10, 20, handed=True)]
    assert ended(membership, 20) == [gone(CLIENT, (20, *KILLED))]


def test_who_was_refused_by_the_old_one_hears_of_the_new_one(membership: Membership) -> None:
    """Proc 11 interacted with the old proc, although its question has been answered."""
    membership.autopsy(11, 10, 0)
    assert len(membership.tick(ANSWER_WITHIN)) == 1
    ended(membership, 10)
    effects = spawn(membership, CLIENT, 20, replaces=10)
    assert effects == [gone(11, (10, *KILLED)), moved(CLIENT, 10, 20), moved(11, 10, 20)]


def test_those_before_it_may_have_ended_before_these_books_were_begun(
    membership: Membership,
) -> None:
    other = Verdict(FAILED, "another reason")
    ended(membership, 10)
    assert spawn(membership, CLIENT, 20, lost=[[9, *other], [10, *other]]) == []
    assert membership.autopsy(11, 9, 0) == [gone(11, (9, *other)), moved(11, 9, 20)]
    assert membership.autopsy(12, 10, 0) == [gone(12, (10, *KILLED)), moved(12, 10, 20)]
    assert membership.introduce(11, 9) == [Hand(20, 11), moved(11, 9, 20, handed=True)]
    assert not membership.alive(9)
    assert membership.kill([9]) == []
    assert (9, 0) in membership.families(), "its parent is not known"


# -- any order -------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """A driver of the membership's calls, which records the notices that every process receives."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(CLIENT)
        self.now = 0.0
        self.uids = [CLIENT]
        self.parents = {CLIENT: 0}
        self.state: dict[int, str] = {CLIENT: "runs"}
        self.killed: set[int] = set()
        self.open: dict[tuple[int, int], float] = {}  # (asker, uid) -> when it asked
        # (parent, child): exits that parents were notified of.
        self.told: list[tuple[int, int]] = []
        # (parent, child): exits that parents must be notified of.
        self.due: set[tuple[int, int]] = set()
        self.replaced: dict[int, int] = {}
        self.met: dict[int, set[int]] = {}
        self.moved: set[tuple[int, int]] = set()

    def runs(self, uid: int) -> bool:
        return self.state.get(uid) == "runs"

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                assert self.runs(effect.to), "told to the gone"
                if effect.notice["op"] == "gone":
                    for uid, *_ in effect.notice["procs"]:
                        self.hears(effect.to, uid)
                else:
                    self.moved.add((effect.to, effect.notice["uid"]))
            elif isinstance(effect, Hand):
                assert self.runs(effect.to), "handed to the gone"
            elif isinstance(effect, Kill):
                assert all(self.runs(uid) for uid in effect.uids), "a kill of the gone"
                assert CLIENT not in effect.uids
                self.killed.update(effect.uids)
            else:
                assert self.runs(effect.uid), "condemned, though gone"
                self.state[effect.uid] = "exited"

    def hears(self, to: int, uid: int) -> None:
        asked = self.open.pop((to, uid), None)
        if self.parents.get(uid) == to:
            self.told.append((to, uid))
        elif asked is None:
            assert uid in self.replaced, "an answer to no question"
            assert to in self.met.get(uid, ()), "news of a stranger"

    def someone(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([uid for uid in self.uids if self.runs(uid)]))

    @rule(data=st.data(), count=st.integers(1, 3), command=st.booleans(), replace=st.booleans())
    def spawn(self, data: st.DataObject, count: int, command: bool, replace: bool) -> None:
        parent = self.someone(data)
        procs: list[dict[str, Any]] = []
        for _ in range(count):
            uid = len(self.uids) + 1
            self.uids.append(uid)
            procs.append({"uid": uid, **({"command": {}} if command else {})})
        if replace and len(self.uids) > count + 1:
            old = data.draw(st.sampled_from(self.uids[1:-count]))
            while old in self.replaced:
                old = self.replaced[old]
            if old not in (parent, CLIENT):
                procs[0]["replaces"] = old
                self.replaced[old] = procs[0]["uid"]
        for proc in procs:
            self.parents[proc["uid"]] = parent
            self.state[proc["uid"]] = "runs"
        self.perform(self.membership.spawn(parent, procs, parent % 2, self.now, 5.0, 2.0))

    @rule(data=st.data())
    def introduce(self, data: st.DataObject) -> None:
        asker, to = self.someone(data), data.draw(st.sampled_from(self.uids))
        if asker == to:
            return
        effects = self.membership.introduce(asker, to)
        for effect in effects:
            if isinstance(effect, Hand):
                self.met.setdefault(effect.to, set()).add(asker)
                self.met.setdefault(asker, set()).add(effect.to)
        self.perform(effects)
        newest = to
        while newest in self.replaced:
            newest = self.replaced[newest]
        assert self.runs(newest) == any(isinstance(effect, Hand) for effect in effects)

    @rule(data=st.data())
    def autopsy(self, data: st.DataObject) -> None:
        asker, uid = self.someone(data), data.draw(st.sampled_from(self.uids))
        if asker == uid:
            return
        if self.parents[uid] == asker and self.state[uid] == "gone":
            return  # already notified, so it does not ask
        self.open.setdefault((asker, uid), self.now)
        self.met.setdefault(uid, set()).add(asker)
        self.met.setdefault(asker, set()).add(uid)
        self.perform(self.membership.autopsy(asker, uid, self.now))

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.perform(self.membership.kill([data.draw(st.sampled_from(self.uids))]))

    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        self.membership.ready(data.draw(st.sampled_from(self.uids)))

    @rule(data=st.data(), goes_on=st.booleans())
    def stopped(self, data: st.DataObject, goes_on: bool) -> None:
        uid = data.draw(st.sampled_from(self.uids))
        if goes_on:
            self.membership.continued(uid)
        else:
            self.membership.stopped(uid, "SIGSTOP", self.now)

    @precondition(lambda self: len(self.uids) > 1)
    @rule(data=st.data())
    def exited(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.uids[1:]))
        if self.runs(uid):
            self.leave([uid], "exited")
        self.perform(self.membership.exited([uid]))

    @precondition(lambda self: len(self.uids) > 1)
    @rule(data=st.data(), count=st.integers(1, 4))
    def ended(self, data: st.DataObject, count: int) -> None:
        uids = [data.draw(st.sampled_from(self.uids[1:])) for _ in range(count)]
        self.end(uids)

    def end(self, uids: list[int]) -> None:
        self.leave([uid for uid in uids if self.state[uid] != "gone"], "gone")
        self.perform(self.membership.ended([(uid, KILLED) for uid in uids]))

    def leave(self, uids: list[int], state: str) -> None:
        for uid in uids:
            self.state[uid] = state
        if state == "gone":
            for uid in uids:
                if self.runs(self.parents[uid]):
                    self.due.add((self.parents[uid], uid))
        self.forget_questions()

    def forget_questions(self) -> None:
        """Drop the questions of processes that have exited: they need no answer."""
        for asker, uid in list(self.open):
            if not self.runs(asker):
                del self.open[asker, uid]

    @rule(parity=st.integers(0, 1))
    def launcher_lost(self, parity: int) -> None:
        effects = self.membership.launcher_lost(parity)
        lost = [effect.uid for effect in effects if isinstance(effect, Condemn)]
        assert all(self.runs(uid) for uid in lost)
        self.leave(lost, "exited")
        for effect in effects:
            if isinstance(effect, Kill):
                self.killed.update(effect.uids)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        effects = self.membership.tick(self.now)
        self.perform(effects)
        self.forget_questions()
        assert self.membership.deadline > self.now

    @invariant()
    def those_below_the_gone_are_going(self) -> None:
        for uid, parent in self.parents.items():
            if parent and not self.runs(parent):
                assert not self.runs(uid) or uid in self.killed

    @invariant()
    def the_membership_agrees(self) -> None:
        for uid in self.uids:
            assert self.membership.alive(uid) == self.runs(uid)

    @invariant()
    def no_question_waits_too_long(self) -> None:
        for (_, uid), asked in self.open.items():
            if self.runs(uid):
                assert asked + ANSWER_WITHIN > self.now

    @invariant()
    def parents_heard_what_they_must_once(self) -> None:
        assert len(self.told) == len(set(self.told))
        heard = {(parent, uid) for parent, uid in self.told if self.runs(parent)}
        assert heard >= {(parent, uid) for parent, uid in self.due if self.runs(parent)}

    def teardown(self) -> None:
        """Check that all questions were answered, and all replacements reported."""
        self.end([uid for uid in self.uids[1:] if self.state[uid] != "runs"])
        assert {uid for _, uid in self.open if self.state[uid] == "gone"} == set()
        for uid in self.replaced:
            if self.state[uid] == "gone":
                for other in {self.parents[uid], *self.met.get(uid, ())}:
                    if self.runs(other):
                        assert (other, uid) in self.moved


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
