"""A process says why it has no samples for a profile that a command asks for."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import Any, ClassVar

import pytest

from monarch._traces import session
from monarch._traces.sampler import Options

WAIT = 60.0


class Proc:
    """A process with no actor."""

    client = True
    label = ""
    hostname = "here"
    cells: ClassVar[dict[int, Any]] = {}
    ending: tuple[Any, ...] = ()


class Request:
    """Keeps what is answered."""

    answered: ClassVar[deque[dict[str, Any]]] = deque()
    refused: ClassVar[deque[str]] = deque()
    settled = threading.Event()

    def __init__(self, proc: Any, link: Any, frame: Any) -> None:
        self.body = frame

    def answer(self, body: bytes) -> None:
        self.answered.append(json.loads(body))
        self.settled.set()

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)
        self.settled.set()


def ask(**asked: Any) -> Any:
    Request.settled.clear()
    session.on_request(Proc(), None, json.dumps(asked).encode())  # type: ignore[arg-type]
    assert Request.settled.wait(WAIT)
    return (Request.refused or Request.answered).popleft()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile before, and no timers."""

    def start(name: str, run: Any) -> threading.Thread:
        thread = threading.Thread(target=run, name=name)
        thread.start()
        return thread

    monkeypatch.setattr(session, "Request", Request)
    monkeypatch.setattr(session, "start_thread", start)
    monkeypatch.setattr(session, "call_later", lambda seconds, function: None)
    monkeypatch.setattr(session, "_active", None)
    monkeypatch.setattr(session, "_joined", deque(maxlen=16))


def begin(number: str) -> None:
    options = list(Options(3600.0, rate=1000))
    asked = {"kind": "stacks", "options": options, "mesh": None, "ranks": None}
    assert ask(op="start", profile=number, **asked)["joined"]


def test_a_process_that_has_the_place_of_a_lost_one_says_so() -> None:
    begin("other")
    assert "was lost during the profile, and process" in ask(op="fetch", profile="1", early=True)
    assert ask(op="fetch", profile="other", early=True)["seconds"] < WAIT


def test_a_result_is_given_once_and_a_later_profile_is_named() -> None:
    begin("1")
    assert ask(op="fetch", profile="1", early=True)["label"] == ""
    assert "its result was dropped" in ask(op="fetch", profile="1", early=True)
    begin("2")
    assert "another profile was started" in ask(op="fetch", profile="1", early=True)
    ask(op="fetch", profile="2", early=True)


def test_a_sampling_that_ended_with_an_error_is_answered_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Any, elapsed: int) -> None:
        raise AttributeError("'int' object has no attribute 'f_code'")

    monkeypatch.setattr(session.Sampler, "_sample", fail)
    begin("1")
    answer = ask(op="fetch", profile="1", early=True)
    assert "the sampling ended with an error" in answer["error"]
    assert "no attribute 'f_code'" in answer["error"]
    begin("2")  # it is over, so the next one can begin
    ask(op="fetch", profile="2", early=True)
