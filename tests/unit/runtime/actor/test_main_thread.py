"""An interrupt is raised in code of the program, and in waits of the program for the engine."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import pytest

import monarch
from monarch._engine.mesh.results.future import Future
from monarch._engine.runtime.actor import main_thread
from monarch._engine.runtime.actor.main_thread import WAITS, MainThread, _is_programs
from monarch._engine.runtime.io import environment as environments

PACKAGE = monarch.__path__[0] + "/_engine/runtime/proc/proc.py"
LIBRARY = threading.__file__
PROGRAM = "/home/me/train.py"


def frame_of(*files: str) -> FrameType:
    """Return the innermost frame of functions that call each other, each in one of the files."""
    scope: dict[str, Any] = {"inner": sys._getframe}
    for file in reversed(files):
        exec(compile("def call(inner=inner): return inner()", file, "exec"), scope)
        scope["inner"] = scope["call"]
    found: FrameType = scope["inner"]()
    return found


@pytest.mark.parametrize(
    ("files", "is_programs"),
    [
        ([PACKAGE, PROGRAM], True),
        ([PACKAGE, PROGRAM, LIBRARY], True),
        ([PACKAGE, PROGRAM, LIBRARY, "<frozen importlib._bootstrap>"], True),
        ([PACKAGE], False),
        ([PACKAGE, LIBRARY], False),
        ([PACKAGE, PROGRAM, PACKAGE], False),
        ([PACKAGE, PROGRAM, PACKAGE, LIBRARY], False),
        ([PACKAGE, PROGRAM, PACKAGE, "<frozen importlib._bootstrap>"], False),
    ],
)
def test_the_first_frame_outside_of_the_library_decides(
    files: list[str], is_programs: bool
) -> None:
    assert _is_programs(frame_of(*files)) == is_programs


def test_a_wait_for_an_answer_may_be_left() -> None:
    assert vars(Future)["_block"].__code__ in WAITS
    frame = frame_of(PROGRAM, PACKAGE)
    WAITS.add(frame.f_code)
    try:
        assert _is_programs(frame)
    finally:
        WAITS.discard(frame.f_code)


def test_a_process_whose_reactor_has_stopped_exits_by_its_main_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other thread exits it only if an endpoint keeps the main thread for too long."""
    exits: list[int] = []
    monkeypatch.setattr(main_thread, "_CLOSING", 60.0)
    monkeypatch.setattr(main_thread, "leave_out_callers", lambda: None)
    proc: Any = SimpleNamespace(reactor=SimpleNamespace(run=lambda: None))
    finalise: Any = lambda proc: exits.append(threading.get_ident())
    handler = signal.getsignal(main_thread._SIGNAL)
    try:
        MainThread(proc, finalise).run()
    finally:
        signal.signal(main_thread._SIGNAL, handler)
    assert exits == [threading.get_ident()]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[MainThread]:
    monkeypatch.setattr(main_thread, "leave_out_callers", lambda: None)
    handler = signal.getsignal(signal.SIGURG)
    proc: Any = SimpleNamespace(reactor=SimpleNamespace(run=lambda: None))
    yield MainThread(proc, finalise)
    signal.signal(signal.SIGURG, handler)


class Ended(Exception):
    """The process ends."""


def finalise(_proc: Any) -> NoReturn:
    raise Ended


def test_the_main_thread_is_called_back_when_the_reactor_ends(main: MainThread) -> None:
    main._left.set()
    main._react()
    assert main._next.get(block=False) is None


def test_an_actor_gets_the_main_thread_once_the_one_before_has_left_it(
    main: MainThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    waiting: list[Any] = []
    cells: list[Any] = [SimpleNamespace(broken=None) for _ in range(2)]

    def following() -> Any:
        """Return what the main thread runs next; the reactor offers it the next actor."""
        if len(ran) == len(cells):
            return None
        assert main.take(cells[len(ran)], ran.append)
        assert not main.take(cells[0], ran.append), "one actor has it already"
        return waiting.pop()

    monkeypatch.setattr(main, "_next", SimpleNamespace(get=following, put=waiting.append))
    monkeypatch.setattr(environments.current, "start_thread", lambda *_: None)
    with pytest.raises(Ended):
        main.run()
    assert ran == cells
