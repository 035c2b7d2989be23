"""`Device`: how bytes are copied to and from the memory of a device.

Only the driver of a device can access its memory, and torch has access to the driver. `Device` is
the small part of that which routes need, one object for each type of device that torch names
("cuda", which is also torch's name for AMD's; "xpu"; ...). Its calls block until the bytes have
been copied. A call waits for kernels that were queued on the device's default stream. A program
that uses other streams must synchronize them before it notifies other processes.
"""

from __future__ import annotations

from typing import Protocol

from monarch.rdma.memory import Memory

__all__ = ["Device", "NotShared"]


class NotShared(Exception):
    """Memory of a device cannot be shared between two processes. The text is the reason."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Device(Protocol):
    """A type of device. All methods raise RdmaError when the driver fails."""

    def load(self, memory: Memory, at: int, into: memoryview) -> None:
        """Copy from the device's memory, from `at` on, until `into` is full."""
        ...

    def store(self, memory: Memory, at: int, data: memoryview) -> None:
        """Copy `data` to the device's memory, from `at` on."""
        ...

    def copy(self, into: Memory, into_at: int, source: Memory, source_at: int, count: int) -> None:
        """Copy between two memories of devices of this type."""
        ...

    def main(self, count: int) -> memoryview:
        """Return `count` bytes of main memory that is good for `load` and `store`."""
        ...

    def share(self, memory: Memory) -> bytes:
        """Return what another process of this host needs to `open` the memory.

        Raises NotShared.
        """
        ...

    def open(self, shared: bytes) -> Memory:
        """Map memory that another process shares, as long as the result exists.

        Raises NotShared.
        """
        ...
