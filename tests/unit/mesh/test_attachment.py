"""An attachment to hosts: until when it tells that a host is not reached yet."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.mesh.meshes import attachment as module
from monarch._engine.mesh.meshes.attachment import Attachment
from monarch._engine.mesh.results.future import Future


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Future[Any]]:
    """Take the place of the client; return the futures for which lines are printed."""
    futures: list[Future[Any]] = []
    proc = SimpleNamespace(
        notices={}, when_agent_fails=lambda callback: None, tell_agent=lambda message: None
    )
    monkeypatch.setattr(module, "client_proc", lambda: proc)
    monkeypatch.setattr(module, "tell_while", lambda future, what: futures.append(future))
    monkeypatch.setattr(module._Leaving, "of", lambda *_: Future._of(None))
    for table in ("_names", "_attaching", "_left"):
        monkeypatch.setattr(module, table, {})
    monkeypatch.setattr(module, "_users", Counter())
    return futures


@pytest.mark.parametrize("how", ["answer", "leave"])
def test_a_host_is_missed_until_it_answers_or_is_released(
    told: list[Future[Any]], how: str
) -> None:
    attachment = Attachment({"host": "tcp://10.0.0.1:1"})
    (future,) = told
    assert not future.done()
    if how == "answer":
        attachment.answered("host", None)
    else:
        attachment.leave(shutdown=False)
    assert future.done()
