"""The thread that asks NIXL how transfers go: the library tells nobody by itself.

One per process, started with the first transfer or the first peer that comes. It sleeps when
nothing is under way; while something is it looks again and again, the less often the longer it
takes. Whatever takes long (to start the agent, to register memory, to connect) runs here too.
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

_SHORTEST, _LONGEST = 1e-5, 1e-3  # seconds between two looks
_EAGER = 100  # looks until the pause grows


class Job(Protocol):
    """Something under way."""

    def look(self) -> bool | None:
        """Go on if that is possible. True: it is over; None: nothing has happened."""
        ...


class Progress:
    """See the module."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._agent: Agent | Unavailable | None = None
        _spi.start_thread("monarch-rdma-nixl", self._run)

    @property
    def ready(self) -> Agent | None:
        """The agent, if it has been made."""
        return self._agent if isinstance(self._agent, Agent) else None

    def agent(self) -> Agent:
        """The agent; on this thread only. Raises Unavailable."""
        if self._agent is None:
            try:
                self._agent = Agent(f"monarch-{registry.own_registry().identity.hex()}")
            except Unavailable as error:
                self._agent = error
        if isinstance(self._agent, Unavailable):
            raise self._agent
        return self._agent

    def warm(self) -> None:
        """Start the agent, for whoever will need it soon; on this thread only."""
        with contextlib.suppress(Unavailable):  # whoever needs it will hear of it
            self.agent()

    def do(self, task: Callable[[], None]) -> None:
        """Run it on this thread."""
        self._tasks.put(task)

    def follow(self, job: Job) -> None:
        """Look at it until it is over; on this thread only."""
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
                del task  # it may have hold of memory
                idle = 0
            idle = 0 if self._look() else idle + 1

    def _look(self) -> bool:
        """Look at all that is under way; whether anything has happened."""
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
    """The one of this process."""
    global _progress
    if _progress is None:
        with _making:
            if _progress is None:
                _progress = Progress()
    return _progress


def _forget() -> None:
    """In a forked child: the thread is not there, and the connections are the parent's."""
    global _progress, _making
    _progress = None
    _making = threading.Lock()


_spi.when_forked(_forget)
