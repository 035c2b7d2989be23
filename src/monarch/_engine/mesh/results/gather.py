"""`Gather`: a future that waits for one outcome of every rank of a mesh.

Calls, streams, stops, starts of procs and changes of their settings all wait in this way: at one
port, for an answer of each rank or for the loss of the process that owes the answer. This class
records which ranks have an outcome; subclasses decide what an answer means.

A rank has one outcome, the first. Later ones (the failure of an actor that had just answered, a
second answer through an explicit port) are ignored. The port is closed with the last outcome.

Two threads may record outcomes: the reactor and, for a rank that runs in this very process, the
thread of its actor. Check and update are atomic, since there is no call between them and the
interpreter switches threads only at calls and jumps. A lock would cost more than all the rest of
the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from monarch._engine.mesh.results.future import Future
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.transport.frame_link import FrameLink

if TYPE_CHECKING:
    from collections.abc import Iterable

    from monarch._engine.runtime.cast.sender import Plan
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["Gather"]

R_co = TypeVar("R_co", covariant=True)


class Gather(Future[R_co]):
    """A future of one outcome per rank; see the module.

    `_lost` is called for each rank that can no longer answer.
    """

    __slots__ = ("_links", "_missing", "_outcomes", "_port", "_proc")

    _links: list[FrameLink]
    _missing: int
    _outcomes: list[Any]  # by rank; None: no outcome yet
    _port: int
    _proc: Proc

    def _open(self, proc: Proc, links: list[FrameLink]) -> int:
        """Open and return the port at which the ranks behind `links` deliver their outcomes."""
        self._proc = proc
        self._links = links
        self._missing = len(links)
        self._outcomes = [None] * len(links)
        self._port = port = proc.open_port(self)
        return port

    def _ask(
        self, links: list[FrameLink], plan: Plan | None, kind: int, uid: int, body: bytes
    ) -> None:
        """Send a frame to every rank behind `links`, by a cast to those in `plan`.

        `_lost` is called for a rank whose process is known to have exited.
        """
        proc, port = self._proc, self._port
        ranks: Iterable[int] = range(len(links))
        if plan is not None:
            ranks = (*plan.direct, *proc.casting.say(plan, kind, uid, port, body))
        for rank in ranks:
            link = links[rank]
            if not proc.say(link, kind, uid, port, rank, body):
                self._refused(rank, link)

    def _refused(self, rank: int, link: FrameLink) -> None:
        """Handle a refused send; the loss is reported later if its reason is not yet known."""
        verdict = self._proc.verdicts.get(link.uid)
        if verdict is not None:
            self.peer_lost(link, verdict)

    def _close(self) -> None:
        """Close the port: later outcomes are dropped."""
        self._proc.close_port(self._port)

    def _end(self, state: int, content: Any) -> None:
        """Settle the future without waiting for the remaining ranks."""
        self._close()
        self._resolve(state, content)

    def _owed(self) -> list[int]:
        """Return the ranks without an outcome."""
        return [rank for rank, outcome in enumerate(self._outcomes) if outcome is None]

    def _book(self, rank: int, outcome: Any) -> bool:
        """Record the outcome of `rank`, which must not be None; False if it had one before."""
        outcomes = self._outcomes
        if outcomes[rank] is None:
            outcomes[rank] = outcome
            self._missing -= 1
            if not self._missing:
                self._close()
            return True
        return False

    def _owing(self) -> list[FrameLink]:
        """Return the links to the ranks without an outcome."""
        return [link for link, got in zip(self._links, self._outcomes, strict=True) if got is None]

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        raise NotImplementedError

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        for rank, other in enumerate(self._links):
            if other is link and self._outcomes[rank] is None:
                self._lost(rank, verdict)

    def peer_moved(self, rank: int, old: FrameLink, new: FrameLink) -> None:
        """Expect the outcome of `rank` from another process, which replaced the previous one."""
        self._links = [*self._links[:rank], new, *self._links[rank + 1 :]]

    def _lost(self, rank: int, verdict: Verdict) -> None:
        """Handle the loss of the process of `rank`, which has not answered."""
        raise NotImplementedError

    def _expire(self) -> None:
        """Handle the deadline: settle without the ranks that have not answered."""
        raise NotImplementedError
