"""Unnamed files: memory that processes share by a descriptor, freed with the last one."""

from __future__ import annotations

import os

__all__ = ["memory_file"]


def memory_file(size: int = 0) -> int:
    """Return the descriptor of a new file, all zeros, which executed programs do not inherit."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("monarch", os.MFD_CLOEXEC)
    else:  # not Linux: an unlinked temporary file, kept in the page cache
        import tempfile

        fd, path = tempfile.mkstemp(prefix="monarch-")
        os.unlink(path)
    if size:
        os.ftruncate(fd, size)
    return fd
