"""Memory as bytes: what a route that sends and receives reads from and writes to.

The one place where such a route touches memory: the memory of users, at either end. Main memory is
used where it is. Memory of a device would be copied to main memory by `source`, before it is sent,
and from there by `landed`, when all of `target` was received.
"""

from __future__ import annotations

import ctypes

from monarch.rdma.memory import Memory

__all__ = ["landed", "source", "target"]

_READ = 0x100  # of the C API: PyBUF_READ, PyBUF_WRITE
_WRITE = 0x200

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


def source(memory: Memory, at: int, count: int) -> memoryview:
    """`count` bytes from `at` on, to be read. Keep `memory` as long as they are used."""
    view: memoryview = _view(memory.address + at, count, _READ)
    return view


def target(memory: Memory, at: int, count: int) -> memoryview:
    """Where to put `count` bytes that belong to `at`. Keep `memory` as long as it is used."""
    view: memoryview = _view(memory.address + at, count, _WRITE)
    return view


def landed(memory: Memory, at: int, view: memoryview) -> None:
    """All of a `target` has been received."""
