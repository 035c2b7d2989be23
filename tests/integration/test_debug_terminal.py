"""``monarch debug`` in a terminal: a real one (pty), as a person uses it."""

from __future__ import annotations

import os
import pty
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MONARCH = str(Path(sys.executable).with_name("monarch"))
WAIT = 60.0
TAB, UP, ENTER, END = "\t", "\x1b[A", "\r", "\x04"

SCRIPT = """
import os
from monarch.actor import Actor, current_rank, debug_controller, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self, loss):
        loss = loss * (1 + current_rank().rank)
        breakpoint()
        return loss

if __name__ == "__main__":
    trainers = this_host().spawn_procs({"gpus": 2}).spawn("trainers", Trainer)
    call = trainers.step.call(21)
    controller = debug_controller()
    while len(controller.list.call_one(print_output=False).get()) < 2:
        pass
    print(*controller.address.call_one().get(), flush=True)
    print(sorted(call.get().values()), flush=True)
"""


class Terminal:
    """A pseudo-terminal in which the command runs."""

    def __init__(self, port: str, home: Path) -> None:
        ours, theirs = pty.openpty()
        self._fd = ours
        self.text = ""
        self.process = subprocess.Popen(
            [MONARCH, "debug", "--port", port],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "XDG_STATE_HOME": str(home), "TERM": "dumb", "INPUTRC": "/dev/null"},
        )
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, part: str) -> str:
        """Return the new text up to a part of it."""
        end = time.monotonic() + WAIT
        while part not in self.text:
            left = end - time.monotonic()
            assert left > 0, f"no {part!r} in {self.text!r}"
            assert select.select([self._fd], [], [], left)[0]
            try:
                self.text += os.read(self._fd, 1 << 16).decode()
            except OSError:  # the command has ended
                assert part in self.text, self.text
        head, _, self.text = self.text.partition(part)
        return head + part

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT)
        os.close(self._fd)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path / "stopped.py"
    path.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "MONARCH_DEBUG_SERVER_PORT": "0",
            "MONARCH_DEBUG_SERVER_HOST": "127.0.0.1",
        },
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_session_in_a_terminal(script: subprocess.Popen[str], tmp_path: Path) -> None:
    assert script.stdout is not None
    port = script.stdout.readline().split()[1]
    terminal = Terminal(port, tmp_path)
    try:
        terminal.until("monarch_dbg> ")
        terminal.type("li" + TAB + ENTER)
        listed = terminal.until("monarch_dbg> ")
        assert "list" in listed
        assert "| trainers" in listed
        terminal.type("att" + TAB + "tr" + TAB + "1" + ENTER)
        assert "Attached to debug session for trainers 1" in terminal.until("(Pdb) ")
        terminal.type("p loss" + ENTER)
        assert "42" in terminal.until("(Pdb) ")
        terminal.type("det" + TAB + ENTER)
        assert "Detached from debug session" in terminal.until("monarch_dbg> ")
        terminal.type(UP + UP + ENTER)
        assert "p loss" in terminal.until("Error parsing input")
        terminal.until("monarch_dbg> ")
        terminal.type("continue" + ENTER)
        terminal.until("monarch_dbg> ")
        assert script.stdout.readline() == "[21, 42]\n"
        terminal.type(END)
        assert terminal.process.wait(WAIT) == 0
        history = tmp_path / "monarch" / "debug_history"
        assert "attach trainers 1" in history.read_text()
        assert stat.S_IMODE(history.stat().st_mode) == 0o600
    finally:
        terminal.close()
    assert script.wait(WAIT) == 0


def test_a_session_outlives_a_terminal_that_is_killed(
    script: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert script.stdout is not None
    port = script.stdout.readline().split()[1]
    first = Terminal(port, tmp_path)
    try:
        first.until("monarch_dbg> ")
        first.type("attach trainers 0" + ENTER)
        first.until("(Pdb) ")
        first.type("p loss * 1000" + ENTER)
        first.until("21000")
    finally:
        first.close()
    second = Terminal(port, tmp_path)
    try:
        second.until("monarch_dbg> ")
        second.type("attach trainers 0" + ENTER)
        assert "21000" in second.until("(Pdb) ")
        second.type("detach" + ENTER)
        second.until("monarch_dbg> ")
        second.type("continue" + ENTER)
        assert script.stdout.readline() == "[21, 42]\n"
        script.wait(WAIT)
        second.until("press Enter")
        second.type(ENTER)
        assert second.process.wait(WAIT) == 0
    finally:
        second.close()
