"""What failures say, to people and to the processes they are sent to."""

from __future__ import annotations

import pytest

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, STOPPED, SYSTEM, Verdict

KILLED = Verdict(FAILED, "killed", SYSTEM, "vm", 4711, 1.5e9, ("last", "words"))


@pytest.mark.parametrize("verdict", [KILLED, Verdict(STOPPED, "enough")])
def test_a_verdict_travels(verdict: Verdict) -> None:
    assert Verdict.from_fields(verdict.to_fields()) == verdict


def test_a_verdict_of_a_witness_who_knows_little() -> None:
    assert Verdict.from_fields([FAILED, "lost"]) == Verdict(
        FAILED, "lost", INFRASTRUCTURE, "", 0, 0.0, ()
    )


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [FAILED],
        ["fine", "text"],
        [FAILED, 1],
        [FAILED, "text", "bad luck"],
        [FAILED, "text", SYSTEM, "vm", "4711"],
        [FAILED, "text", SYSTEM, "vm", True],
        [FAILED, "text", SYSTEM, "vm", 1, "noon"],
        [FAILED, "text", SYSTEM, "vm", 1, 1.0, [1]],
        [*KILLED, "more"],
        3,
        "ab",
        {"kind": FAILED},
    ],
)
def test_what_is_no_verdict_is_refused(fields: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Verdict.from_fields(fields)


def test_a_failure_travels_with_its_chain() -> None:
    child = Failure("<root>.<A a>.<B b>", KILLED, "b-1", (0, 2))
    failure = Failure("<root>.<A a>", Verdict(FAILED, "oh"), "a-1", (1,), child, raised=True)
    again = Failure.from_bytes(failure.to_bytes())
    assert again.child is not None
    assert (again.actor, again.verdict, again.mesh_name, again.ranks, again.raised) == (
        "<root>.<A a>",
        Verdict(FAILED, "oh"),
        "a-1",
        (1,),
        True,
    )
    assert (again.child.verdict, again.child.ranks) == (KILLED, (0, 2))


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"[1,2,3,4,5,6]", b'{"a":1}', b"[" * 100_000])
def test_what_is_no_failure_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Failure.from_bytes(data)
