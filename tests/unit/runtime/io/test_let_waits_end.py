"""A failure lets the calls that wait for it raise first."""

from __future__ import annotations

import pytest

from monarch._engine.runtime.io import environment
from monarch._engine.runtime.io.stacks import Stack


def test_an_answer_that_comes_a_moment_later_is_waited_for_until_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_ARRIVAL", 60.0)
    monkeypatch.setattr(environment, "_LOOK", 60.0)
    own = environment.Environment.let_waits_end.__code__
    found: list[bool | None] = [None, None, True, True, False]
    seen: list[bool | None] = []

    def looks(stack: Stack) -> bool | None:
        if own not in {step.code for step in stack.steps}:
            return False  # another thread
        seen.append(found[len(seen)])
        return seen[-1]

    environment.Environment().let_waits_end(looks, own)
    assert seen == found


def test_an_answer_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_ARRIVAL", 0.0)
    monkeypatch.setattr(environment, "_LOOK", 1e9)
    own = environment.Environment.let_waits_end.__code__
    environment.Environment().let_waits_end(lambda stack: None, own)
