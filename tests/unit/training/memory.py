"""Registered memory and reads of it, within one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["Action", "Memory"]

_all: list[Memory] = []


class Memory:
    """In the place of `RDMABuffer`."""

    def __init__(self, tensor: Any, *, read_only: bool) -> None:
        assert read_only
        self.tensor = tensor
        _all.append(self)

    def __getitem__(self, part: slice) -> Memory:
        return Memory(self.tensor[part], read_only=True)

    def __reduce__(self) -> Any:
        return _find, (_all.index(self),)

    def drop(self) -> None:
        self.tensor = None


class Action:
    """In the place of `RDMAAction`."""

    read = 0
    """Bytes so far, by all actions."""

    def read_remote(self, into: Any, memory: Memory) -> None:
        into.copy_(memory.tensor)
        Action.read += into.numel()

    def submit(self, *, timeout: float) -> Any:
        assert timeout > 0
        return SimpleNamespace(get=lambda: None)


def _find(number: int) -> Memory:
    return _all[number]
