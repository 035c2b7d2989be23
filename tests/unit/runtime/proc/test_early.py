"""Messages that wait for their actor are refused or delivered, in whatever order threads run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from monarch._engine.runtime.proc import early as module
from monarch._engine.runtime.proc.early import EarlyMessages
from monarch._engine.wire.frame import CALL, Frame
from tests.unit.runtime.interleavings import Lock, Run, explore

ACTOR = 7


def test_a_message_that_comes_when_those_before_it_expire_is_not_lost() -> None:
    """The reactor ends their time while a local sender adds another one."""

    def make(schedule: tuple[Any, ...]) -> Run:
        run = Run({module.__file__}, schedule)
        refused: list[int] = []
        reactor = SimpleNamespace(call_later=lambda delay, action: SimpleNamespace())
        proc: Any = SimpleNamespace(cells={}, graves={}, spec={}, reactor=reactor)
        proc.refuse = lambda link, frame: refused.append(frame.rank)
        early: Any = EarlyMessages(proc)

        def keep(number: int) -> None:
            early.keep(None, Frame(CALL, 0, ACTOR, 1, number, 0, b"", b""))

        keep(1)
        early._lock = Lock(run)
        run.add("reactor", lambda: early._expire(ACTOR))
        run.add("sender", lambda: keep(2))
        go = run.go

        def checked() -> None:
            go()
            waiting = [frame.rank for _, kept in early._waiting.values() for _, frame in kept]
            assert refused + waiting == [1, 2]
            assert early._count == len(waiting)

        run.go = checked  # type: ignore[method-assign]
        return run

    assert explore(make, 1) > 10


def test_an_actor_that_was_spawned_meanwhile_has_the_message_at_once() -> None:
    """The reactor looks for the actor before it holds the message for it."""
    got: list[Any] = []
    cell = SimpleNamespace(uid=ACTOR, put=lambda *message: got.append(message))
    early = EarlyMessages(SimpleNamespace(cells={ACTOR: cell}))  # type: ignore[arg-type]
    link: Any = object()
    call = Frame(CALL, 0, ACTOR, 0, 0, 0, b"", b"")
    assert early.keep(link, call)
    assert got == [(link, call)]
