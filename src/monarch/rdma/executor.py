"""The threads that carry out copies which are too long for the caller's own thread.

The threads start when there is work, and are kept; the setting `rdma_runtime_worker_threads` is
their maximum. A job that is spread is queued several times, and each thread that takes it carries
out slices of it until none is left. In the simulator, which runs one thread at a time, jobs run in
the caller's thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from monarch import _spi

__all__ = ["CORES", "spread"]

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_lock = threading.Lock()
_threads = 0
_due = 0
"""The number of unfinished jobs, both queued ones and those that a thread has taken."""


def spread(job: Callable[[], None], times: int) -> None:
    """Run `job` on up to `times` threads at once; the job itself finds out what is left to do.

    Does not block, except in the simulator, where the job runs before this returns.
    """
    if _spi.is_simulated():
        job()
        return
    global _threads, _due
    most = max(1, _spi.settings.rdma_runtime_worker_threads)
    for _ in range(times):
        _jobs.put(job)
    with _lock:
        _due += times
        wanted = max(0, min(_due, most) - _threads)
        _threads += wanted
    for _ in range(wanted):
        _spi.start_thread("monarch-rdma", _work)


def _work() -> None:
    global _due
    while True:
        job = _jobs.get()
        job()
        del job  # the job refers to users' memory
        with _lock:
            _due -= 1


def _forget() -> None:
    global _jobs, _lock, _threads, _due
    _jobs = queue.SimpleQueue()
    _lock = threading.Lock()
    _threads = _due = 0


_spi.when_forked(_forget)
