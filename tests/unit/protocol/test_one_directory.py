"""One directory alone: the effects it returns for each request and message.

`tests/protocol/test_directory.py` tests several directories together.
"""

from __future__ import annotations

from typing import Any

import pytest

from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.protocol import membership as memberships
from monarch._engine.protocol.directory import (
    HOME,
    Admit,
    Directory,
    Effect,
    Refuse,
    Send,
    Spread,
    Tunnel,
)
from monarch._engine.protocol.membership import Membership, Tell

CLIENT = 1 << 40
LOST = Verdict(FAILED, "the host is unreachable")
ENDED = Verdict(FAILED, "it ended")
HERE, OTHER = 10 << 20, (10 << 20) + 1
THERE, UNKNOWN, SECOND = 20 << 20, 30 << 20, 31 << 20


@pytest.fixture
def b() -> Directory:
    """Make the directory of a host with two procs, of which HERE spawned THERE on host c."""
    directory = Directory(Membership(CLIENT), "b")
    directory.spawn_here(CLIENT, [{"uid": HERE}, {"uid": OTHER}], "launcher", 0.0)
    directory.spawn_there(HERE, "c", {}, [{"uid": THERE}])
    return directory


@pytest.fixture
def home() -> Directory:
    """Make the client's own directory; the client spawned HERE there, and THERE on host c."""
    directory = Directory(Membership(CLIENT), HOME)
    directory.spawn_here(CLIENT, [{"uid": HERE}], "launcher", 0.0)
    directory.spawn_there(CLIENT, "c", {}, [{"uid": THERE}])
    return directory


def gone(to: int, uid: int, verdict: Verdict) -> Tell:
    return Tell(to, memberships.gone([[uid, *verdict]]))


def where(uid: int) -> Send:
    return Send(HOME, {"op": "where", "uid": uid})


def lives(uid: int, host: str | None) -> dict[str, Any]:
    return {"op": "lives", "uids": [uid], "hosts": [host]}


def notice(to: int, notice: dict[str, Any]) -> dict[str, Any]:
    return {"op": "notice", "to": to, "notice": notice}


def farewells(effects: list[Effect]) -> set[tuple[str, int]]:
    """Return which hosts are notified of which exits."""
    return {
        (effect.host, effect.message["uid"])
        for effect in effects
        if isinstance(effect, Send) and effect.message["op"] == "left"
    }


def tells(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, Tell)]


# -- requests --------------------------------------------------------------------------------------


def test_with_a_spawn_goes_the_link_to_the_parent(b: Directory) -> None:
    uids = [THERE + 1, THERE + 2]
    effects = b.spawn_there(OTHER, "d", {}, [{"uid": uid} for uid in uids])
    news, *links, order = effects
    assert news == Send(HOME, {"op": "lives", "uids": uids, "hosts": ["d", "d"]})
    assert links == [Tunnel("d", OTHER, uid, first=True) for uid in uids]
    assert isinstance(order, Send)
    assert (order.host, order.message["op"]) == ("d", "spawn")


def test_a_link_for_a_known_proc_goes_to_its_host(b: Directory) -> None:
    assert b.introduce(OTHER, THERE, 0.0) == [Tunnel("c", OTHER, THERE, first=False)]
    b.host_lost("c", LOST)
    assert b.introduce(OTHER, THERE, 0.0) == [Refuse(OTHER, THERE)]


def test_what_home_knows_is_not_to_be_had_without_it(b: Directory) -> None:
    b.host_lost(HOME, LOST)
    assert b.introduce(OTHER, UNKNOWN, 0.0) == [Refuse(OTHER, UNKNOWN)]
    (told,) = b.autopsy(OTHER, UNKNOWN, 0.0)
    assert isinstance(told, Tell)
    assert "does not exist" in str(told)


