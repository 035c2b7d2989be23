"""The shutdown of the client by the script."""

from __future__ import annotations

import math
from types import SimpleNamespace

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
