"""`Device`: how bytes get to memory of a device, and away.

A route knows addresses. What is at an address of a device only its driver can reach, and torch has
that: `Device` is the little that we need of it, one for each type of device that torch names
("cuda", which is also what torch calls AMD's; "xpu"; ...). Its calls block, and when one returns
the bytes are where they belong. What kernels do to the memory is waited for if it was queued on the
device's default stream; a program that uses other streams synchronizes them before it tells others.
"""

from __future__ import annotations

from typing import Protocol

from monarch.rdma.memory import Memory

__all__ = ["Device", "NotShared"]


class NotShared(Exception):
    """Memory of a device cannot be used by two processes. The text is the reason."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Device(Protocol):
    """A type of device. All raise RdmaError for what the driver refuses."""

    def load(self, memory: Memory, at: int, into: memoryview) -> None:
        """Copy from the device's memory, from `at` on, as much as goes `into`."""
        ...

    def store(self, memory: Memory, at: int, data: memoryview) -> None:
        """Copy `data` to the device's memory, from `at` on."""
        ...

    def copy(self, into: Memory, into_at: int, source: Memory, source_at: int, count: int) -> None:
        """Copy between memories of devices of this type."""
        ...

    def main(self, count: int) -> memoryview:
        """So many bytes of main memory, to load into and to store from."""
        ...

    def share(self, memory: Memory) -> bytes:
        """What another process of this host needs to `open` the memory. Raises NotShared."""
        ...

    def open(self, shared: bytes) -> Memory:
        """Memory that another process shares, as long as what this returns. Raises NotShared."""
        ...
