"""The wait watch: looks at a process from time to time while it waits for answers.

A wait pays for the test of one flag (`WaitWatch.resting`): its beginning and end are not recorded.
A check follows `LONG` seconds after a wait has begun, on the thread of the proc's clock. It lets
the agent watch know that an answer has been awaited for a while. If the process has actors, the
search for deadlocks reads from their stacks what they wait for, and the checks go on as long as it
has found waits.

The search is a feature, `monarch._deadlock`. It is loaded at the first check that finds actors,
since most clients have none; a launcher has loaded it for its procs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.features import find

if TYPE_CHECKING:
    import asyncio

    from monarch._engine.runtime.io.bridge import LoopGate
    from monarch._engine.runtime.proc.proc import Proc
    from monarch._engine.transport.frame_link import FrameLink
    from monarch._engine.wire.frame import Frame

__all__ = ["LONG", "Search", "WaitWatch"]

LONG = 0.15
"""Seconds between two checks."""


class Search(Protocol):
    """The search for deadlocks of one process: the hook ``search_deadlocks`` returns it."""

    def look(self) -> bool:
        """Look for long waits; return whether some wait may become long. On the clock's thread."""
        ...

    def on_probe(self, link: FrameLink, frame: Frame) -> None:
        """Handle a PROBE frame. From any thread."""

    def follow(self, cell: Any, gate: LoopGate, task: asyncio.Task[None]) -> None:
        """Look for long waits of an async actor, whose mailbox `task` serves. On its loop."""


class WaitWatch:
    """See the module; one per proc. `resting`: no check is due, so a new wait must call `rouse`."""

    def __init__(self, proc: Proc) -> None:
        self.resting = True
        self._proc = proc
        self._due = False  # a check is scheduled; for the clock's thread
        self._search: Search | None = None
        self._lock = threading.Lock()

    @property
    def search(self) -> Search | None:
        """The search for deadlocks, made on first use; None if it is not installed."""
        return self._search or self._load()

    def _load(self) -> Search | None:
        make = find("search_deadlocks")
        with self._lock:  # several threads may be the first
            if self._search is None and make is not None:
                self._search = make(self._proc)
            return self._search

    def rouse(self) -> None:
        """Schedule a check, since a wait begins; from any thread."""
        self.resting = False
        self._proc.clock.call_later(0.0, self._arm)

    def on_probe(self, link: FrameLink, frame: Frame) -> None:
        """Pass a PROBE frame to the search; drop it if there is none. From any thread."""
        search = self.search
        if search is not None:
            search.on_probe(link, frame)

    # -- on the clock's thread -------------------------------------------------------------------

    def _arm(self) -> None:
        if not self._due:
            self._due = True
            self._proc.clock.call_later(LONG, self._look)

    def _look(self) -> None:
        self._due = False
        self.resting = True  # set first: a wait that begins during the check rouses the watch
        self._proc.agent_watch.look()
        search = self.search if self._proc.cells else self._search
        if search is not None and search.look():
            self.resting = False
            self._arm()
