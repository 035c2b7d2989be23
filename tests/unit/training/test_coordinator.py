"""What the coordinator tells the ranks, and how long they may wait for each other."""

from __future__ import annotations

import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from monarch import _spi
from monarch.training.coordinator import Authority
from monarch.training.membership import Failed


@pytest.fixture
def authority() -> Any:
    """Return a coordinator of two ranks that ask for the next round."""
    made: Any = object.__new__(Authority)
    made.__dict__.update(
        _core=SimpleNamespace(committed=3, waits=None),
        _start=0.0,
        _timeout=60.0,
        _timer=None,
        _waits=None,
        _asking={},
        events=deque(),
    )
    return made


def test_ranks_that_ask_learn_why_the_training_has_failed(authority: Any) -> None:
    told: dict[int, Any] = {}
    for rank in range(2):
        answer = SimpleNamespace(answer=lambda body, rank=rank: told.update({rank: body}))
        authority._asking[rank] = answer
    authority.perform([Failed((0, 1), "too few groups are left")])
    assert {rank: pickle.loads(body) for rank, body in told.items()} == dict.fromkeys(
        (0, 1), ("failed", "too few groups are left")
    )
    assert authority._asking == {}
    (event,) = authority.events
    assert (event.kind, event.version, event.detail) == ("failed", 3, "too few groups are left")


def test_each_wait_has_one_limit_from_its_beginning(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def call_within(seconds: float, _callback: Any) -> Any:
        done.append(seconds)
        return SimpleNamespace(cancel=lambda: done.append("cancelled"))

    monkeypatch.setattr(_spi, "call_within", call_within)
    for waits in (None, "for rank 1", "for rank 1", "for rank 0", None):
        authority._core.waits = waits
        authority.perform([])
    assert done == [60.0, "cancelled", 60.0, "cancelled"]
