"""The share of the host's cores that torch's own threads use in a process of a mesh.

Torch takes a thread for each core. Processes of a mesh compute at the same time, so together they
have several threads for each core, and each parallel loop ends when its slowest thread does. On 2
cores at load 10, an all-reduce of 1 MB by 2 processes took 41 ms so, and 1.7 ms with a thread each.
"""

from __future__ import annotations

import os

import torch

__all__ = ["share_cores", "threads_of"]


def threads_of(processes: int, own: int, host: int) -> int:
    """Return the threads of one of `processes` on a host.

    Args:
        processes: how many processes of the mesh the host has.
        own: the number of cores on which this one may run.
        host: the number of cores on which any may run.

    >>> threads_of(2, own=8, host=8), threads_of(16, own=8, host=8), threads_of(2, own=1, host=8)
    (4, 1, 1)
    """
    return max(1, min(own, host // processes))


def share_cores(processes: int) -> None:
    """Limit the threads of torch in this process, unless ``OMP_NUM_THREADS`` says how many."""
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    # A process that is bound to some cores has fewer than its parent.
    own, host = len(os.sched_getaffinity(0)), len(os.sched_getaffinity(os.getppid()))
    torch.set_num_threads(threads_of(processes, own, host))
