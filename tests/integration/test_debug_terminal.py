"""``monarch debug`` in a terminal: a real one (pty), as a person uses it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.terminal import Terminal

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


def debugger(port: str, home: Path) -> Terminal:
    """Start the command in a terminal."""
    command = (MONARCH, "debug", "--port", port)
    return Terminal(*command, XDG_STATE_HOME=str(home), TERM="dumb", INPUTRC="/dev/null")


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
    terminal = debugger(port, tmp_path)
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
    first = debugger(port, tmp_path)
    try:
        first.until("monarch_dbg> ")
        first.type("attach trainers 0" + ENTER)
        first.until("(Pdb) ")
        first.type("p loss * 1000" + ENTER)
        first.until("21000")
    finally:
        first.close()
    second = debugger(port, tmp_path)
    try:
        second.until("monarch_dbg> ")
        second.type("attach trainers 0" + ENTER)
        assert "21000" in second.until("(Pdb) ")
        second.type("detach" + ENTER)
        second.until("monarch_dbg> ")
        second.type("continue" + ENTER)
        assert script.stdout.readline() == "[21, 42]\n"
        script.wait(WAIT)
        second.until("The program ends. Bye.")  # drawn at the prompt, or read together with it
        assert second.process.wait(WAIT) == 0
    finally:
        second.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_prompt_ends_with_the_connection(at_once: bool, tmp_path: Path) -> None:
    """The prompt is drawn already, or the end comes together with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        terminal = debugger(str(server.getsockname()[1]), tmp_path)
        try:
            with server.accept()[0] as connection:
                connection.sendall(b"monarch_dbg> ")
                if not at_once:
                    terminal.until("monarch_dbg> ")
            terminal.until("closed the connection")
            assert terminal.process.wait(WAIT) == 0
        finally:
            terminal.close()


def test_a_line_that_is_edited_is_drawn_again_below_text_that_arrives(
    script: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The process of the rank exits; then the line belongs to the prompt of the debugger."""
    assert script.stdout is not None
    port = script.stdout.readline().split()[1]
    os.mkfifo(tmp_path / "exit")
    waits = f"open({str(tmp_path / 'exit')!r}).read(), __import__('os')._exit(0)"
    terminal = debugger(port, tmp_path)
    try:
        terminal.until("monarch_dbg> ")
        terminal.type("attach trainers 0" + ENTER)
        terminal.until("(Pdb) ")
        terminal.type(f"__import__('threading').Thread(target=lambda: ({waits})).start()" + ENTER)
        terminal.until("(Pdb) ")
        terminal.type("hel")
        terminal.until("hel")
        (tmp_path / "exit").write_text("")
        terminal.until("Detached from debug session")
        terminal.until("monarch_dbg> hel")
        terminal.type("p" + ENTER)
        terminal.until("monarch_dbg commands:")
    finally:
        terminal.close()
