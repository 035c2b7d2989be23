"""`RollCall`: the books of whatever waits for one outcome of every rank of a mesh.

A call, a stream, a stop, the start of procs and a change of their settings wait alike: at one port,
for an answer of each rank or for the loss of the process that owes it. Who has answered is noted
here; what an answer means is the subclass's business.

A rank has one outcome, the first. What comes after it (the failure of an actor that had just
answered, a second answer through an explicit port) changes nothing. With the last one the port is
closed.

Two threads may book: the reactor and, for the rank that lives in this very process, its actor's.
Looking and booking are one step to both, since there is no call between them and the interpreter
changes threads at calls and jumps only. A lock would cost more than all the rest of a booking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from monarch._engine.mesh.future import Future
from monarch._engine.runtime.ends import Verdict

if TYPE_CHECKING:
    from monarch._engine.runtime.proc import Proc

__all__ = ["RollCall"]

R_co = TypeVar("R_co", covariant=True)


class RollCall(Future[R_co]):
    """See the module. `_lost` is called for each rank that can no longer answer."""

    __slots__ = ("_links", "_missing", "_outcomes", "_port", "_proc")

    _links: list[Any]
    _missing: int
    _outcomes: list[Any]  # None: owed
    _port: int
    _proc: Proc

    def _open(self, proc: Proc, links: list[Any]) -> int:
        """Wait at a new port, the result, for an outcome of the rank behind each of `links`."""
        self._proc = proc
        self._links = links
        self._missing = len(links)
        self._outcomes = [None] * len(links)
        self._port = port = proc.open_port(self)
        return port

    def _close(self) -> None:
        """Wait no longer: what still arrives is dropped."""
        self._proc.close_port(self._port)

    def _end(self, state: int, content: Any) -> None:
        """Settle without waiting for the others."""
        self._close()
        self._resolve(state, content)

    def _owed(self) -> list[int]:
        """The ranks without an outcome."""
        return [rank for rank, outcome in enumerate(self._outcomes) if outcome is None]

    def _book(self, rank: int, outcome: Any) -> bool:
        """Note the outcome of `rank`, anything but None; False if it had one before."""
        outcomes = self._outcomes
        if outcomes[rank] is None:
            outcomes[rank] = outcome
            self._missing -= 1
            if not self._missing:
                self._close()
            return True
        return False

    def _owing(self) -> list[Any]:
        """The links over which an outcome has yet to come."""
        return [link for link, got in zip(self._links, self._outcomes, strict=True) if got is None]

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        raise NotImplementedError

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        for rank, other in enumerate(self._links):
            if other is link and self._outcomes[rank] is None:
                self._lost(rank, verdict)

    def peer_moved(self, rank: int, old: Any, new: Any) -> None:
        """Another process is in the place of the one that `rank` was expected from."""
        self._links = [*self._links[:rank], new, *self._links[rank + 1 :]]

    def _lost(self, rank: int, verdict: Verdict) -> None:
        """The process of `rank` is gone before it answered."""
        raise NotImplementedError

    def _expire(self) -> None:
        """The deadline is over: whoever has not answered is waited for no longer."""
        raise NotImplementedError
