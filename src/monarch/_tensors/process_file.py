"""Files that each process writes for itself, under names that no two processes share.

Profiles and snapshots of all processes of a mesh go to one folder, which may be on a file system
that hosts share. A rank alone is no name: processes of two meshes have the same ranks, and so has
the same process in its second run. So a name has the rank where there is one, the host and the
process; a number follows where the file exists already. The file is created by the one call that
finds the name free, so it never replaces another.
"""

from __future__ import annotations

import itertools
import os
import socket

import torch

__all__ = ["create"]

rank: int | None = None
"""The rank of this process in its mesh: set by the mesh's worker."""


def create(folder: str, stem: str, suffix: str) -> str:
    """Create an empty file in a folder, which is made if necessary; return the path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first, second = create(folder, "trace", ".json"), create(folder, "trace", ".json")
    >>> first == second
    False
    """
    os.makedirs(folder, exist_ok=True)
    parts = [stem, _rank(), socket.gethostname(), str(os.getpid())]
    base = "_".join(part for part in parts if part)
    for number in itertools.count():
        path = os.path.join(folder, f"{base}_{number}{suffix}" if number else f"{base}{suffix}")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            continue
        return path
    raise AssertionError  # count() does not end


def _rank() -> str:
    """Return the rank of this process: in its mesh, else in torch's world; else nothing."""
    if rank is not None:
        return str(rank)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return ""
