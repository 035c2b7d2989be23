"""Copies within this process, between memory of any devices.

A copy between two types of device goes through main memory.
"""

from __future__ import annotations

import ctypes

from monarch.rdma.device import Device
from monarch.rdma.memory import CPU, Memory
from monarch.rdma.torch_device import TorchDevice

__all__ = ["copy", "device_of", "devices", "main_view"]

_torch = TorchDevice()

devices: dict[str, Device] = {}
"""The devices by type. All others belong to torch."""


def device_of(memory: Memory) -> Device:
    """Return the driver for memory that is not main memory."""
    return devices.get(memory.device.partition(":")[0], _torch)


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object
_WRITE = 0x200  # PyBUF_WRITE of the C API


def main_view(memory: Memory, at: int, count: int) -> memoryview:
    """Return a view of `count` bytes of main memory from `at` on.

    The caller keeps `memory` alive as long as the view is used.
    """
    view: memoryview = _view(memory.address + at, count, _WRITE)
    return view


def copy(into: Memory, into_at: int, source: Memory, source_at: int, count: int) -> None:
    """Copy within this process, between memory of any devices. Raises RdmaError."""
    if source.device == CPU:
        if into.device == CPU:
            ctypes.memmove(into.address + into_at, source.address + source_at, count)
        else:
            device_of(into).store(into, into_at, main_view(source, source_at, count))
        return
    device = device_of(source)
    if into.device == CPU:
        device.load(source, source_at, main_view(into, into_at, count))
    elif device_of(into) is device:
        device.copy(into, into_at, source, source_at, count)
    else:
        between = device.main(count)
        device.load(source, source_at, between)
        device_of(into).store(into, into_at, between)
