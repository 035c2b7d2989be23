"""Snapshots: copies of states in the memory of this rank, its own and those of neighbours.

A rank copies its own state every so many steps. Its neighbour (on another host if there is one)
reads that copy in the background, while both compute, and says so to the coordinator. So the loss
of a host costs no read from disk, and at most the steps since the last copy that was complete. The
coordinator decides which copies are still needed, and which a commit has to wait for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from monarch import _spi
from monarch.rdma import RdmaError
from monarch.training.membership import Source, State
from monarch.training.state import Lent, Packed, lend, read

__all__ = ["Snapshots"]

_log = logging.getLogger("monarch.training")

Report: TypeAlias = Callable[[State, str], None]


class Snapshots:
    """The copies in the memory of one rank, by position and mark."""

    def __init__(self) -> None:
        self._copies: dict[State, Packed] = {}
        self._lent: dict[State, Lent] = {}
        self._lock = threading.Lock()
        self._wanted: list[tuple[Source, Report]] = []  # what is to be copied next
        self._pulling = False

    def __contains__(self, state: State) -> bool:
        with self._lock:
            return state in self._copies

    @property
    def stock(self) -> tuple[State, ...]:
        """Return the states of which there is a complete copy."""
        with self._lock:
            return tuple(self._copies)

    def add(self, state: State, packed: Packed) -> None:
        """Keep a copy, whose memory belongs to it from now on."""
        with self._lock:
            self._copies[state] = packed

    def get(self, state: State) -> Packed:
        """Return a copy. Raises KeyError if there is none."""
        with self._lock:
            return self._copies[state]

    def manifest(self, state: State) -> bytes:
        """Return the description of a copy for those that read it."""
        if state not in self._lent:
            self._lent[state] = lend(self.get(state))
        return self._lent[state].manifest

    def keep(self, marks: frozenset[int]) -> None:
        """Drop the copies with other marks."""
        with self._lock:
            for state in [state for state in self._copies if state[1] not in marks]:
                del self._copies[state]
                lent = self._lent.pop(state, None)
                if lent is not None:
                    lent.drop()

    def pull(
        self,
        sources: Sequence[Source],
        fetch: Callable[[Source], bytes],
        timeout: float,
        report: Report,
    ) -> None:
        """Copy snapshots of other ranks, in the background.

        `report` is called for each with the reason why it failed, or "". A copy that failed is
        asked for again by the coordinator. A later call replaces what an earlier one has not begun.
        """
        with self._lock:
            self._wanted = [(source, report) for source in sources]
            if self._pulling or not sources:
                return
            self._pulling = True

        def run() -> None:
            while (wanted := self._next()) is not None:
                source, report = wanted
                state, why = (source.position, source.mark), ""
                if state not in self:
                    try:
                        self.add(state, read(fetch(source), timeout))
                    except (RdmaError, _spi.Refused, _spi.Unreachable, TimeoutError) as error:
                        # The owner has exited, or the round with its offer is over.
                        why = str(error)
                        _log.info("a copy of a neighbour's state was not made: %s", why)
                report(state, why)

        _spi.start_thread("monarch-training", run)

    def _next(self) -> tuple[Source, Report] | None:
        with self._lock:
            if self._wanted:
                return self._wanted.pop(0)
            self._pulling = False
            return None

    def close(self) -> None:
        """Drop everything."""
        self.keep(frozenset())
