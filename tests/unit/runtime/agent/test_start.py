"""The start of the host agent's process."""

from __future__ import annotations

import gc
import io
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.agent import agent, start


def test_an_agent_collects_garbage_as_soon_as_it_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lives as long as the program, and its errors and callbacks have cycles."""
    found: list[bool] = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    monkeypatch.setattr(start, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(os, "fork", lambda: 7)

    def make(first: Any, uid: int, launcher: Any, here: str) -> Any:
        assert (uid, launcher[1], here) == (3, 7, "here")
        for sock in (first, launcher[0]):
            sock.close()
        return SimpleNamespace(run=lambda: found.append(gc.isenabled()))

    monkeypatch.setattr(agent, "Agent", make)
    ours, theirs = socket.socketpair()
    try:
        start.agent_main(theirs.detach(), 3, "here")
    finally:
        gc.enable()
        ours.close()
    assert found == [True]
