"""Requests that the agent of a host handles by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from monarch._engine.launch.cores import THREADS
from monarch._engine.runtime.agent.agent import Agent


def test_modules_are_imported_ahead_by_the_launcher_of_that_environment() -> None:
    """For the next spawn, which says for how many threads its processes are."""
    asked: list[Any] = []
    told: list[Any] = []

    def find(*arguments: Any) -> Any:
        asked.append(arguments)
        return SimpleNamespace(link="the launcher")

    agent: Any = object.__new__(Agent)
    agent._launchers = SimpleNamespace(find=find)
    agent._links = SimpleNamespace(tell=lambda *arguments: told.append(arguments))
    environ = {"PATH": "/bin", THREADS: "7", "MONARCH_CORE_SHARE": "7"}  # those of another process
    request: Any = {"op": "preload", "preload": ["json"], "path": ["/mine"], "env": environ}
    agent._on_preload(None, request, [])
    assert asked == [({"PATH": "/bin"}, None, {})]
    assert told == [("the launcher", {**request, "threads": {}})]
