"""Programs in IPython in a terminal, typed by a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.job.os_process import OsProcess, descendants, wait_for
from tests.terminal import Terminal

WAIT = 60.0
SCRIPT = """
import os, time
from monarch.actor import Actor, current_rank, endpoint, this_host

class Talker(Actor):
    @endpoint
    def say(self, text):
        print(f"{text} of {current_rank().rank}")
        return current_rank().rank

    @endpoint
    def wait(self, path):
        open(path, "w").close()
        while os.path.exists(path):
            time.sleep(0.02)

procs = this_host().spawn_procs({"gpus": 2})
talkers = procs.spawn("talkers", Talker)
first = talkers.slice(gpus=0)
"""


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Terminal]:
    script = tmp_path / "talkers.py"
    script.write_text(SCRIPT)
    options = ("--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=NoColor")
    # `setsid -c` makes the terminal the controlling one, whose Ctrl-C is a signal.
    command = ("setsid", "-c", sys.executable, "-m", "IPython", *options)
    made = Terminal(*command, TERM="dumb", INPUTRC="/dev/null", IPYTHONDIR=str(tmp_path))
    yield made
    made.close()


def expect_all(screen: Terminal, *patterns: str) -> None:
    """Wait for texts of several processes, which arrive in any order, also within a line."""
    screen.expect("(?s)" + "".join(f"(?=.*{pattern})" for pattern in patterns) + ".*")


def test_a_session(screen: Terminal, tmp_path: Path) -> None:
    """Top-level await, output of actors, progress, an interrupt, an exit that leaves no process."""
    screen.expect(r"In \[1\]: ")
    screen.type(f"%run -i {tmp_path}/talkers.py\n")
    screen.expect(r"In \[2\]: ")
    screen.type("[*(await talkers.say.call('hello')).values()]\n")
    expect_all(screen, "hello of 0", "hello of 1", r"Out\[2\]: ", r"\[0, 1\]", r"In \[3\]: ")
    for number, call in (
        (3, "first.wait.call({0!r}).get()"),
        (4, "await first.wait.call({0!r})"),
    ):
        marker = tmp_path / f"waiting{number}"
        screen.type(call.format(str(marker)) + "\n")
        screen.expect(r"monarch: talkers.wait: waiting for gpus=0 \(\d+ s\)")
        assert marker.exists()
        screen.type("\x03")
        screen.expect("KeyboardInterrupt")
        screen.expect(rf"In \[{number + 1}\]: ")
        marker.unlink()
    screen.type("await talkers.say.call('still here'); None\n")
    expect_all(screen, "still here of 0", "still here of 1", r"In \[6\]: ")
    started = descendants([OsProcess.of(screen.process.pid)])
    assert len(started) >= 3
    screen.type("exit\n")
    assert screen.process.wait(WAIT) == 0
    assert wait_for(started, WAIT) == []
