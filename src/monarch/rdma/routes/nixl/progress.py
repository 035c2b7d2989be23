"""The thread that polls the transfers of NIXL, since the library sends no notification.

There is one such thread per process, started with the first transfer or the first request of a
peer. It sleeps when no transfer is under way. Otherwise it polls, less often the longer a transfer
takes. Tasks that take long (starting the agent, registering memory, connecting) run on it, too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from monarch import _spi
from monarch.rdma import registry
from monarch.rdma.routes import Unavailable
from monarch.rdma.routes.nixl.library import Agent

__all__ = ["Job", "Progress", "progress"]

_SHORTEST, _LONGEST = 1e-5, 1e-3  # seconds between two polls
_EAGER = 100  # polls until the pause grows


class Job(Protocol):
    """A transfer that the thread polls."""

    def look(self) -> bool | None:
        """Advance if possible. True: it has ended; False: it advanced; None: no change."""
        ...


class Progress:
    """The polling thread, its tasks and its agent; see the module."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._agent: Agent | Unavailable | None = None
        _spi.start_thread("monarch-rdma-nixl", self._run)

    @property
    def ready(self) -> Agent | None:
        """The agent, if it was started successfully."""
        return self._agent if isinstance(self._agent, Agent) else None

    def agent(self) -> Agent:
        """Return the agent, started on first use; on this thread only. Raises Unavailable."""
        if self._agent is None:
            try:
                self._agent = Agent(f"monarch-{registry.own_registry().identity.hex()}")
            except Unavailable as error:
                self._agent = error
        if isinstance(self._agent, Unavailable):
            raise self._agent
        return self._agent

    def warm(self) -> None:
        """Start the agent before it is needed; on this thread only."""
        with contextlib.suppress(Unavailable):  # `agent` raises it again when it is needed
            self.agent()

    def do(self, task: Callable[[], None]) -> None:
        """Run a task on this thread."""
        self._tasks.put(task)

    def follow(self, job: Job) -> None:
        """Poll a job until it has ended; on this thread only."""
        self._jobs.append(job)

    def _run(self) -> None:
        idle = 0
        while True:
            try:
                task = self._tasks.get(timeout=self._pause(idle))
            except queue.Empty:
                pass
            else:
                task()
                del task  # it may refer to users' memory
                idle = 0
            idle = 0 if self._look() else idle + 1

    def _look(self) -> bool:
        """Poll all jobs; return whether any of them advanced."""
        moved = False
        for job in list(self._jobs):
            seen = job.look()
            moved = moved or seen is not None
            if seen:
                self._jobs.remove(job)
        return moved

    def _pause(self, idle: int) -> float | None:
        if not self._jobs:
            return None
        return min(_LONGEST, _SHORTEST * (1 + idle // _EAGER))


_progress: Progress | None = None
_making = threading.Lock()


def progress() -> Progress:
    """Return the polling thread of this process, started on first use."""
    global _progress
    if _progress is None:
        with _making:
            if _progress is None:
                _progress = Progress()
    return _progress


def _forget() -> None:
    """Start anew in a forked child: it has no such thread, and connections are the parent's."""
    global _progress, _making
    _progress = None
    _making = threading.Lock()


_spi.when_forked(_forget)
