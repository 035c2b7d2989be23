"""The waits of a script after the loss of a rank, and of a rank at the end of a step or of all."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.actor import SupervisionError
from monarch.training import Replicas


def test_the_call_of_a_rank_that_is_not_replaced_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        asked = False

        def get(self) -> None:
            assert not self.asked, "this call cannot end otherwise"
            self.asked = True
            raise SupervisionError("lost")

    class Working:
        def get(self) -> str:
            return "trained"

    replicas: Any = object.__new__(Replicas)
    replicas._changed = threading.Condition()
    replicas._calls = {("ranks", 0): Failing()}
    replaced = [Working()]

    def is_called_again(name: str, rank: int, _: object) -> bool:
        if not replaced:
            return False
        replicas._calls[name, rank] = replaced.pop()
        return True

    monkeypatch.setattr(Replicas, "_is_called_again", staticmethod(is_called_again))
    assert replicas._result("ranks", 0) == "trained"
    replicas._calls["ranks", 0] = Failing()
    with pytest.raises(SupervisionError, match="lost"):
        replicas._result("ranks", 0)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a manager of rank 0 in a round, whose coordinator says what a test wants."""
    pytest.importorskip("torch")
    from monarch.training.manager import Manager

    made: Any = object.__new__(Manager)
    role = SimpleNamespace(shares=(0, 1))
    exchange = SimpleNamespace(direct=True, missing=set(), begin=lambda _: None)
    made.__dict__.update(
        rank=0,
        _version=3,
        _mark=3,
        _owed=False,
        _averaged=False,
        _begin=None,
        _role=role,
        _exchange=exchange,
        _snapshots=SimpleNamespace(stock=()),
        _watch_call=lambda: None,
        _take_snapshot=lambda _: None,
        _enter=lambda *_: True,
        _current=lambda: (None, role),
    )
    return made


@pytest.mark.torch
def test_a_rank_that_has_all_its_steps_waits_for_the_others(manager: Any) -> None:
    """It computes nothing in the round of a replacement that gets the last state."""
    from monarch.training.membership import VOTE

    answers = [("begin", None, manager._role, ""), ("closed",)]
    arrived: list[Any] = []
    manager.__dict__["_ask"] = lambda *_: answers.pop(0)
    manager.__dict__["_arrive"] = lambda *args: arrived.append(args)
    assert not manager.quorum(until=3)
    assert arrived == [(VOTE, None)]


@pytest.mark.torch
def test_gradients_are_not_averaged_before_each_share_has_some(manager: Any) -> None:
    manager._exchange.missing = {1}
    with pytest.raises(
        RuntimeError, match=r"shares \[1\] of this step have no gradients on rank 0"
    ):
        manager.average()
    assert not manager._averaged
