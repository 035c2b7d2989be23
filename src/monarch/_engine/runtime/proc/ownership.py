"""Types for failures: what ended a process, what waits for it, what owned its actors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import Verdict

__all__ = ["OwnedMesh", "Owner", "Sink", "Verdict"]


class Sink(Protocol):
    """A waiter at a port. Called on the reactor's or a local sender's thread; must not block."""

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None: ...

    def peer_lost(self, link: Any, verdict: Verdict) -> None: ...


class Owner(Protocol):
    """An owner of meshes: an actor of this process, or the root client."""

    def child_ended(self, mesh: OwnedMesh, rank: int, failure: Failure) -> None: ...

    def _disown(self, uid: int) -> None: ...


class OwnedMesh:
    """The record of one actor mesh: its owner, the links to its ranks, the ranks that ended."""

    __slots__ = ("display", "gone", "links", "name", "owner", "rank_text", "supervised", "uid")

    def __init__(
        self,
        uid: int,
        owner: Owner,
        name: str,
        display: str,
        links: list[Any],
        rank_text: Callable[[int], str],
    ) -> None:
        self.uid = uid
        self.supervised = False  # whether failed ranks may be restarted
        self.owner = owner
        self.name = name
        self.display = display
        self.links = links
        self.rank_text = rank_text
        self.gone: dict[int, Failure] = {}

    def failure_of(
        self, rank: int, verdict: Verdict, others: dict[str, tuple[int, ...]]
    ) -> Failure:
        """Return the failure of one rank as its process ended; `others` ended along with it."""
        actor = self.display + self.rank_text(rank) + ">"
        return Failure(actor, verdict, self.name, (rank,), others=others)
