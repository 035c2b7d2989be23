"""Requests that the agent of a host handles by itself."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.launch.cores import THREADS
from monarch._engine.runtime.agent.agent import Agent
from monarch._engine.runtime.cast.sender import HEADS
from monarch._engine.runtime.hosts import tunnel
from monarch._engine.wire.frame import RELEASE, SEGMENT, pack


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


def test_a_segment_of_a_cast_is_given_back_when_no_host_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed: list[Any] = []
    sent: list[bytes] = []
    monkeypatch.setattr(tunnel, "map_segment", lambda link, table: (5, mmap.mmap(-1, 8)))
    agent: Any = object.__new__(Agent)
    agent.core = SimpleNamespace(
        casts=SimpleNamespace(begin=lambda uid, frame, content: needed.append(content))
    )
    link: Any = SimpleNamespace(uid=1, send=sent.append)
    agent._on_cast(link, SimpleNamespace(flags=SEGMENT, body=HEADS.pack(0, 0)))
    assert len(needed[0]) == 8
    assert sent == []
    needed.clear()
    assert sent == [pack(RELEASE, 0, 0, 0, b"", (5).to_bytes(8, "little"))]
