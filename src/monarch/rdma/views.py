"""Memory as bytes: what a route that sends and receives reads from and writes to.

The one place where such a route touches memory: the memory of users, at either end. Main memory is
used where it is. Memory of a device is copied to main memory by `source`, before it is sent, and
from there by `landed`, when all of `target` was received.
"""

from __future__ import annotations

from monarch.rdma.devices import device_of, main_view
from monarch.rdma.memory import CPU, Memory

__all__ = ["landed", "source", "target"]


def source(memory: Memory, at: int, count: int) -> memoryview:
    """`count` bytes from `at` on, to be read. Keep `memory` as long as they are used.

    Raises RdmaError if a device does not give them.
    """
    if memory.device == CPU:
        return main_view(memory, at, count)
    device = device_of(memory)
    view = device.main(count)
    device.load(memory, at, view)
    return view


def target(memory: Memory, at: int, count: int) -> memoryview:
    """Where to put `count` bytes that belong to `at`. Keep `memory` as long as it is used."""
    return main_view(memory, at, count) if memory.device == CPU else device_of(memory).main(count)


def landed(memory: Memory, at: int, view: memoryview) -> None:
    """All of a `target` has been received. Raises RdmaError if a device does not take it."""
    if memory.device != CPU:
        device_of(memory).store(memory, at, view)
