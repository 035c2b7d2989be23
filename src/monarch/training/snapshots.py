"""Snapshots: copies of states in the memory of this rank, its own and those of neighbours.

A rank copies its own state every so many steps. Its neighbour (on another host if there is one)
reads that copy in the background, while both compute. So the loss of a host costs no read from
disk, and at most the steps since the last copy that was complete. The coordinator decides which
copies are still needed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from monarch import _spi
from monarch.rdma import RdmaError
from monarch.training.membership import Source, State
from monarch.training.state import Lent, Packed, lend, read

__all__ = ["Snapshots"]

_log = logging.getLogger("monarch.training")


class Snapshots:
    """The copies in the memory of one rank, by position and mark."""

    def __init__(self) -> None:
        self._copies: dict[State, Packed] = {}
        self._lent: dict[State, Lent] = {}
        self._lock = threading.Lock()
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
        self, sources: Sequence[Source], fetch: Callable[[Source], bytes], timeout: float
    ) -> None:
        """Copy snapshots of other ranks, in the background.

        A copy that fails is not there: the coordinator asks for it again. Only one round's copies
        are made at a time.
        """
        if not sources or self._pulling:
            return
        self._pulling = True

        def run() -> None:
            try:
                for source in sources:
                    packed = read(fetch(source), timeout)
                    self.add((source.position, source.mark), packed)
            except (RdmaError, _spi.Refused, _spi.Unreachable, TimeoutError) as error:
                # The owner has exited, or has dropped the copy because a newer one is complete.
                _log.info("a copy of a neighbour's state was not made: %s", error)
            finally:
                self._pulling = False

        _spi.start_thread("monarch-training", run)

    def close(self) -> None:
        """Drop everything."""
        self.keep(frozenset())
