"""Messages that were sent to a failed actor do not reach its successor in the same process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.failure import Failure
from monarch._engine.runtime.actor.cell import Cell
from monarch._engine.runtime.actor.spawn import spawn_cell
from monarch._engine.wire.frame import CALL, QUERY, SPAWN, Frame
from monarch._restarts.epoch_barrier import EpochBarrier


class Link:
    lost = None


class Proc:
    """A proc that records the requests it gets."""

    def __init__(self, links: list[Any]) -> None:
        self.local = Link()
        self.main = None
        self.uid = 99
        self._links = links
        self.asked: list[Any] = []
        self.queries: list[tuple[int, ...]] = []
        self.reached = True
        self.opened = 0
        self.returned: list[Any] = []
        self.closed: list[int] = []
        self.stop_request: Frame | None = None

    def every_link(self) -> list[Any]:
        return self._links

    def open_port(self, sink: Any) -> int:
        self.opened += 1
        return 9

    def close_port(self, port: int) -> None:
        self.closed.append(port)

    def say(self, link: Any, *query: int) -> bool:
        self.asked.append(link)
        self.queries.append(query)
        return self.reached

    def give_back(self, link: Any, frame: Frame, failure: Failure) -> None:
        self.returned.append((link, frame, failure))


def call(number: int) -> Frame:
    return Frame(CALL, 0, 1, number, 0, 0, b"", b"")


def test_until_a_link_has_answered_its_messages_are_for_the_predecessor() -> None:
    peer, owner = Link(), Link()
    proc = Proc([peer, owner])
    taken: list[Any] = []
    cell: Any = SimpleNamespace(proc=proc, put=lambda link, frame: taken.append((link, frame)))
    grave = Failure("<root>.<x.A a>", "it failed")
    barrier = EpochBarrier(cell, owner, grave)
    assert proc.asked == [peer]
    cell.put(peer, call(1))
    cell.put(owner, call(2))
    assert proc.returned == [(peer, call(1), grave)]
    barrier.deliver(0, 0, b"", peer)
    cell.put(peer, call(3))
    assert taken == [(owner, call(2)), (peer, call(3))]
    assert len(proc.returned) == 1
    assert proc.closed == [9]


def test_the_successor_of_a_failed_actor_is_spawned_behind_a_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Cell, "start", lambda *_: None)
    peer, owner = Link(), Link()
    proc: Any = Proc([peer, owner])
    cells: list[Cell] = []

    def admit(cell: Cell) -> None:
        cells.append(cell)
        cell.put(peer, call(1))  # messages that arrived early are held up, too

    proc.early = SimpleNamespace(admit=admit)
    grave = Failure("<root>.<x.A a>", "it failed")
    proc.graves = {1: grave, 2: Failure("<root>.<x.B b>", "it failed, too")}
    proc.replaced = []
    spawn_cell(proc, owner, Frame(SPAWN, 0, 1, 7, 0, 0, b'["a", "a-1", "<root>.<x.A a>"]', b""))
    [cell] = cells
    assert [*proc.graves] == [2], "what is sent to the successor is not refused"
    assert proc.replaced == [(1, grave)]
    cell.put(owner, call(2))
    assert proc.returned == [(peer, call(1), grave)]
    assert cell.depth() == 1


def test_the_barrier_stands_until_all_links_have_answered_or_are_lost() -> None:
    one, two, owner = Link(), Link(), Link()
    proc = Proc([one, two, owner])
    taken: list[Any] = []
    cell: Any = SimpleNamespace(proc=proc, put=lambda link, frame: taken.append((link, frame)))
    put = cell.put
    barrier = EpochBarrier(cell, owner, Failure("<root>.<x.A a>", "it failed"))
    assert proc.queries == [(QUERY, 0, 9, 0)] * 2
    barrier.deliver(0, 0, b"", one)
    cell.put(one, call(1))
    cell.put(two, call(2))
    assert taken == [(one, call(1))]
    assert [frame for _, frame, _ in proc.returned] == [call(2)]
    assert proc.closed == []
    barrier.peer_lost(two, None)  # type: ignore[arg-type]
    assert proc.closed == [9]
    assert cell.put is put, "then messages cost nothing more"


def test_where_none_can_have_sent_anything_there_is_no_barrier() -> None:
    owner, lost = Link(), Link()
    lost.lost = "it is closed"  # type: ignore[assignment]
    proc = Proc([owner, lost])
    cell: Any = SimpleNamespace(proc=proc, put=lambda *_: None)
    put = cell.put
    EpochBarrier(cell, owner, Failure("<root>.<x.A a>", "it failed"))
    assert cell.put is put
    assert (proc.asked, proc.opened) == ([], 0)


def test_a_link_over_which_nothing_can_be_sent_is_not_waited_for() -> None:
    proc = Proc([Link(), Link()])
    proc.reached = False
    cell: Any = SimpleNamespace(proc=proc, put=lambda *_: None)
    put = cell.put
    EpochBarrier(cell, Link(), Failure("<root>.<x.A a>", "it failed"))
    assert cell.put is put
    assert proc.closed == [9]
