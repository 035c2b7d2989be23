"""The records of a port here: which ranks owe it an answer, and to whom it forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from monarch._engine.base.failure import Failure
from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.mesh.call.port import Inbox, Port, PortRef, _Forward
from monarch._engine.mesh.call.response_port import ResponsePort
from monarch._engine.wire.frame import FAILURE, ONCE

EXITED = Verdict(FAILED, "it exited")
PORT = 7


class Proc:
    """A process with one port."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.forwards: dict[Any, Any] = {}
        self.link: Any = object()

    def open_port(self, _sink: Any) -> int:
        return PORT

    def close_port(self, port: int) -> None:
        self.closed.append(port)

    def link_to(self, _uid: int) -> Any:
        return self.link


class Box(Inbox):
    """A port that counts the losses that it hears of."""

    losses = 0

    def _take(self, rank: int, flags: int, body: Any, link: Any) -> None:
        assert (rank, flags) == (0, FAILURE)
        self.losses += 1


def test_an_answer_that_a_process_still_owes_is_lost_with_it_when_another_has_moved() -> None:
    """The last message was sent again to the successor, the one before it was not."""
    old, new = object(), object()
    lost = Failure("actor", EXITED)
    mesh = SimpleNamespace(failure_of_rank=lambda rank, verdict: lost)
    endpoint: Any = SimpleNamespace(mesh=mesh)
    box = Box(Proc())  # type: ignore[arg-type]
    links: Any = [old]
    for _ in range(2):
        box.expect(endpoint, links, [0])
    box.peer_moved(0, old, new)  # type: ignore[arg-type]
    for link in (old, new):
        before = box.losses
        box.peer_lost(link, EXITED)  # type: ignore[arg-type]
        assert box.losses == before + 1
    assert box._debts == {}


def test_a_port_that_forwards_is_closed_with_the_process_to_which_it_does() -> None:
    proc: Any = Proc()
    target = PortRef(2, 9)
    proc.forwards[target] = port = _Forward(proc, target)
    another: Any = object()
    port.peer_lost(another, EXITED)
    assert (proc.closed, proc.forwards) == ([], {target: port})
    port.peer_lost(proc.link, EXITED)
    assert (proc.closed, proc.forwards) == ([PORT], {})


def test_an_actor_is_not_notified_of_an_answer_to_a_caller_that_has_exited() -> None:
    """Such an answer is of no use; a message to another port may be."""
    link, frame = SimpleNamespace(uid=3), SimpleNamespace(port=0, rank=0, flags=ONCE)
    port: Any = ResponsePort(None, link, frame, "train")  # type: ignore[arg-type]
    assert not port.return_undeliverable
    assert Port(PortRef(3, PORT), None).return_undeliverable
