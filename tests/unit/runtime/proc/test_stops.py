"""The answer to the stop of an actor says that the actor has ended, its clean-up included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from monarch._engine.runtime.actor.cell import Cell, Identity
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.wire.frame import STOP, Frame

ACTOR = 5


def test_a_second_stop_is_acknowledged_after_the_clean_up_too() -> None:
    proc = Proc(1, "test", lambda proc, link, frame: None, lambda proc, frame: None, client=False)
    proc.report_end = lambda *_: None  # type: ignore[method-assign]
    identity = Identity("name", "label", "<display>", lambda cell: None)  # type: ignore[arg-type,return-value]
    cell = proc.cells[ACTOR] = Cell(proc, ACTOR, 0, 2, identity, is_async=False)
    acknowledged: list[int] = []
    sink: Any = SimpleNamespace(deliver=lambda rank, *_: acknowledged.append(rank))
    port = proc.open_port(sink)

    def stop(number: int) -> None:
        proc._on_stop(proc.local, Frame(STOP, 0, ACTOR, port, number, 0, b"", b"enough"))

    stop(1)
    cell.settle(cell.own_failure("enough"))
    stop(2)  # it cleans up now
    assert acknowledged == []
    cell.finish()
    stop(3)
    assert acknowledged == [1, 2, 3]
    proc.reactor.close()


def test_a_stop_that_names_no_actor_is_one_of_the_process() -> None:
    stopped: list[Frame] = []
    proc = Proc(
        1,
        "test",
        lambda proc, link, frame: None,
        lambda proc, frame: stopped.append(frame),
        client=False,
    )
    frame = Frame(STOP, 0, 0, 0, 0, 0, b"", b"enough")
    proc._on_stop(proc.local, frame)
    proc.reactor.close()
    assert stopped == [frame]
