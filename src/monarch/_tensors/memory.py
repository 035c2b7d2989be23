"""The history of a GPU's memory, as a file for each process of the active mesh.

Without an active mesh it is about the process that calls, such as in a remote function. See
`process_file` for the names. https://pytorch.org/memory_viz shows the files.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from monarch._tensors import process_file
from monarch._tensors.active import active
from monarch._tensors.remote import remote

__all__ = ["dump_memory_snapshot", "record_memory_history"]


def record_memory_history() -> None:
    """Record allocations of CUDA memory from now on, each with its stack.

    While a mesh is active, in each of its processes. Raise `RuntimeError` in a process without a
    CUDA device, since torch has no record of main memory: on a mesh as an error of the operation.
    """
    if active().mesh is None:
        _record()
    else:
        _record_remote()


def dump_memory_snapshot(*args: Any, dir_snapshots: str, **kwargs: Any) -> str | None:
    """Write what was recorded into a new file of the folder `dir_snapshots`.

    While a mesh is active, each process writes its own, and the result is None. Otherwise this
    process does; return its path. Other arguments are those of torch's snapshot (`device`). Raise
    `RuntimeError` as `record_memory_history` does.
    """
    if active().mesh is None:
        return _dump(*args, dir_snapshots=dir_snapshots, **kwargs)
    _dump_remote(*args, dir_snapshots=dir_snapshots, **kwargs)
    return None


def _record() -> None:
    _need_cuda()
    torch.cuda.memory._record_memory_history()


def _dump(*args: Any, dir_snapshots: str, **kwargs: Any) -> str:
    _need_cuda()
    snapshot = torch.cuda.memory._snapshot(*args, **kwargs)
    path = process_file.create(dir_snapshots, "snapshot", ".pickle")
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)
    return path


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "the history of memory is the one of CUDA's allocator, and this process has no CUDA "
            "device"
        )


_record_remote = remote(_record, propagate="inspect")
_dump_remote = remote(_dump, propagate="inspect")
