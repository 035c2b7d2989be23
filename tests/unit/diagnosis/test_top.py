"""The table of ``monarch top``, on data that are made up."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from monarch._diagnosis.census import Member
from monarch._diagnosis.top import Row, rows, summary, table


def member(uid: int, state: str = "S", cpu: float = 0.0) -> dict[str, Any]:
    return Member(uid, 0, 1000 + uid, "home", "node7", state, 5_000_000, cpu)._asdict()


def doing(endpoint: str, seconds: float, call: str | None = None) -> dict[str, Any]:
    wait = None
    if call is not None:
        wait = {"call": call, "on": [], "asked": 1, "seconds": None, "limit": None}
    place = f"{endpoint}() at train.py:7"
    return {"endpoint": endpoint, "seconds": seconds, "place": place, "stack": [], "wait": wait}


def account(uid: int, *actors: Any, script: Any = None) -> dict[str, Any]:
    return {"uid": uid, "actors": list(actors), "script": script, "failures": []}


def actor(name: str, *activities: Any, queued: int = 0, system: bool = False) -> dict[str, Any]:
    return {"display": name, "queued": queued, "doing": list(activities), "system": system}


def data(members: list[Any], accounts: list[Any]) -> dict[str, Any]:
    return {"pid": 1001, "processes": members, "missing_hosts": ["lost"], "accounts": accounts}


def a_job() -> dict[str, Any]:
    script = {**doing("", 0.0, "trainer.step()"), "seconds": None}
    return data(
        [member(1), member(2, cpu=4.0), member(3), member(4, "T"), member(5, "R")],
        [
            account(1, script=script),
            account(2, actor("fast", doing("step", 0.001)), actor("slow", doing("step", 12.5))),
            account(
                3,
                actor("asks", doing("pull", 3.0, "slow.step()"), doing("more", 1.0), queued=7),
                actor("idle"),
                actor("ours", doing("serve", 99.0), system=True),
            ),
        ],
    )


def test_what_needs_attention_comes_first() -> None:
    found = rows(a_job())
    assert [(row.state, row.actor) for row in found] == [
        ("silent", "(does not answer)"),
        ("stopped", "(does not answer)"),
        ("busy", "slow"),
        ("busy", "fast"),
        ("waiting", "asks"),
        ("waiting", "the script"),
        ("idle", "idle"),
    ]
    by_name = {row.actor: row for row in found}
    assert by_name["slow"].doing == "step() at train.py:7"
    assert by_name["asks"].doing == "pull() for slow.step() and 1 more"
    assert (by_name["asks"].queued, by_name["asks"].seconds) == (7, 3.0)
    assert summary(found, a_job()) == (
        "script 1001: 5 processes on 1 host: 1 silent, 1 stopped, 2 busy, 2 waiting, 1 idle; "
        "no answer from lost"
    )


def test_the_share_of_a_core_is_that_of_the_time_between_two_diagnoses() -> None:
    before = a_job()
    after = a_job()
    after["processes"][1]["cpu"] = 5.0
    after["processes"].append(member(9, cpu=1.0))
    shares = {row.pid: row.share for row in rows(after, before, 2.0)}
    assert shares == {1001: 0.0, 1002: 0.5, 1003: 0.0, 1004: 0.0, 1005: 0.0, 1009: None}
    assert {row.share for row in rows(after)} == {None}


def test_an_actor_is_busy_between_two_messages() -> None:
    """A look may come between two short calls."""
    before = data(
        [member(2), member(3), member(4)],
        [
            account(2, actor("has more", queued=3)),
            account(3, actor("computes"), actor("ours", system=True)),
            account(4, actor("either"), actor("or")),
        ],
    )
    after = {**before, "processes": [member(2), member(3, cpu=0.8), member(4, cpu=0.8)]}
    states = {row.actor: (row.state, row.doing) for row in rows(after, before, 1.0)}
    between = ("busy", "between two messages")
    assert states["has more"] == states["computes"] == between
    assert states["either"] == states["or"] == ("idle", "")


def test_a_table() -> None:
    assert table(rows(a_job()), 200, 4) == [
        "STATE    SINCE  QUEUE  CPU  MEMORY   PID  HOST   ACTOR              DOES",
        "silent                        5 MB  1005  node7  (does not answer)  state R",
        "stopped                       5 MB  1004  node7  (does not answer)  state T",
        "and 5 more",
    ]


ROW = st.builds(
    Row,
    state=st.sampled_from(["silent", "busy", "waiting", "idle"]),
    seconds=st.none() | st.floats(0, 1e7),
    actor=st.text(max_size=60),
    doing=st.text(max_size=60),
    queued=st.integers(0, 10**9),
    pid=st.integers(1, 4_000_000),
    machine=st.text(max_size=60),
    share=st.none() | st.floats(0, 1000),
    memory=st.integers(0, 10**13),
)


@given(st.lists(ROW, max_size=30), st.integers(1, 200), st.integers(0, 40))
def test_a_table_fits_the_screen(found: list[Row], width: int, height: int) -> None:
    lines = table(found, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    if height > len(found):
        assert len(lines) == 1 + len(found)
