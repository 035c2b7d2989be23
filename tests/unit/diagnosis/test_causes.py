"""The search for causes, and the text, on accounts that are made up."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._diagnosis.causes import Place, Search, compact
from monarch._diagnosis.census import Member
from monarch._diagnosis.diagnosis import Diagnosis

CLIENT = 1


def activity(endpoint: str, seconds: float, on: list[tuple[int, int]] | None = None) -> Any:
    place = f"{endpoint}() at train.py:7"
    wait = None
    if on is not None:
        call = "other.call()"
        wait = {"call": call, "on": on, "asked": len(on) + 1, "seconds": seconds, "limit": None}
    stack = [place, "main() at train.py:1"]
    return {"endpoint": endpoint, "seconds": seconds, "place": place, "stack": stack, "wait": wait}


def process(uid: int, *doing: Any, queued: int = 0, script: Any = None) -> Any:
    """A process with one actor, of mesh 100 + uid."""
    actor = {
        "name": f"a{uid}",
        "rank": 0,
        "uid": 100 + uid,
        "display": f"a{uid}{{'gpus': 0/1}}",
        "state": "running",
        "system": False,
        "queued": queued,
        "queued_bytes": 0,
        "doing": list(doing),
    }
    return {
        "uid": uid,
        "pid": 1000 + uid,
        "machine": "vm",
        "client": script is not None,
        "actors": [] if script is not None else [actor],
        "script": script,
        "failures": [],
    }


def on(*uids: int) -> list[tuple[int, int]]:
    return [(uid, 100 + uid) for uid in uids]


def script(*uids: int) -> Any:
    return process(CLIENT, script=activity("", 9.0, on(*uids)))


def diagnosis(*accounts: Any, silent: dict[int, str] | None = None) -> Diagnosis:
    states = {account["uid"]: "S" for account in accounts} | (silent or {})
    members = [
        Member(uid, 0, 1000 + uid, "host", "vm", state, 0, 0.0) for uid, state in states.items()
    ]
    return Diagnosis(list(accounts), members, set(), 1001)


def causes(*accounts: Any, silent: tuple[int, ...] = ()) -> list[tuple[str, int]]:
    found = Search(accounts, silent).causes(Place(CLIENT, 0))
    return [(cause.kind, cause.place.process) for cause in found]


def test_a_chain_ends_at_the_busy_actor() -> None:
    chain = [process(2, activity("step", 5.0, on(3))), process(3, activity("pull", 4.0))]
    assert causes(script(2), *chain) == [("busy", 3)]
    text = str(diagnosis(script(2), *chain))
    assert "The script (pid 1001) waits for other.call() since 9.0 s, () at train.py:7" in text
    assert "because a3{'gpus': 0/1} has been in pull() for 4.0 s (pid 1003 on vm)" in text
    assert "found by way of a2{'gpus': 0/1}" in text


def test_the_longest_comes_first_and_each_place_once() -> None:
    many = [process(uid, activity("step", 3.0, on(5, 6))) for uid in (2, 3, 4)]
    ends = [process(5, activity("pull", 1.0)), process(6, activity("push", 2.0))]
    assert causes(script(2, 3, 4), *many, *ends) == [("busy", 6), ("busy", 5)]


def test_a_circle() -> None:
    around = [process(2, activity("step", 5.0, on(3))), process(3, activity("pull", 4.0, on(2)))]
    assert causes(script(2), *around) == [("circle", 2)]
    text = str(diagnosis(script(2), *around))
    assert "wait for each other: a2{'gpus': 0/1} -> a3{'gpus': 0/1} -> a2{'gpus': 0/1}" in text


def test_a_process_that_does_not_answer() -> None:
    assert causes(script(2, 3), process(3, activity("step", 1.0)), silent=(2,)) == [
        ("silent", 2),
        ("busy", 3),
    ]
    text = str(diagnosis(script(2), silent={2: "T"}))
    assert "process 1002 on vm does not answer: it is stopped by a signal" in text
    assert "kill -CONT 1002" in text
    assert text.count("does not answer") == 1


def test_idle_queued_and_unknown() -> None:
    assert causes(script(2), process(2)) == [("idle", 2)]
    assert causes(script(2), process(2, queued=7)) == [("queued", 2)]
    assert causes(script(2)) == [("unknown", 2)]


def test_equal_activities_are_one_line() -> None:
    workers = [process(uid, activity("step", uid / 10)) for uid in range(2, 9)]
    for rank, worker in enumerate(workers):
        worker["actors"][0].update(name="w", rank=rank)
    workers[3]["actors"][0]["queued"] = 4000
    text = str(diagnosis(script(2), *workers))
    assert "w.step(), 7 actors (ranks 0-6): 0.8 s, step() at train.py:7" in text
    assert "4,000 messages wait" in text
    assert "8 processes on 1 host, 7 actors: 7 busy, 0 waiting, 0 idle" in text


def test_an_actor_in_a_short_call_is_busy() -> None:
    text = str(diagnosis(script(2), process(2, activity("step", 0.001))))
    assert "1 actor: 1 busy, 0 waiting, 0 idle" in text


@pytest.mark.parametrize(
    ("counts", "told"),
    [([2, 2], True), ([1, 2], True), ([2, 0], False), ([1, 1, 1, 1], False), ([], False)],
)
def test_more_threads_than_cores(counts: list[int], told: bool) -> None:
    """Not if the processes have one thread each: then there are no threads to be spared."""
    others = [process(uid, activity("step", 1.0)) for uid in range(2, 2 + len(counts))]
    for other, count in zip(others, counts, strict=True):
        other.update(runnable=count, cores=2)
    text = str(diagnosis(script(2), *others))
    assert (f"On vm {sum(counts)} threads of this job want to compute" in text) == told


def test_the_data_survive_json() -> None:
    found = diagnosis(script(2), process(2, activity("step", 5.0, on(3))), silent={3: "R"})
    again = Diagnosis.from_dict(json.loads(json.dumps(found.to_dict())))
    assert str(again) == str(found)
    assert "native code holds its interpreter" in str(again)


def test_actors_that_wait_have_causes_though_the_script_waits_for_none() -> None:
    search = Search(
        [
            process(2, activity("step", 2.0)),
            process(3, activity("step", 5.0, on(2))),
            process(4, activity("step", 5.0, on(3))),
            process(5, activity("other", 9.0)),
        ]
    )
    found = search.causes(*search.scripts, *search.actors)
    assert [(cause.kind, cause.place.process) for cause in found] == [("busy", 2)]


@given(st.lists(st.integers(0, 40)))
def test_ranges(numbers: list[int]) -> None:
    back: set[int] = set()
    for span in compact(numbers).split(", ") if numbers else []:
        first, _, last = span.partition("-")
        back |= set(range(int(first), int(last or first) + 1))
    assert back == set(numbers)


@given(st.dictionaries(st.integers(2, 9), st.lists(st.integers(2, 9), max_size=4)))
def test_any_graph_of_waits_has_causes(waits: dict[int, list[int]]) -> None:
    """Every wait of the script leads to a cause: an actor that does not wait, or a circle."""
    accounts = [
        process(uid, activity("step", 1.0, on(*targets)) if targets else activity("step", 2.0))
        for uid, targets in waits.items()
    ]
    found = Search([script(2, 3), *accounts]).causes(Place(CLIENT, 0))
    assert found
    for cause in found:
        if cause.kind == "circle":
            around = [*cause.through, cause.through[0]]
            for place, after in itertools.pairwise(around):
                assert after.process in waits[place.process]
        elif cause.kind == "busy":
            assert not waits[cause.place.process]
        else:
            assert cause.place.process not in waits
    str(diagnosis(script(2, 3), *accounts))
