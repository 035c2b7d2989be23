"""Time limits that stand still while a debugger has stopped the program."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest

from monarch._debug import pauses
from monarch._debug.pauses import Pauses, stopped_at
from monarch._spi import Step, stack_of_thread


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("monarch._spi.environment.current", made)
    monkeypatch.setattr(pauses, "is_simulated", lambda: False)
    return made


def test_pauses_are_added_up(clock: Clock) -> None:
    found = Pauses()
    assert found.within(50) == (0, False)
    for reason, begin, end in (("a", 100, 110), ("b", 120, 126), ("a", 128, 130)):
        clock.time = begin
        found.begin(reason)
        clock.time = end
        found.end(reason)
        found.end(reason)
    clock.time = 130
    assert found.within(30) == (18, False)
    assert found.within(5) == (3, False)
    clock.time = 135
    assert found.within(5) == (0, False)


def test_a_pause_lasts_as_long_as_there_is_a_reason(clock: Clock) -> None:
    found = Pauses()
    for reason in "aba":
        found.begin(reason)
        clock.time += 1
    found.end("a")
    clock.time += 7
    assert found.within(100) == (10, True)
    assert found.within(4) == (4, True)
    found.end("b")
    clock.time += 1
    assert found.within(4) == (3, False)


class Proc:
    def __init__(self, *, client: bool) -> None:
        self.client = client
        self.spec = {} if client else {"client": 7}


@pytest.mark.parametrize(
    ("begin", "end", "left"),
    [
        (None, None, 0.0),
        (80, 90, 0.0),  # over before the limit began
        (103, 107, 4.0),
        (90, 105, 5.0),
        (103, None, 7.0),
        (109.9, None, 0.25),
    ],
)
def test_what_a_limit_has_left(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    begin: float | None,
    end: float | None,
    left: float,
) -> None:
    """A limit of 10 seconds that began at 100, in the client's process."""
    found = Pauses()
    monkeypatch.setattr(pauses, "PAUSES", found)
    monkeypatch.setattr(pauses, "client_proc", lambda: Proc(client=True))
    if begin is not None:
        clock.time = begin
        found.begin("a")
    if end is not None:
        clock.time = end
        found.end("a")
    clock.time = 110
    assert pauses.time_left(10, 100) == pytest.approx(left)


class Answer:
    """The future of an answer of the client."""

    def __init__(self, content: object, *, fails: bool = False) -> None:
        self._content = content
        self._fails = fails

    def _has_error(self) -> bool:
        return self._fails

    def _notify(self, waiter: object) -> None:
        threading.Thread(target=waiter).start()


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (Answer(b"[0.0, false]"), 0.0),
        (Answer(b"[4.0, true]"), 2.0),
        (Answer(TimeoutError(), fails=True), 0.0),
    ],
)
def test_other_processes_ask_the_client(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, answer: Answer, left: float
) -> None:
    asked: list[object] = []

    def ask(uid: int, name: str, body: bytes, timeout: float) -> Answer:
        asked.append((uid, name, json.loads(body)))
        return answer

    monkeypatch.setattr(pauses, "client_proc", lambda: Proc(client=False))
    monkeypatch.setattr(pauses, "ask", ask)
    clock.time = 112
    assert pauses.time_left(10, 100) == left
    assert asked == [(7, "debugger", {"op": "paused", "seconds": 12.0})]


def own_stack() -> list[Step]:
    return stack_of_thread(threading.get_ident()).steps


def test_a_thread_that_no_debugger_has_stopped() -> None:
    assert stopped_at([]) is None
    assert stopped_at(own_stack()) is None


def test_a_thread_that_a_debugger_has_stopped() -> None:
    """Found is the stack of the program, also below further functions of the debugger."""
    names: dict[str, Any] = {
        "__name__": "pydevd",
        "sys": sys,
        "look": lambda: stopped_at(own_stack()),
    }
    exec(
        "def _do_wait_suspend(): return inner()\ndef inner(): return look()",
        names,
    )
    assert names["_do_wait_suspend"]()[0].code is sys._getframe().f_code
    assert names["inner"]() is None
