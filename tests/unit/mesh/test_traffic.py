"""Whoever records the traffic hears of each call, and may add to it what travels along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base import instrument
from monarch._engine.mesh.call.endpoint import ActorEndpoint


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_call_of_one_actor_is_recorded_before_it_leaves(
    monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    done: list[Any] = []

    def record(_endpoint: Any, rank: int | None, port: int, kwargs: Any) -> Any:
        done.append((rank, port))
        return {**kwargs, "trace": 1}

    def encode(_args: Any, kwargs: Any) -> Any:
        done.append(kwargs)
        return SimpleNamespace(stream=b"")

    traffic = SimpleNamespace(sent=record) if is_recorded else None
    monkeypatch.setattr(instrument, "traffic", traffic)
    link: Any = SimpleNamespace(
        paused={}, queued=0, queue_limit=1, send=lambda _: done.append("sent") is None
    )
    endpoint: Any = SimpleNamespace(
        proc=SimpleNamespace(encode_call=encode, local=None),
        mesh=SimpleNamespace(_uid=5),
        name="step",
        _timeout=None,
    )
    ActorEndpoint._send_one(endpoint, [link, link], 1, (), {"x": 2}, 7, None, 0, b"")
    if is_recorded:
        assert done == [(1, 7), {"x": 2, "trace": 1}, "sent"]
    else:
        assert done == [{"x": 2}, "sent"]
