"""`ResponsePort`: what an endpoint answers through by itself, now or later, from any thread.

Somebody waits at its other end, so the actor's books hold a ticket for the answer (`Cell.owe`), and
the first answer redeems it. If none comes, the caller is told why:

* The actor's end refuses what is still owed; that of its process, the caller sees by itself.
* A port that is dropped unanswered says so to the caller. The finaliser may run anywhere, at any
  time: it takes no locks and leaves the rest to the reactor.
* A port that is sent on is still the business of the actor that was called. The copies send to a
  relay in its process, where the first message becomes the answer. Who holds copies is known to
  nobody: when all are lost the call ends with the actor, or at its deadline if it has one.

The port of a channel, passed by ``send(endpoint, args, kwargs, port)``, takes as many messages as
the endpoint likes, none included: when it is dropped the channel is only told to expect nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from monarch._engine.mesh.port import NOTHING, Port, PortRef, forward
from monarch._engine.runtime.dispatch import send_error
from monarch._engine.runtime.ends import Verdict
from monarch._engine.wire.frame import FIRST, ONCE, POST, Frame

if TYPE_CHECKING:
    from monarch._engine.runtime.cell import Cell
    from monarch._engine.runtime.proc import Proc

__all__ = ["ResponsePort"]

T = TypeVar("T")


class ResponsePort(Port[T]):
    """The port of one call, in the hands of its endpoint.

    Args:
        cell: the actor called; the call is its message in hand.
        link: to the caller.
        frame: the call.
        endpoint: its name.
    """

    _ticket = 0  # nobody waits: the call was a broadcast, or the actor's end came first

    def __init__(self, cell: Cell, link: Any, frame: Frame, endpoint: str) -> None:
        super().__init__(PortRef(link.uid, frame.port), None, frame.rank)
        self._cell = cell
        self._link = link
        self._endpoint = endpoint
        self._once = bool(frame.flags & ONCE)
        self._is_call = bool(frame.flags & (ONCE | FIRST))
        self._relay: _Relay | None = None
        self._return_undeliverable = False  # whoever called has no use for an answer any more
        if frame.port:
            self._ticket = cell.owe()

    def _post(self, obj: Any, flags: int) -> None:
        if self._port_ref.port:  # else the call was a broadcast: nobody wants an answer
            super()._post(obj, flags)

    def _spend(self) -> None:
        if not self._cell.redeem(self._ticket) and self._once:
            raise RuntimeError("OncePortRef already used: this call has had its answer")

    def _passed_on(self) -> PortRef:
        if not self._is_call:
            self._expect_nothing()
            return self._port_ref
        cell = self._cell
        if self._relay is None:
            if self._ticket not in cell.owed:
                return PortRef(cell.proc.uid, 0)  # answered: what is sent there is dropped
            self._relay = _Relay(cell, self._ticket, self._link, self._port_ref.port, self._rank)
        return PortRef(cell.proc.uid, self._relay.port)

    def __del__(self) -> None:
        if not self._ticket or self._relay is not None:
            return
        if not self._is_call:
            self._expect_nothing()
        elif self._cell.redeem(self._ticket):
            arguments = (self._cell, self._link, self._port_ref.port, self._rank, self._endpoint)
            self._cell.proc.reactor.call_soon(_tell_dropped, *arguments)

    def _expect_nothing(self) -> None:
        cell = self._cell
        if cell.redeem(self._ticket):
            arguments = (cell.proc, self._link, self._port_ref.port, self._rank)
            cell.proc.reactor.call_soon(_tell_nothing, *arguments)


class _Relay:
    """Where copies of a response port send: the first message is the answer."""

    def __init__(self, cell: Cell, ticket: int, link: Any, number: int, rank: int) -> None:
        self._cell = cell
        self._ticket = ticket
        self._link = link
        self._number = number
        self._rank = rank
        self.port = cell.proc.open_port(self)
        cell.ports.add(self.port)

    def deliver(self, rank: int, flags: int, body: Any, link: Any) -> None:
        cell = self._cell
        cell.proc.close_port(self.port)
        cell.ports.discard(self.port)
        if cell.redeem(self._ticket):
            forward(cell.proc, body, self._link, self._number, self._rank, flags)

    def peer_lost(self, link: Any, verdict: Verdict) -> None:
        """Who holds copies is not known, so nobody who is lost is missed."""


def _tell_nothing(proc: Proc, link: Any, number: int, rank: int) -> None:
    proc.say(link, POST, number, 0, rank, b"", NOTHING)


def _tell_dropped(cell: Cell, link: Any, number: int, rank: int, endpoint: str) -> None:
    error = RuntimeError(
        "the endpoint dropped its response port without an answer; keep the port until "
        "port.send(value) or port.exception(error) was called"
    )
    call = Frame(POST, 0, 0, number, rank, 0, b"", b"")
    send_error(cell, link, call, endpoint, error, "failed.")


ResponsePort.__module__ = "monarch._src.actor.actor_mesh"
