"""How often processes are looked at before an idle actor is said to owe an answer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._diagnosis import collect as module
from monarch._diagnosis.census import Member
from tests.unit.diagnosis.test_causes import activity, process, script

ACTOR = Member(2, 0, 1002, "host", "vm", "R", 0, 0.0)
SILENT = ACTOR._replace(uid=3)
IDLE = [script(2), process(2)]
"""The script waits for an actor that had just answered when its process was looked at."""
ANSWERED = [script(), process(2)]
"""The script has the answer, and its thread is about to see it."""
BUSY = [script(2), process(2, activity("step", 0.05))]


def looked(
    monkeypatch: pytest.MonkeyPatch, looks: Iterator[list[Any]], *members: Member
) -> tuple[str, int]:
    """Return the text of a diagnosis, and how many looks it took."""
    count = 0

    def accounts(*_: object) -> list[Any]:
        nonlocal count
        count += 1
        return next(looks)

    here = SimpleNamespace(uid=1, hostname="vm")
    monkeypatch.setattr(module, "client_proc", lambda: here)
    monkeypatch.setattr(module, "take", lambda _timeout: (list(members), set()))
    monkeypatch.setattr(module, "_accounts", accounts)
    return str(module.collect(1.0)), count


@pytest.mark.parametrize("first", [IDLE, ANSWERED])
def test_an_actor_that_is_between_two_calls_once_is_not_idle(
    monkeypatch: pytest.MonkeyPatch, first: list[Any]
) -> None:
    text, count = looked(monkeypatch, iter([first, BUSY]), ACTOR)
    assert "1 actor: 1 busy, 0 waiting, 0 idle" in text
    assert "a2{'gpus': 0/1} has been in step()" in text
    assert count == 2


def test_an_actor_that_does_nothing_in_all_looks_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    text, count = looked(monkeypatch, iter([IDLE] * 9), ACTOR)
    assert "its answer is owed by other code" in text
    assert count == 4


@pytest.mark.parametrize(
    ("look", "members"),
    [(BUSY, [ACTOR]), (IDLE, [ACTOR, SILENT]), ([process(1), process(2)], [ACTOR])],
)
def test_one_look_is_enough_otherwise(
    monkeypatch: pytest.MonkeyPatch, look: list[Any], members: list[Member]
) -> None:
    """Also if a process is silent, since each look waits for it."""
    assert looked(monkeypatch, iter([look]), *members)[1] == 1
