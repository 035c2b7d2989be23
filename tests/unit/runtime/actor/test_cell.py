"""The flow control and the end of a cell, in any order of the threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from monarch._engine.base.failure import Failure
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import FAILED
from monarch._engine.runtime.actor import cell as cells
from monarch._engine.runtime.actor.cell import Cell, Identity
from monarch._engine.wire.frame import CALL, STOP, Frame
from tests.unit.runtime.interleavings import Lock, Run, explore

LIMIT = 8


class Sender:
    """A link as the cell sees it; it records the flow-control messages."""

    def __init__(self) -> None:
        self.told: list[bool] = []


class Proc:
    """A proc that records messages to senders and owners; `before` runs ahead of each of them."""

    def __init__(self) -> None:
        self.before: Callable[[bool], None] = lambda full: None
        self.reactor = SimpleNamespace(call_later=lambda *_: None, call_soon=lambda *_: None)
        self.refused: list[Frame] = []
        self.graves: dict[int, Failure] = {}
        self.cells: dict[int, Cell] = {}
        self.ending: dict[Cell, None] = {}
        self.news: list[str] = []
        self.hostname, self.pid = "host", 1

    def report_end(self, owner: int, mesh: int, rank: int, failure: Failure) -> None:
        self.before(True)
        self.news.append(failure.kind)

    def post(self, link: Sender, port: int, rank: int, obj: object) -> None:
        self.news.append("acknowledged")

    def cell_finished(self, cell: Cell) -> None: ...

    def flow(self, link: Sender, uid: int, full: bool) -> None:
        self.before(full)
        link.told.append(full)

    def refuse(self, link: Sender, frame: Frame) -> None:
        self.refused.append(frame)


def call(body: bytes = b"") -> Frame:
    return Frame(CALL, 0, 1, 0, 0, 0, b"", body)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    identity = Identity("name", "label", "<display>", lambda cell: None)  # type: ignore[arg-type,return-value]
    with settings.configured(mailbox_limit=LIMIT, mailbox_bytes_limit=100_000):
        yield Cell(Proc(), 1, 0, 2, identity, is_async=request.param)  # type: ignore[arg-type]


def take(cell: Cell) -> bool:
    """Take one message as the actor's thread does; return False if the mailbox is empty."""
    if not cell.depth():
        return False
    _, frame = cell.mailbox.popleft() if cell.is_async else cell.mailbox.get_nowait()
    cell.taken(frame)
    return True


def drain(cell: Cell) -> None:
    while take(cell):
        pass


def test_senders_are_told_once_and_told_again_at_half(cell: Cell) -> None:
    sender, other = Sender(), Sender()
    for _ in range(LIMIT):
        cell.put(sender, call())
    assert sender.told == []
    for _ in range(4):
        cell.put(sender, call())
    cell.put(other, call())
    assert (sender.told, other.told) == ([True], [True])
    while cell.depth() > LIMIT // 2 + 1:
        take(cell)
    assert (sender.told, other.told) == ([True], [True])
    take(cell)
    assert (sender.told, other.told) == ([True, False], [True, False])


def test_bytes_count_as_messages_do(cell: Cell) -> None:
    sender = Sender()
    cell.put(sender, call(bytes(60_000)))
    assert sender.told == []
    cell.put(sender, call(bytes(60_000)))
    assert sender.told == [True]
    take(cell)
    assert sender.told == [True]
    take(cell)
    assert sender.told == [True, False]


def test_many_small_bodies_are_bounded_by_their_number(cell: Cell) -> None:
    sender = Sender()
    for _ in range(LIMIT):
        cell.put(sender, call(bytes(1000)))
    assert sender.told == []


@pytest.mark.parametrize("left", [0, 1])
def test_the_actor_may_empty_its_mailbox_before_the_sender_hears_that_it_is_full(
    cell: Cell, left: int
) -> None:
    """Two threads send flow control; the last message must be true, or the sender waits forever."""
    sender = Sender()

    def empty(full: bool) -> None:
        # The reactor has decided to send "full" and is about to do so; now the actor's thread runs.
        if full:
            while cell.depth() > left:
                take(cell)

    cell.proc.before = empty  # type: ignore[attr-defined]
    for _ in range(LIMIT + 1):
        cell.put(sender, call())
    cell.proc.before = lambda full: None  # type: ignore[attr-defined]
    drain(cell)
    assert sender.told[-1] is False


def test_a_failure_is_told_before_a_stop_that_comes_meanwhile_is_acknowledged(cell: Cell) -> None:
    """The caller of a stop takes its acknowledgement for the last notice about the actor."""
    proc: Proc = cell.proc  # type: ignore[assignment]
    reactor: list[threading.Thread] = []

    def stop_meanwhile(_: bool) -> None:
        stop = Frame(STOP, 0, 1, 7, 0, 0, b"", b"enough")
        reactor.append(threading.Thread(target=cell.request_stop, args=(Sender(), stop)))
        reactor[0].start()
        reactor[0].join(0.05)  # the thread waits, or has overtaken the failure by then

    proc.before = stop_meanwhile
    cell.settle(cell.own_failure("the reason"))
    cell.finish()
    reactor[0].join()
    assert proc.news == [FAILED, "acknowledged"]


def test_of_two_ends_at_once_one_counts() -> None:
    """Another thread aborts the actor while its own one ends it; see `interleavings`."""

    def make(schedule: tuple[tuple[int, int], ...]) -> Run:
        run = Run({cells.__file__}, schedule)
        identity = Identity("name", "label", "<display>", lambda cell: None)  # type: ignore[arg-type,return-value]
        cell = Cell(Proc(), 1, 0, 2, identity, is_async=False)  # type: ignore[arg-type]
        cell._end_lock = Lock(run)  # type: ignore[assignment]
        counted: list[Failure] = []

        def end(reason: str) -> None:
            failure = cell.own_failure(reason)
            if cell.settle(failure):
                counted.append(failure)

        run.add("actor", lambda: end("it raised"))
        run.add("another", lambda: end("it was aborted"))
        go = run.go

        def checked() -> None:
            go()
            assert counted == [cell.grave]

        run.go = checked  # type: ignore[method-assign]
        return run

    assert explore(make, most=1) > 20


def test_a_constructor_is_known_to_run_since_its_cell_exists(
    monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    monkeypatch.setattr(cells.environments.current, "now", lambda: 7.0)
    made = Cell(cell.proc, 1, 0, 2, cell.identity, is_async=cell.is_async)
    assert (made.current, made.began) == (None, 7.0)