@pytest.mark.parametrize("by", ["spawn", "introduction", "question", "request"])
def test_hosts_where_a_proc_was_a_guest_learn_of_its_end(b: Directory, by: str) -> None:
    match by:
        case "spawn":
            b.spawn_there(OTHER, "c", {}, [{"uid": UNKNOWN}])
        case "introduction":
            b.introduce(OTHER, THERE, 0.0)
        case "question":
            b.autopsy(OTHER, THERE, 0.0)
        case _:
            b.ask_there(OTHER, "c", {})
    assert farewells(b.exited(uid for uid in [OTHER])) == {("c", OTHER)}
    assert farewells(b.exited([OTHER])) == set()


def test_another_session_does_not_learn_of_guests_of_the_last_one(b: Directory) -> None:
    b.host_lost("c", LOST)
    b.host_found("c")
    assert farewells(b.exited([HERE])) == set()


def test_ends_are_read_once(b: Directory) -> None:
    effects = b.ended((uid, ENDED) for uid in [OTHER])
    assert Send(HOME, notice(CLIENT, memberships.gone([[OTHER, *ENDED]]))) in effects
    assert Send(HOME, {"op": "ended", "uids": [OTHER]}) in effects


def test_what_the_membership_says_to_guests_goes_to_their_hosts(b: Directory) -> None:
    back = {"op": "back", "uid": CLIENT}
    b.admit(THERE + 1, "c")
    effects = b.route([Tell(THERE + 1, back), Tell(HERE, back)])
    assert effects == [Send("c", notice(THERE + 1, back)), Tell(HERE, back)]


def test_a_member_of_this_host_is_no_guest_of_another(b: Directory) -> None:
    b.admit(HERE, "c")
    assert b.host_of(HERE) == "b"


def test_a_tunnel_for_a_guest_ends_here(b: Directory) -> None:
    b.admit(UNKNOWN, "c")
    assert b.opened("d", SECOND, UNKNOWN, 0.0) == []


def test_only_the_host_of_a_guest_says_that_it_has_left(b: Directory) -> None:
    b.admit(UNKNOWN, "c")
    b.heard("d", {"op": "left", "uid": UNKNOWN}, 0.0)
    assert b.membership.alive(UNKNOWN)
    b.heard("c", {"op": "left", "uid": UNKNOWN}, 0.0)
    assert not b.membership.alive(UNKNOWN)


# -- notices ---------------------------------------------------------------------------------------


def test_a_parent_hears_once_of_an_end_though_the_host_is_lost_then(b: Directory) -> None:
    ended = memberships.gone([[THERE, *ENDED]])
    assert b.heard("c", notice(HERE, ended), 0.0) == [Tell(HERE, ended)]
    assert b.host_lost("c", LOST) == []


def test_a_question_is_answered_once_though_the_host_is_lost_then(b: Directory) -> None:
    b.autopsy(OTHER, THERE, 0.0)
    ended = memberships.gone([[THERE, *ENDED]])
    assert b.heard("c", notice(OTHER, ended), 0.0) == [Tell(OTHER, ended)]
    assert b.host_lost("c", LOST) == [gone(HERE, THERE, LOST)]


def test_an_answer_to_another_leaves_a_parent_its_own(b: Directory) -> None:
    """A proc that closed its link to one asker may still run; its host may be lost later."""
    ended = memberships.gone([[THERE, *ENDED], [UNKNOWN, *ENDED]])
    assert b.heard("c", notice(OTHER, ended), 0.0) == [Tell(OTHER, ended)]
    assert b.host_lost("c", LOST) == [gone(HERE, THERE, LOST)]


def test_a_question_is_open_until_it_is_answered(b: Directory) -> None:
    b.autopsy(OTHER, THERE, 0.0)
    moved = memberships.moved(THERE, THERE + 1)
    assert b.heard("c", notice(OTHER, moved), 0.0) == [Tell(OTHER, moved)]
    assert gone(OTHER, THERE, LOST) in b.host_lost("c", LOST)


def test_the_gone_get_no_notices(b: Directory) -> None:
    b.ended([(HERE, ENDED)])
    assert b.heard("c", notice(HERE, memberships.gone([[THERE, *ENDED]])), 0.0) == []


