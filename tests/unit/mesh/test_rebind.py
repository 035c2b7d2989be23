"""A lost host is served by another worker: the time limit for that ends with the attempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.mesh.meshes import attachment
from monarch._engine.mesh.meshes.attachment import _on_rebound, rebind


def test_the_time_limit_of_a_rebind_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would fail a later rebind of the same host."""
    monkeypatch.setattr(attachment, "_rebinding", {})
    cancelled: list[int] = []

    def call_later(_delay: float, _callback: Any) -> Any:
        return SimpleNamespace(cancel=lambda: cancelled.append(1))

    proc: Any = SimpleNamespace(
        notices={},
        when_agent_fails=lambda _: None,
        tell_agent=lambda _: None,
        reactor=SimpleNamespace(call_later=call_later),
    )
    future = rebind(proc, "lost", "lost", 10.0, once=True)
    assert not cancelled
    _on_rebound({"host": "lost", "address": "lost", "error": None})
    assert future.get(timeout=60) == "lost"
    assert cancelled == [1]
