"""The history of a GPU's memory, as a file for each process.

This is the half that runs in the process whose memory it is. See `process_file` for the names.
https://pytorch.org/memory_viz shows the files.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from monarch._tensors import process_file

__all__ = ["dump_memory_snapshot", "record_memory_history"]


def record_memory_history() -> None:
    """Record allocations of CUDA memory from now on, each with its stack.

    Raise `RuntimeError` in a process without a CUDA device: torch has no record of main memory.
    """
    _need_cuda()
    torch.cuda.memory._record_memory_history()


def dump_memory_snapshot(*args: Any, dir_snapshots: str, **kwargs: Any) -> str:
    """Write what was recorded into a new file of the folder; return its path.

    Other arguments are those of torch's snapshot (`device`). Raise `RuntimeError` in a process
    without a CUDA device.
    """
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
