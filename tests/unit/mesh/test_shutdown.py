"""The shutdown of the client by the script."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.mesh.script import shutdown


@pytest.mark.parametrize("host_timeout", [-1.0, math.inf, math.nan, 2.0**64])
def test_an_impossible_time_limit_shuts_nothing_down(
    monkeypatch: pytest.MonkeyPatch, host_timeout: float
) -> None:
    begun: list[float] = []
    monkeypatch.setattr(shutdown, "current_proc", lambda: SimpleNamespace(client=True))
    monkeypatch.setattr(shutdown, "_begun", False)
    monkeypatch.setattr(shutdown, "_shut_down", begun.append)
    with pytest.raises(ValueError, match="host_timeout must be finite, non-negative"):
        shutdown.shutdown_context(host_timeout)
    assert begun == []
    assert not shutdown._begun


def test_what_is_drawn_on_the_terminal_is_erased_before_the_agent_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent is told that nothing is drawn any longer; the output that comes is printed."""
    done: list[str] = []
    printer = SimpleNamespace(
        hide=lambda _: done.append("hidden"), close=lambda _: done.append("printed")
    )
    instance = SimpleNamespace(_stop_meshes=lambda *_: done.append("meshes stopped"))
    proc: Any = SimpleNamespace(
        job="", context=SimpleNamespace(actor_instance=instance), printer=printer
    )
    monkeypatch.setattr(shutdown, "current_proc", lambda: proc)
    monkeypatch.setattr(shutdown, "close_client", lambda *_: done.append("agent stopped"))
    shutdown._shut_down(1.0)
    assert done == ["meshes stopped", "hidden", "agent stopped", "printed"]
    assert proc.printer is None
