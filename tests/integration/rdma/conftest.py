"""Owners of memory in other processes, and fixtures that run a test on all routes within a host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch.actor import Actor, ProcMesh, endpoint, this_host
from monarch.config import configured
from monarch.rdma import RDMABuffer

WAIT = 60.0
"""Seconds after which a wait is a hang."""


class Owner(Actor):
    """Owns memory, and shows its contents."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def make(self, name: str, content: bytes, **options: Any) -> RDMABuffer:
        self.memory[name] = bytearray(content)
        return RDMABuffer(self.memory[name], **options)

    @endpoint
    def make_frozen(self, content: bytes) -> RDMABuffer:
        return RDMABuffer(content)

    @endpoint
    def look(self, name: str) -> bytes:
        return bytes(self.memory[name])

    @endpoint
    def grow(self, name: str) -> int:
        """Append a byte, which is possible only while the memory is not registered."""
        self.memory[name].append(0)
        return len(self.memory[name])


@pytest.fixture
def procs() -> Iterator[Callable[[int], ProcMesh]]:
    """Yield a function that makes processes for one test; stop them after it."""
    made: list[ProcMesh] = []

    def make(count: int = 1) -> ProcMesh:
        made.append(this_host().spawn_procs({"gpus": count}))
        return made[-1]

    yield make
    for mesh in made:
        mesh.stop().get(timeout=WAIT)


@pytest.fixture(scope="module")
def shared_owner() -> Iterator[Any]:
    """Start an owner in another process, for tests that leave it unchanged."""
    with configured(rdma_routes=""):
        mesh = this_host().spawn_procs({"gpus": 1})
    yield mesh.spawn("owner", Owner)
    mesh.stop().get(timeout=WAIT)


@pytest.fixture(params=["same process", "same host", "socket"])
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield `make(content) -> (buffer, look)`: memory here or there; `look` reads its content."""
    count = 0

    def here(content: bytes, **options: Any) -> tuple[RDMABuffer, Callable[[], bytes]]:
        memory = bytearray(content)
        return RDMABuffer(memory, **options), lambda: bytes(memory)

    def there(content: bytes, **options: Any) -> tuple[RDMABuffer, Callable[[], bytes]]:
        nonlocal count
        count += 1
        name = f"{request.node.name} {count}"
        owner = request.getfixturevalue("shared_owner")
        buffer = owner.make.call_one(name, content, **options).get(timeout=WAIT)
        return buffer, lambda: owner.look.call_one(name).get(timeout=WAIT)

    with configured(rdma_routes="stream" if request.param == "socket" else ""):
        yield here if request.param == "same process" else there
