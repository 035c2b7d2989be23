"""What a client tells its new host agent to import ahead for the processes of its meshes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.launch import helper
from monarch._engine.launch.cores import THREADS
from monarch._engine.runtime.agent import client


@pytest.mark.parametrize("given", [False, True], ids=["not set", "set"])
def test_libraries_that_read_the_number_of_threads_wait_until_it_is_known(
    monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """Unless the user has set it, a spawn does; it is read while the library is imported."""
    told: list[Any] = []
    monkeypatch.delenv(THREADS, raising=False)
    if given:
        monkeypatch.setenv(THREADS, "2")
    monkeypatch.setattr(client, "_agent_process", None)
    monkeypatch.setattr(client, "_preloads", lambda: ["numpy", "json"])
    monkeypatch.setattr(client, "find", lambda _: None)
    monkeypatch.setattr(helper, "start", lambda *_, **__: (None, None))
    proc: Any = SimpleNamespace(uid=1, adopt_agent=lambda _: None, tell_agent=told.append)
    client._start_agent(proc)
    (message,) = told
    assert message["preload"] == (["numpy", "json"] if given else ["json"])
