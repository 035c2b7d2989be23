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
from contextlib import AbstractContextManager

from monarch import _spi

__all__ = ["CORES", "Pool", "spread"]

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Threads and the jobs that are queued for them; a thread serves the pool that started it."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.lock: AbstractContextManager[object] = threading.Lock()
        self._threads = 0
        self._due = 0
        """The number of unfinished jobs, both queued ones and those that a thread has taken."""

    def spread(self, job: Callable[[], None], times: int) -> None:
        """See the function `spread`."""
        most = max(1, _spi.settings.rdma_runtime_worker_threads)
        for _ in range(times):
            self.jobs.put(job)
        with self.lock:
            self._due += times
            wanted = max(0, min(self._due, most) - self._threads)
            self._threads += wanted
        for _ in range(wanted):
            _spi.start_thread("monarch-rdma", self._work)

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            job()
            del job  # the job refers to users' memory
            with self.lock:
                self._due -= 1


_pool = Pool()


def spread(job: Callable[[], None], times: int) -> None:
    """Run `job` on up to `times` threads at once; the job itself finds out what is left to do.

    Does not block, except in the simulator, where the job runs before this returns.
    """
    if _spi.is_simulated():
        job()
    else:
        _pool.spread(job, times)


def _forget() -> None:
    """Begin without threads in a forked child."""
    global _pool
    _pool = Pool()


_spi.when_forked(_forget)
