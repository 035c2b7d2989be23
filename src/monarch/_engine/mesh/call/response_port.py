"""`ResponsePort`: an explicit port through which an endpoint answers, now or later, in any thread.

A caller waits for the answer. So the actor called keeps a ticket for each answer that it owes
(`Cell.owe`), and the first answer redeems the ticket. Without an answer the call still ends, with
the reason:

* When the actor ends, it fails the calls that it still owes an answer. When the actor's process
  exits, the caller notices the lost link.
* A port that is dropped without an answer sends the caller an error. The finaliser may run in any
  thread, at any time, so it takes no locks and leaves the rest to the reactor.
* If a port is sent to another actor, the actor that was called still owes the answer. Copies of the
  port send to a relay in its process, and the first message becomes the answer. The copies are not
  tracked: when all are lost, the call ends with the actor, or at its own deadline if it has one.

The port of a channel, passed by ``send(endpoint, args, kwargs, port)``, takes any number of
messages, including none. When such a port is dropped, the channel is notified only that no answer
is to be expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from monarch._engine.mesh.call.port import NOTHING, Port, PortRef, forward
from monarch._engine.runtime.actor.dispatch import send_error
from monarch._engine.runtime.proc.ownership import Verdict
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import FIRST, ONCE, POST, Frame

if TYPE_CHECKING:
    from monarch._engine.runtime.actor.cell import Cell
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["ResponsePort"]

T = TypeVar("T")


class ResponsePort(Port[T]):
    """The port of one call, given to the endpoint that was called.

    Args:
        cell: the actor called; the call is the message that it is handling.
        link: the link to the caller.
        frame: the call.
        endpoint: the name of the endpoint.
    """

    _ticket = 0  # 0: no answer is owed. The call was a broadcast, or the actor has ended

    def __init__(self, cell: Cell, link: FrameLink, frame: Frame, endpoint: str) -> None:
        super().__init__(PortRef(link.uid, frame.port), None, frame.rank)
        self._cell = cell
        self._link = link
        self._endpoint = endpoint
        self._once = bool(frame.flags & ONCE)
        self._is_call = bool(frame.flags & (ONCE | FIRST))
        self._relay: _Relay | None = None
        self._return_undeliverable = False  # an answer is of no use to a caller that has exited
        if frame.port:
            self._ticket = cell.owe()

    def _post(self, obj: Any, flags: int) -> None:
        if self._port_ref.port:  # else the call was a broadcast, which has no answer
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
                return PortRef(cell.proc.uid, 0)  # already answered: drop what is sent there
            assert self._link is not None  # `__init__` set it
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
    """The sink of the copies of a response port: the first message is the answer."""

    def __init__(self, cell: Cell, ticket: int, link: FrameLink, number: int, rank: int) -> None:
        self._cell = cell
        self._ticket = ticket
        self._link = link
        self._number = number
        self._rank = rank
        self.port = cell.proc.open_port(self)
        cell.ports.add(self.port)

    def deliver(self, rank: int, flags: int, body: Any, link: FrameLink) -> None:
        cell = self._cell
        cell.proc.close_port(self.port)
        cell.ports.discard(self.port)
        if cell.redeem(self._ticket):
            forward(cell.proc, body, self._link, self._number, self._rank, flags)

    def peer_lost(self, link: FrameLink, verdict: Verdict) -> None:
        """Do nothing: copies are not tracked, so losing a process that holds one has no effect."""


def _tell_nothing(proc: Proc, link: FrameLink, number: int, rank: int) -> None:
    proc.say(link, POST, number, 0, rank, b"", NOTHING)


def _tell_dropped(cell: Cell, link: FrameLink, number: int, rank: int, endpoint: str) -> None:
    error = RuntimeError(
        "the endpoint dropped its response port without an answer; keep the port until "
        "port.send(value) or port.exception(error) was called"
    )
    call = Frame(POST, 0, 0, number, rank, 0, b"", b"")
    send_error(cell, link, call, endpoint, error, "failed.")


ResponsePort.__module__ = "monarch._src.actor.actor_mesh"
