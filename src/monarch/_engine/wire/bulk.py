"""Large `bytes` objects: received into huge pages.

A `bytes` object must be built by copying. Above the allocator's largest threshold (32 MB in glibc)
its memory is fresh each time, and the page faults of 4 kB pages cost four times the copy. So large
`bytes` that are an argument or a result themselves (not inside a container) are sent out of band,
and the receiver asks for huge pages before it copies. Where the kernel has no huge pages, or the C
library has no `madvise`, the same copy is done with small pages.

Measured by the rows ``bytes_64mb_*`` of the benchmarks: 8 ms instead of 33 ms for 64 MB.
"""

from __future__ import annotations

import mmap
import pickle
from typing import Any

__all__ = ["BULK", "Bulk", "is_bulk"]

BULK = 1 << 20  # bytes
_HUGE = 4 << 20  # from this size on the allocator's memory is likely fresh
_HEADER = bytes.__basicsize__ - 1


class Bulk:
    """Wraps a large `bytes` for the pickler; unpickles as the bytes themselves."""

    __slots__ = ("_content",)

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        import ctypes

        # Unpickling wraps a read-only buffer in a read-only view, whose address cannot be found. So
        # this buffer looks writable, although it is never written to.
        kind: Any = ctypes.c_char * len(self._content)
        memory = kind.from_address(id(self._content) + _HEADER)
        memory.bulk = self._content  # keeps the bytes alive, and marks the buffer for `is_bulk`
        return _build, (pickle.PickleBuffer(memory),)


def is_bulk(buffer: memoryview) -> bool:
    """Whether an out-of-band buffer is a large `bytes`, which the receiver copies at once."""
    return hasattr(buffer.obj, "bulk")


def _build(buffer: Any) -> bytes:
    view = memoryview(buffer)
    if view.nbytes < _HUGE or view.readonly or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytes(view)
    import ctypes

    new = ctypes.pythonapi.PyBytes_FromStringAndSize
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
    content: bytes = new(None, view.nbytes)
    start = id(content) + _HEADER
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + view.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # only advice: a refusal costs time, nothing else
    libc.madvise(first, length, mmap.MADV_HUGEPAGE)
    source = (ctypes.c_char * view.nbytes).from_buffer(view)
    ctypes.memmove(start, source, view.nbytes)
    return content
