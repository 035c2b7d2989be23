"""The calls that this process awaits, and how far each of them is.

A call is found at the port where its answers arrive, and is awaited if a thread or a coroutine
waits for its future. So calls do not announce themselves, and a call that no code looks for costs
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from monarch._spi import PENDING, ActorMesh, Arrivals, Future, Proc
from monarch.actor import Point

__all__ = ["AwaitedCall", "awaited_calls"]

_OLDEST = 1000  # calls that are looked at: of many, the oldest become long first
_NAMED = 4  # ranks


class AwaitedCall:
    """A call, from when it is first seen to be awaited."""

    def __init__(self, answers: Any, now: float) -> None:
        self.answers: Future[Any] = answers
        self.name: str = answers._endpoint._call
        self._since = now

    def seconds(self, now: float) -> float:
        """Return for how long the call has been awaited."""
        return now - self._since

    @property
    def is_settled(self) -> bool:
        return self.answers._phase != PENDING

    def progress(self) -> tuple[int, int]:
        """Return how many ranks have answered, and how many were called."""
        call: Any = self.answers
        asked = len(call._links) if isinstance(call, Arrivals) else call._asked()
        return asked - len(self._missing()), asked

    def state(self) -> str:
        """Return a text such as ``trainers.step: 5 of 8 ranks, waiting for gpus=3, 6, 7``."""
        answered, asked = self.progress()
        call: Any = self.answers
        where = _places(call._endpoint.mesh, self._missing())
        if asked > 1:
            return f"{self.name}: {answered} of {asked} ranks, waiting for {where}"
        return f"{self.name}: waiting for {where or 'the answer'}"

    def outcome(self, now: float) -> str:
        """Return a text about a call that is no longer awaited."""
        answered, asked = self.progress()
        after = f"{self.seconds(now):.0f} s"
        if not self.is_settled:
            ranks = f"{answered} of {asked} ranks answered"
            return f"{self.name}: no longer awaited after {after}, {ranks}"
        if self.answers.cancelled():
            return f"{self.name}: cancelled after {after}"
        if self.answers._has_error():
            return f"{self.name}: failed after {after}"
        ranks = f"{asked} ranks answered" if asked > 1 else "answered"
        return f"{self.name}: {ranks} in {after}"

    def _missing(self) -> list[int]:
        call: Any = self.answers
        ranks: list[int] = call._owed() if isinstance(call, Arrivals) else call._lacks()
        return [] if self.is_settled else ranks


def awaited_calls(proc: Proc) -> dict[int, Any]:
    """Return the futures of the calls of this process that are awaited, by their ports."""
    sinks: list[Any] = list(proc.ports.values())
    return {sink._port: sink for sink in itertools.islice(sinks, _OLDEST) if _is_awaited(sink)}


def _is_awaited(sink: Any) -> bool:
    if not hasattr(sink, "_endpoint"):  # no call, but a channel or an operation of the runtime
        return False
    if isinstance(sink, Arrivals):
        return any(answer._parked for answer in list(sink._line))
    waiters: int = len(sink._parked)
    return waiters > (sink._endpoint._timeout is not None)  # whose timer is one of them


def _places(mesh: ActorMesh, ranks: Sequence[int]) -> str:
    """Return coordinates of ranks, in the mesh of their processes, such as ``gpus=3, 6``."""
    extent = mesh._proc_mesh.extent
    named = [mesh._shape.ndslice[rank] for rank in ranks[:_NAMED]]
    more = f" and {len(ranks) - _NAMED:,} more" if len(ranks) > _NAMED else ""
    labels = list(extent)
    if not labels:
        return ""
    if len(labels) == 1:
        return f"{labels[0]}={', '.join(map(str, named))}{more}"
    points = [Point(rank, extent) for rank in named]
    texts = [" ".join(f"{label}={point[label]}" for label in labels) for point in points]
    return f"{', '.join(texts)}{more}"
