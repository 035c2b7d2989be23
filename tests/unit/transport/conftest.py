"""Pairs of links over real socket pairs, driven by hand."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from monarch._engine.transport.link import Link

SCRATCH = memoryview(bytearray(256 << 10))


class End:
    """One end: its link, the frames it received, and its requests to be flushed."""

    def __init__(self, sock: socket.socket, name: str, frame_limit: int, queue_limit: int) -> None:
        self.wants = 0
        self.waits = False
        self.link = Link(sock, name, self._want, frame_limit, queue_limit)
        self.frames: list = []

    def _want(self, link: Link, on: bool) -> None:
        assert link._lock.locked(), "changes are reported in the order they are made"
        self.waits = on
        self.wants += on

    def flush(self) -> None:
        if self.waits:
            self.link.flush()

    def read(self) -> bool:
        """Receive once; return whether any frames arrived."""
        before = len(self.frames), self.link.reader._filled
        self.frames += self.link.receive(SCRATCH)
        return (len(self.frames), self.link.reader._filled) != before


def open_fds() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue
    return sorted(found)


@pytest.fixture(scope="session", autouse=True)
def quick_collections() -> None:
    """Freeze earlier tests' objects: tests here collect again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ends() -> Iterator[Callable[..., tuple[End, End]]]:
    made: list[End] = []

    def make(
        frame_limit: int = 64 << 20, queue_limit: int = 1 << 20, buffer: int | None = None
    ) -> tuple[End, End]:
        pair = socket.socketpair()
        if buffer is not None:
            for sock in pair:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        left, right = (
            End(sock, name, frame_limit, queue_limit)
            for sock, name in zip(pair, ("proc a", "proc b"), strict=True)
        )
        made.extend((left, right))
        return left, right

    yield make
    for end in made:
        end.link.close("test over")
