"""The stop of an actor mesh: what comes before it, and the end of its time limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.mesh.meshes import actor_mesh
from monarch._engine.mesh.meshes.actor_mesh import ActorMesh
from monarch._engine.mesh.results.future import VALUE, Future


def test_a_stop_that_is_complete_forgets_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_mesh, "tell_while", lambda *_: None)
    stopping: Any = actor_mesh._Acks._new()
    cancelled: list[int] = []
    timer = SimpleNamespace(cancel=lambda: cancelled.append(1))
    reactor = SimpleNamespace(call_later=lambda *_: timer)
    mesh: Any = SimpleNamespace(
        _owner=SimpleNamespace(_disown=lambda _: None),
        _stopping=None,
        _before_stop=None,
        _proc=SimpleNamespace(owned={}, reactor=reactor),
        _uid=1,
        _ask=lambda *_: stopping,
    )
    assert ActorMesh.stop(mesh, timeout=5.0) is stopping
    assert not cancelled
    stopping._resolve(VALUE, None)
    assert cancelled == [1]


def test_what_has_to_be_done_before_a_stop_is_done_before_any_rank_has_it() -> None:
    """Messages still reach the actors then."""
    done: list[str] = []

    def ask(*_: Any) -> Future[None]:
        done.append("stop")
        return Future._of(None)

    mesh: Any = SimpleNamespace(
        _owner=SimpleNamespace(_disown=lambda _: None),
        _stopping=None,
        _before_stop=lambda: done.append("before"),
        _proc=SimpleNamespace(owned={}),
        _uid=1,
        _ask=ask,
    )
    stopping = ActorMesh.stop(mesh)
    assert ActorMesh.stop(mesh) is stopping
    assert done == ["before", "stop"]
