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


@pytest.mark.torch
def test_a_rank_that_could_not_enter_a_round_asks_for_the_next(manager: Any) -> None:
    """The rank from which it had to get the state was lost."""
    late = SimpleNamespace(shares=(7,))
    answers = [("begin", None, late, ""), ("begin", None, manager._role, "")]
    manager.__dict__["_ask"] = lambda *_: answers.pop(0)
    manager.__dict__["_enter"] = lambda _begin, role, _path: role is not late
    assert manager.quorum()
    assert answers == []
    assert manager._role.shares == (0, 1)


@pytest.mark.torch
def test_a_rank_has_a_group_and_a_position_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from monarch import _spi
    from monarch.training import manager as managers
    from monarch.training.coordinator import Coordinator

    monkeypatch.setattr(managers, "current_rank", lambda: SimpleNamespace(rank=7))
    monkeypatch.setattr(_spi, "at_actor_end", lambda _: None)
    module = torch.nn.Linear(2, 2)
    coordinator = Coordinator(
        uid=1, service="", groups=3, width=3, timeout=60.0, copy_every=0, folder="", run=""
    )
    made = managers.Manager(coordinator, module, torch.optim.SGD(module.parameters(), 0.1))
    assert (made.rank, made.group, made._position) == (7, 2, 1)


def test_the_call_of_a_rank_is_repeated_on_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    replicas: Any = object.__new__(Replicas)

    class Call:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            calls.append(rank)

        def get(self) -> str:
            if self.rank == 1 and calls.count(1) == 1:
                replicas._restarted(SimpleNamespace(mesh_name="ranks", rank=1))
                raise SupervisionError("lost")
            return f"rank {self.rank} trained"

    def slice_of(rank: int) -> Any:
        return SimpleNamespace(train=SimpleNamespace(call_one=lambda: Call(rank)))

    replicas._changed = threading.Condition()
    replicas._issue, replicas._calls = {}, {}
    replicas._core = SimpleNamespace(resume=lambda: None, closed=False, failed="", active=False)
    replicas._authority = SimpleNamespace(handle=SimpleNamespace(timeout=0.001))
    replicas._supervisor = SimpleNamespace(healthy=SimpleNamespace(get=lambda: None))
    monkeypatch.setattr(Replicas, "_core_call", staticmethod(lambda function: function()))
    flat = SimpleNamespace(slice=slice_of)
    actors: Any = SimpleNamespace(_mesh_name="ranks", size=lambda: 2, flatten=lambda _: flat)
    assert replicas.run(actors, "train") == {0: "rank 0 trained", 1: "rank 1 trained"}
    assert calls == [0, 1, 1]
    assert replicas._issue == replicas._calls == {}
