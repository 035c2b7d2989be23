"""Memory for blocks: private pages, and those of earlier blocks.

To fill new memory costs up to ten times as much CPU as to fill memory again, since the kernel
clears each page at its first use. So the origin, which needs a block only until it is copied, lends
the same memory to one block after the other. While it is idle the kernel may take its pages away
(MADV_FREE), so it is not missing elsewhere. Private pages cost less to get than shared ones.

Rejected: huge pages. They cost the least while the kernel has free ones, and after that more than
all others, since the kernel moves other pages to make room (measured on 6.18: twice the CPU).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from typing import Any

__all__ = ["Pool", "fresh"]

_KEPT = 3  # idle pieces: as many blocks as a reader makes travel at a time


def fresh(size: int) -> mmap.mmap:
    """Return `size` new bytes."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Pool:
    """Memory that is lent to one block after the other, in pieces of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._idle: deque[mmap.mmap] = deque()

    def lend(self, length: int) -> Any:
        """Return `length` bytes with any content. They are lent until the object is collected."""
        memory = self._idle.pop() if self._idle else fresh(self._size)
        lent = (ctypes.c_char * length).from_buffer(memory)
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent

    def _take_back(self, memory: mmap.mmap) -> None:
        if len(self._idle) < _KEPT:
            memory.madvise(mmap.MADV_FREE)
            self._idle.append(memory)
