"""The watch of the host agent: how long it waits, and what it says of an agent that is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.settings import settings
from monarch._engine.runtime.io import heartbeats
from monarch._engine.runtime.proc.agent_watch import AgentWatch, why_silent


def test_an_agent_is_given_up_one_timeout_after_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part of the timeout passes before the first heartbeat, and the rest after it."""
    waits: list[float] = []
    later: list[Any] = []

    def call_later(delay: float, callback: Any) -> None:
        waits.append(delay)
        later.append(callback)

    def monitor(_call_at: Any, timeout: float) -> Any:
        waits.append(timeout)
        return SimpleNamespace(watch=lambda _: None)

    monkeypatch.setattr(heartbeats, "HeartbeatMonitor", monitor)
    reactor = SimpleNamespace(call_soon=lambda callback: callback(), call_at=None)
    proc: Any = SimpleNamespace(
        notices={}, clock=SimpleNamespace(call_later=call_later), reactor=reactor, agent=object()
    )
    watch = AgentWatch(proc)
    with settings.configured(agent_timeout="12s"):
        watch.requested({"op": "spawn", "procs": []})
        later.pop()()
    assert len(waits) == 2
    assert sum(waits) == pytest.approx(12)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the state in a file")
def test_the_report_says_that_the_agent_was_stopped() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert "answered nothing for 3 s; see what keeps" in why_silent(process.pid, 3)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            report = why_silent(process.pid, 3)
        finally:
            process.kill()
    assert "it was stopped, by a signal or a debugger, and answered nothing for 3 s" in report
    assert "continue it in time (kill -CONT)" in report


class Process:
    """A stand-in for a proc whose timers run when the test says so."""

    def __init__(self) -> None:
        self.notices: dict[str, Any] = {}
        self.asks: dict[int, Any] = {}
        self.awaits_ends: dict[int, Any] = {}
        self.ports: dict[int, Any] = {}
        self.agent = object()
        self.timers: list[Any] = []
        self.looks: list[float] = []
        self.clock = SimpleNamespace(call_later=lambda delay, action: self.timers.append(action))
        self.reactor = SimpleNamespace(call_soon=lambda action: action(), call_at=self.call_at)

    def call_at(self, when: float, action: Any) -> Any:
        """Set a timer of the failure detector."""
        self.looks.append(when)
        return SimpleNamespace(cancel=lambda: None)


@pytest.fixture
def process() -> Any:
    return Process()


@pytest.mark.parametrize("waits", ["requests", "asks", "awaits_ends", "far"])
def test_an_agent_is_watched_while_something_waits_for_it(process: Any, waits: str) -> None:
    watch = AgentWatch(process)
    if waits == "requests":
        watch.requested({"op": "spawn", "procs": []})
    elif waits == "far":
        watch.far.add(5)
        process.ports[1] = SimpleNamespace(_endpoint=None)
        watch.look()
    else:
        getattr(process, waits)[5] = None
        watch.awaited()
    process.timers.pop()()
    assert len(process.looks) == 1


def test_an_agent_for_which_nothing_waits_is_not_watched(process: Any) -> None:
    watch = AgentWatch(process)
    watch.look()
    assert process.timers == []
    watch.awaited()
    process.timers.pop()()  # what was awaited is there by now
    assert process.looks == []
    assert process.timers == []


def test_requests_from_before_a_heartbeat_that_is_answered_are_answered(process: Any) -> None:
    process.tell_agent = lambda message: None
    watch = AgentWatch(process)
    watch.requested({"op": "spawn", "procs": []})
    process.timers.pop()()
    process.notices["heartbeat"]({})
    assert process.timers == []
    watch.requested({"op": "spawn", "procs": []})
    process.timers.pop()()
    watch.requested({"op": "spawn", "procs": []})
    process.notices["heartbeat"]({})
    assert len(process.timers) == 1  # for the last one


def test_a_request_after_an_agent_was_given_up_is_watched_too(process: Any) -> None:
    given_up: list[list[int]] = []
    process.agent_silent = lambda timeout, uids: given_up.append(uids)
    watch = AgentWatch(process)
    for uid in (5, 6):
        watch.requested({"op": "kill", "uids": [uid]})
        process.timers.pop()()
        watch.give_up("it did not answer")
    assert given_up == [[5], [6]]


def test_an_agent_after_one_that_was_given_up_is_watched_in_its_turn(process: Any) -> None:
    given_up: list[Any] = []
    process.agent_silent = lambda timeout, uids: given_up.append(uids)
    watch = AgentWatch(process)
    watch.requested({"op": "spawn", "procs": [{"uid": 3}]})
    process.timers.pop()()
    watch.give_up("nothing arrived from it")
    assert given_up == [[3]]
    watch.requested({"op": "kill", "uids": [4]})
    process.timers.pop()()
    assert len(process.looks) == 2
