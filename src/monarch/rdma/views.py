"""Users' memory as bytes, for routes that send and receive.

Only this module gives such routes access to users' memory, at either end. Main memory is used in
place. Memory of a device is staged in main memory: `source` copies it there before it is sent, and
`landed` copies it back after all of `target` was received.
"""

from __future__ import annotations

from monarch.rdma.devices import device_of, main_view
from monarch.rdma.memory import CPU, Memory

__all__ = ["landed", "source", "target"]


def source(memory: Memory, at: int, count: int) -> memoryview:
    """Return a view of `count` bytes from `at` on, to read from.

    The caller keeps `memory` alive as long as the view is used. Raises RdmaError if the device
    fails.
    """
    if memory.device == CPU:
        return main_view(memory, at, count)
    device = device_of(memory)
    view = device.main(count)
    device.load(memory, at, view)
    return view


def target(memory: Memory, at: int, count: int) -> memoryview:
    """Return a view to receive `count` bytes that belong at `at`; call `landed` afterwards.

    The caller keeps `memory` alive as long as the view is used.
    """
    return main_view(memory, at, count) if memory.device == CPU else device_of(memory).main(count)


def landed(memory: Memory, at: int, view: memoryview) -> None:
    """Store a `target` that was received completely. Raises RdmaError if the device fails."""
    if memory.device != CPU:
        device_of(memory).store(memory, at, view)