# -- what home is asked ----------------------------------------------------------------------------


def test_a_question_goes_on_to_the_host_that_home_names(b: Directory) -> None:
    assert b.autopsy(OTHER, UNKNOWN, 0.0) == [where(UNKNOWN)]
    request = {"op": "autopsy", "uid": UNKNOWN}
    ask = {"op": "ask", "from": OTHER, "request": request}
    assert b.heard(HOME, lives(UNKNOWN, "d"), 0.0) == [Send("d", ask)]


def test_who_has_ended_gets_no_answer(b: Directory) -> None:
    b.host_lost("d", LOST)
    b.autopsy(OTHER, UNKNOWN, 0.0)
    b.ended([(OTHER, ENDED)])
    assert b.heard(HOME, lives(UNKNOWN, "d"), 0.0) == []


def test_home_is_asked_again_after_a_while_about_what_it_did_not_know(b: Directory) -> None:
    for uid in (UNKNOWN, SECOND):
        assert b.introduce(OTHER, uid, 0.0) == [where(uid)]
    assert b.heard(HOME, lives(UNKNOWN, None), 1.0) == []
    due = b.deadline
    assert 1.0 < due < 1.2
    assert b.tick(1.0) == []
    assert b.tick(due) == [where(UNKNOWN)], "the other question has no answer yet"
    assert b.tick(due + 1) == [], "nor has this one now"
    assert b.deadline == float("inf")
    assert b.heard(HOME, lives(SECOND, None), 3.0) == []
    assert b.tick(b.deadline) == [where(SECOND)]


def test_one_question_does_not_put_off_another(b: Directory) -> None:
    for uid in (UNKNOWN, SECOND):
        b.introduce(OTHER, uid, 0.0)
    b.heard(HOME, lives(UNKNOWN, None), 1.0)
    due = b.deadline
    b.heard(HOME, lives(SECOND, None), 1.01)
    assert b.deadline == due
    assert b.tick(due) == [where(UNKNOWN), where(SECOND)]


def test_what_was_refused_may_be_asked_for_again(b: Directory, home: Directory) -> None:
    for now in (0.0, 100.0):
        assert b.introduce(OTHER, UNKNOWN, now) == [where(UNKNOWN)]
        assert b.heard(HOME, lives(UNKNOWN, None), now) == []
        assert b.heard(HOME, lives(UNKNOWN, None), now + 5) == [Refuse(OTHER, UNKNOWN)]
        assert home.introduce(HERE, UNKNOWN, now) == []
        assert home.tick(now + 5) == [Refuse(HERE, UNKNOWN)]


def test_a_lost_home_is_not_asked_again(b: Directory) -> None:
    b.introduce(OTHER, UNKNOWN, 0.0)
    b.heard(HOME, lives(UNKNOWN, None), 0.0)
    b.home_lost(LOST)
    assert b.tick(1.0) == []
    assert where(UNKNOWN) in b.home_found()
    assert b.heard(HOME, lives(UNKNOWN, None), 2.0) == []
    assert b.tick(3.0) == [where(UNKNOWN)]


def test_what_waits_for_a_proc_of_this_host_goes_on_when_it_starts(home: Directory) -> None:
    assert home.introduce(HERE, UNKNOWN, 0.0) == []
    assert home.autopsy(HERE, UNKNOWN, 0.0) == []
    home.spawn_here(CLIENT, [{"uid": UNKNOWN}], "launcher", 0.0)
    assert home.started([UNKNOWN], 0.0) == [Admit(HERE, UNKNOWN)]
    assert gone(HERE, UNKNOWN, ENDED) in home.ended([(UNKNOWN, ENDED)])


# -- lost hosts ------------------------------------------------------------------------------------


def test_a_session_that_is_not_lost_is_not_another_one(home: Directory) -> None:
    assert home.host_found("c") == []
    assert home.host_of(THERE) == "c"
    assert home.introduce(HERE, THERE, 0.0) == [Tunnel("c", HERE, THERE, first=False)]


