"""Calls while processes and actors fail, or get signals: each has one outcome."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, endpoint

from .conftest import WAIT

PROGRAM = Path(__file__).parents[2] / "soak" / "chaos.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_every_call_is_accounted_for() -> None:
    """A short run of `tests/soak/chaos.py`, which checks the outcome of each call.

    A failure prints the history that shows the error. Run the program itself for longer
    runs and other seeds.
    """
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--seconds", "6", "--procs", "8", "--seed", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Noted(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def note(self, number: int) -> int:
        self.seen.append(number)
        return number

    @endpoint
    def report(self) -> list[int]:
        return self.seen

    @endpoint
    def pids(self) -> tuple[int, int]:
        return os.getpid(), os.getppid()


SIGNALS = [
    [signal.SIGSTOP, signal.SIGCONT],
    [signal.SIGTSTP, signal.SIGCONT],
    [signal.SIGCONT],
    [signal.SIGCHLD],
    [signal.SIGPIPE],
    [signal.SIGURG],
    [signal.SIGWINCH],
]
"""What a terminal, a debugger or a kernel sends to processes that go on after it."""


def test_signals_lose_no_call_and_repeat_none(fresh: Callable[..., Any]) -> None:
    actors = fresh(2).spawn("noted", Noted)
    pids = {pid for both in actors.pids.call().get(timeout=WAIT).values() for pid in both}
    assert os.getpid() not in pids
    choose = random.Random(1)
    ended = threading.Event()

    def harass() -> None:
        targets = sorted(pids)
        while not ended.is_set():
            pid = choose.choice(targets)
            for number in choose.choice(SIGNALS):
                os.kill(pid, number)

    harassing = threading.Thread(target=harass)
    harassing.start()
    try:
        answers = [actors.note.call(number) for number in range(1000)]
        found = [list(answer.get(timeout=WAIT).values()) for answer in answers]
    finally:
        ended.set()
        harassing.join()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert found == [[number, number] for number in range(1000)]
    assert list(actors.report.call().get(timeout=WAIT).values()) == [[*range(1000)]] * 2
