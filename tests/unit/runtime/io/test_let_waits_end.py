"""A failure lets the calls that wait for it raise first."""

from __future__ import annotations

from types import FrameType

import pytest

from monarch._engine.runtime.io import environment


def test_an_answer_that_comes_a_moment_later_is_waited_for_until_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_ARRIVAL", 60.0)
    monkeypatch.setattr(environment, "_LOOK", 60.0)
    own = environment.Environment.let_waits_end.__code__
    found: list[bool | None] = [None, None, True, True, False]
    seen: list[bool | None] = []

    def looks(frame: FrameType | None) -> bool | None:
        if frame is None or frame.f_code is not own:
            return False  # another thread
        seen.append(found[len(seen)])
        return seen[-1]

    environment.Environment().let_waits_end(looks)
    assert seen == found


def test_an_answer_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_ARRIVAL", 0.0)
    monkeypatch.setattr(environment, "_LOOK", 1e9)
    environment.Environment().let_waits_end(lambda frame: None)
