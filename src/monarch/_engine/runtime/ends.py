"""The vocabulary of loss: why a process is gone, who waits for it, and who owned what ran there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import Verdict

__all__ = ["OwnedMesh", "Owner", "Sink", "Verdict"]


class Sink(Protocol):
    """What waits at a port. Called on the reactor thread, or a local sender's; must not block."""

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None: ...

    def peer_lost(self, link: Any, verdict: Verdict) -> None: ...


class Owner(Protocol):
    """What owns meshes: an actor here, or the root client."""

    def child_ended(self, mesh: OwnedMesh, rank: int, failure: Failure) -> None: ...

    def _disown(self, uid: int) -> None: ...


class OwnedMesh:
    """The books about one actor mesh: who owns it, where its ranks are, which are gone."""

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
        self.supervised = False  # its ranks may come back
        self.owner = owner
        self.name = name
        self.display = display
        self.links = links
        self.rank_text = rank_text
        self.gone: dict[int, Failure] = {}

    def failure_of(
        self, rank: int, verdict: Verdict, others: dict[str, tuple[int, ...]]
    ) -> Failure:
        """The end of one rank by that of its process, which took `others` along."""
        actor = self.display + self.rank_text(rank) + ">"
        return Failure(actor, verdict, self.name, (rank,), others=others)
