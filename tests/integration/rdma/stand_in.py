"""A stand-in for a device: memory that no route may touch directly, and counted copies.

The memory is a memory file. Its addresses lead to pages without access rights, so code that treats
it as main memory crashes. Processes share it by the name of the file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from monarch.rdma.device import NotShared
from monarch.rdma.devices import devices
from monarch.rdma.memory import Memory, memory_of

__all__ = ["DEVICE", "StandIn", "content", "install", "memory"]

DEVICE = "cuda:0"


class Buffer:
    """Memory of the device."""

    def __init__(self, size: int, path: str = "") -> None:
        self.fd = os.open(path, os.O_RDWR) if path else os.memfd_create("stand-in")
        os.ftruncate(self.fd, size)
        self.bytes = mmap.mmap(self.fd, size)
        self._nowhere = memory_of(mmap.mmap(-1, size))
        self.address = self._nowhere.address
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(size), 0)

    def __del__(self, _close: Any = os.close) -> None:
        _close(self.fd)


class StandIn:
    """The stand-in's implementation of `Device`."""

    def __init__(self, *, shares: bool = True) -> None:
        self.shares = shares
        self.loaded = self.stored = self.copied = self.opened = 0

    def load(self, memory: Memory, at: int, into: memoryview) -> None:
        self.loaded += len(into)
        into[:] = memory.pin.bytes[at : at + len(into)]

    def store(self, memory: Memory, at: int, data: memoryview) -> None:
        self.stored += len(data)
        memory.pin.bytes[at : at + len(data)] = data

    def copy(self, into: Memory, into_at: int, source: Memory, source_at: int, count: int) -> None:
        self.copied += count
        data = source.pin.bytes[source_at : source_at + count]
        into.pin.bytes[into_at : into_at + count] = data

    def main(self, count: int) -> memoryview:
        return memoryview(bytearray(count))

    def share(self, memory: Memory) -> bytes:
        if not self.shares:
            raise NotShared("the stand-in keeps it to itself", "buy one")
        return f"{memory.nbytes} /proc/{os.getpid()}/fd/{memory.pin.fd}".encode()

    def open(self, shared: bytes) -> Memory:
        self.opened += 1
        size, path = shared.decode().split()
        buffer = Buffer(int(size), path)
        return Memory(buffer.address, int(size), True, buffer, DEVICE)


def install(*, shares: bool = True) -> StandIn:
    """Make the stand-in this process's device "cuda"."""
    device = StandIn(shares=shares)
    devices["cuda"] = device
    return device


def memory(data: bytes) -> Memory:
    """Make memory of the device, which `RDMABuffer` and transfers accept."""
    buffer = Buffer(len(data))
    buffer.bytes[:] = data
    return Memory(buffer.address, len(data), True, buffer, DEVICE)


def content(memory: Memory) -> bytes:
    return bytes(memory.pin.bytes)