def test_the_parent_of_a_lost_proc_hears_of_its_successor_once(home: Directory) -> None:
    assert tells(home.host_lost("c", LOST)) == [gone(CLIENT, THERE, LOST)]
    home.host_found("c")
    moved = {"op": "moved", "uid": THERE, "to": SECOND, "host": "c"}
    assert home.heard("b", moved, 0.0) == [
        Tell(CLIENT, memberships.moved(THERE, SECOND)),
        Spread(moved),
    ]
    assert home.heard("b", moved, 0.0) == []
    assert home.host_of(THERE) == "c"


def test_questions_about_a_lost_guest_go_to_its_successor(b: Directory) -> None:
    b.admit(UNKNOWN, "c")
    b.host_lost("c", LOST)
    b.host_found("c")
    assert b.introduce(OTHER, UNKNOWN, 0.0) == [Refuse(OTHER, UNKNOWN)]
    b.heard(HOME, {"op": "moved", "uid": UNKNOWN, "to": SECOND, "host": "c"}, 0.0)
    assert b.introduce(OTHER, UNKNOWN, 0.0) == [Tunnel("c", OTHER, UNKNOWN, first=False)]


def test_a_successor_takes_along_what_home_said_of_a_lost_one(b: Directory) -> None:
    b.autopsy(OTHER, UNKNOWN, 0.0)
    answer = {**lives(UNKNOWN, "c#1"), "lost": [*LOST]}
    assert b.heard(HOME, answer, 0.0) == [gone(OTHER, UNKNOWN, LOST)]
    proc = {"uid": SECOND, "former": [UNKNOWN]}
    orders = [
        effect.message["procs"]
        for effect in b.spawn_there(HERE, "c", {}, [proc])
        if isinstance(effect, Send) and effect.message["op"] == "spawn"
    ]
    assert orders == [[{**proc, "lost": [[UNKNOWN, *LOST]]}]]


def test_a_successor_is_not_reported_to_a_home_that_is_lost(b: Directory) -> None:
    b.host_lost("c", LOST)
    b.host_found("c")
    b.home_lost(LOST)
    effects = b.spawn_there(HERE, "c", {}, [{"uid": SECOND, "former": [THERE]}])
    assert {effect.host for effect in effects if isinstance(effect, Send)} == {"c"}
    assert [
        effect.message["procs"][0]["lost"]
        for effect in effects
        if isinstance(effect, Send) and effect.message["op"] == "spawn"
    ] == [[[THERE, *LOST]]]


def test_another_home_tells_the_client_of_its_own_procs(home: Directory) -> None:
    home.admit(SECOND, "d")
    home.resumed("b", [(UNKNOWN, CLIENT), (UNKNOWN + 1, SECOND)])
    assert tells(home.host_lost("b", LOST)) == [gone(CLIENT, UNKNOWN, LOST)]


def test_hosts_of_another_home_learn_of_the_end_of_the_client(home: Directory) -> None:
    home.resumed("b", [])
    assert farewells(home.exited([CLIENT])) == {("b", CLIENT), ("c", CLIENT)}


# -- what is remembered ----------------------------------------------------------------------------


def test_what_is_remembered_is_bounded(b: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memberships, "REMEMBERED", 10)
    for number in range(40):
        guest, proc, far = ((number + base) << 20 for base in (100, 200, 300))
        b.admit(guest, "c")
        b.heard("c", {"op": "left", "uid": guest}, 0.0)
        b.spawn_here(CLIENT, [{"uid": proc}], "launcher", 0.0)
        b.ended([(proc, ENDED)])
        b.spawn_there(HERE, "d", {}, [{"uid": far}])
        b.host_lost("d", LOST)
        b.host_found("d")
    for known in (b._guests, b._bereft):
        assert len(known) <= 12
    b.spawn_there(HERE, "d", {}, [{"uid": 400 << 20}])
    b.heard("d", notice(HERE, memberships.gone([[400 << 20, *ENDED]])), 0.0)
    assert len(b._lives) <= 12
