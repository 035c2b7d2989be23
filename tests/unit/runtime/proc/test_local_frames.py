"""A message of a process to itself arrives as the same frames as from elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.mesh.results import service
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.wire.frame import POST, SERVICE, Frame, FrameReader


class Sent:
    """A link that reads what was sent on it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def send(self, data: bytes) -> bool:
        self.frames += FrameReader(1 << 20, "").feed(memoryview(data))
        return True


@pytest.fixture
def received() -> list[Frame]:
    """Return the list of what a process has got from itself."""
    return []


@pytest.fixture
def proc(received: list[Frame]) -> Any:
    """Return the part of a process that sends, and handles what it has sent to itself."""
    handlers = dict.fromkeys((POST, SERVICE), lambda _link, frame: received.append(frame))
    soon = SimpleNamespace(call_soon=lambda callback, *args: callback(*args))
    return SimpleNamespace(local=object(), _on=handlers, reactor=soon)


def test_a_short_message(proc: Any, received: list[Frame]) -> None:
    elsewhere: Any = Sent()
    for link in (proc.local, elsewhere):
        assert Proc.say(proc, link, POST, 7, 8, 9, b"text", 1)
    assert received == elsewhere.frames == [Frame(POST, 1, 7, 8, 9, 0, b"", b"text")]


def test_a_request_to_a_service(proc: Any, received: list[Frame]) -> None:
    elsewhere: Any = Sent()
    for link in (proc.local, elsewhere):
        assert service._send(proc, link, 8, "name", b"text")
    assert received == elsewhere.frames == [Frame(SERVICE, 0, 0, 8, 0, 0, b"name", b"text")]
