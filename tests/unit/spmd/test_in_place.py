"""`restarts`, with the test in place of the host."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch.spmd import Interrupted, restarts
from monarch.spmd.in_place import _SIGNAL, CONTROL
from monarch.spmd.message import Messages, send

WAIT = 60


class Host:
    """The other end of the connection. `answers` has the orders that follow a report."""

    def __init__(self, control: socket.socket, answers: dict[str, list[dict[str, Any]]]) -> None:
        self.control = control
        self.answers = answers
        self.reports: list[str] = []
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def order(self, op: str, **facts: Any) -> None:
        send(self.control, {"op": op, **facts})

    def _read(self) -> None:
        messages = Messages(self.control)
        try:
            while True:
                for message, _ in messages.read():
                    self.reports.append(message["op"])
                    for order in self.answers.get(message["op"], []):
                        send(self.control, order)
        except EOFError:
            self.ended.set()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(CONTROL, f"{theirs.detach()}:{os.getpid()}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    handler = signal.getsignal(_SIGNAL)
    host = Host(ours, {"ready": [GO]})
    yield host
    signal.signal(_SIGNAL, handler)
    ours.shutdown(socket.SHUT_RDWR)
    assert host.ended.wait(WAIT)
    ours.close()


GO = {"op": "go", "variables": {"TORCHELASTIC_RESTART_COUNT": "1"}, "failure": "rank 1: killed"}
INTERRUPT = {"op": "interrupt"}
RAISE = {"op": "raise"}


def until_reported(host: Host, report: str) -> None:
    deadline = time.monotonic() + WAIT
    while report not in host.reports:
        assert time.monotonic() < deadline, host.reports
        time.sleep(0.001)


def loop_that_raises(error: Any) -> None:
    for attempt in restarts():
        with attempt:
            if error is None:
                threading.Event().wait()
            raise error


def test_a_block_that_runs_to_its_end(host: Host) -> None:
    numbers = []
    for attempt in restarts():
        with attempt:
            numbers.append(attempt.number)
    assert numbers == [0]
    until_reported(host, "left")
    assert host.reports == ["asked", "left"]


def test_an_interrupt_ends_the_block_wherever_it_is(host: Host) -> None:
    host.answers["asked"] = [INTERRUPT]
    caught: list[type[BaseException]] = []
    seen: list[tuple[int, str | None]] = []
    called: list[str] = []
    after, before = (lambda: called.append("after")), (lambda: called.append("before"))
    for attempt in restarts(after=after, before=before):
        with attempt:
            seen.append((attempt.number, attempt.failure))
            try:
                if not attempt.number:
                    threading.Event().wait()
            except Interrupted as error:
                caught.append(type(error))
                raise
    assert caught == [Interrupted]
    assert seen == [(0, None), (1, "rank 1: killed")]
    assert called == ["after", "before"]
    until_reported(host, "left")
    assert host.reports == ["asked", "ready", "left"]


def test_a_block_that_swallows_the_interrupt_gets_another(host: Host) -> None:
    host.answers["asked"] = [INTERRUPT]
    swallowed = 0
    for attempt in restarts():
        with attempt:
            while not attempt.number:
                try:
                    threading.Event().wait()
                except Interrupted:
                    swallowed += 1
                    if swallowed == 2:
                        break
    assert swallowed == 2


@pytest.mark.parametrize("error", [RuntimeError, ConnectionResetError])
def test_an_error_that_may_be_the_effect_of_another_failure(
    host: Host, error: type[Exception]
) -> None:
    host.answers["raised"] = [INTERRUPT]
    numbers = []
    for attempt in restarts():
        with attempt:
            numbers.append(attempt.number)
            if not attempt.number:
                raise error
    assert numbers == [0, 1]
    until_reported(host, "left")
    assert host.reports == ["asked", "raised", "ready", "left"]


@pytest.mark.parametrize(
    ("error", "reports"),
    [
        (RuntimeError, ["asked", "raised", "failed"]),
        (KeyError, ["asked", "failed"]),
        (SystemExit(3), ["asked", "failed"]),
        (SystemExit, ["asked", "left"]),
        (KeyboardInterrupt, ["asked", "failed"]),
    ],
)
def test_a_rank_s_own_error(host: Host, error: Any, reports: list[str]) -> None:
    host.answers["raised"] = [RAISE]
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind):
        loop_that_raises(error)
    until_reported(host, reports[-1])
    assert host.reports == reports


def test_a_host_that_is_lost(host: Host) -> None:
    host.answers["asked"] = [INTERRUPT]
    del host.answers["ready"]

    def end() -> None:
        until_reported(host, "ready")
        host.control.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=end).start()
    with pytest.raises(RuntimeError, match="its host has closed the connection"):
        loop_that_raises(None)


def test_a_second_loop_has_one_attempt(host: Host) -> None:
    for _ in range(2):
        for attempt in restarts():
            with attempt:
                pass
    until_reported(host, "left")
    assert host.reports == ["asked", "left"]


def test_another_thread(host: Host) -> None:
    found: queue.SimpleQueue[object] = queue.SimpleQueue()

    def call() -> None:
        try:
            found.put(restarts())
        except RuntimeError as error:
            found.put(error)

    threading.Thread(target=call).start()
    assert "another thread than the main one" in str(found.get(timeout=WAIT))
    for attempt in restarts():  # takes the connection
        with attempt:
            pass


def test_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a rank has the variable, and perhaps another descriptor of that number."""
    monkeypatch.setenv(CONTROL, f"0:{os.getppid()}")
    for attempt in restarts():
        with attempt:
            assert attempt.failure is None


@pytest.mark.parametrize("patience", [0, -1, float("nan")])
def test_patience_is_positive(patience: float) -> None:
    with pytest.raises(ValueError, match="patience must be a positive number of seconds"):
        restarts(patience=patience)


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="there are no such signals")
def test_the_signal_is_one_without_a_meaning() -> None:
    assert signal.SIGRTMIN < _SIGNAL < signal.SIGRTMAX
