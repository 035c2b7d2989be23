"""The parties of a failure in a process: the sinks that wait at ports, and the owners of meshes.

`Proc` reports the loss of a peer to each sink (`Sink.peer_lost`), and the end of an actor to the
owner of its mesh (`Owner.child_ended`), which it finds in the record of the mesh (`OwnedMesh`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import Verdict
from monarch._engine.transport.frame_link import FrameLink

__all__ = ["ANY_THREAD", "CallSink", "OwnedMesh", "Owner", "Sink", "Verdict"]


class Sink(Protocol):
    """A waiter at a port. Called on the reactor's or a local sender's thread; must not block."""

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        """Take a message of `rank` that came over `link`; over the agent's, if it was gathered."""
        ...

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        """Settle what can no longer come over `link`."""
        ...


ANY_THREAD: set[type] = set()
"""The types of sinks that may be called on the thread of any actor."""


class CallSink(Sink, Protocol):
    """The sink of calls, which may be sent again to a process that replaced the receiver."""

    def peer_moved(self, rank: int, old: FrameLink, new: FrameLink) -> None:
        """Expect the answer of `rank`, or its loss, from `new` instead of `old`."""
        ...


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
        links: list[FrameLink],
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
