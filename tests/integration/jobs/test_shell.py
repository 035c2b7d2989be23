"""`monarch shell` at a terminal, as a user runs it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.actor import this_host
from monarch.job import job_load, shell
from tests.terminal import Terminal

WAIT = 60.0

JOB = """
from monarch.job import ProcessJob
job = ProcessJob({"a": 2, "b": 1})
"""


@pytest.fixture
def described(directory: Path) -> Iterator[Path]:
    (directory / "described.py").write_text(JOB)
    subprocess.run(
        [sys.executable, "-m", "monarch.cli", "apply", "described.job"],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=WAIT,
    )
    yield directory
    job_load().kill()


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    shell = {"SHELL": "/bin/bash", "HOME": os.getcwd(), "TERM": "xterm-of-test"}
    made = Terminal(sys.executable, "-m", "monarch.cli", *command, **shell)
    try:
        yield made
    finally:
        made.close()


def test_a_person_at_a_shell(described: Path) -> None:
    with terminal("shell", "-e", "X=of the job") as screen:
        screen.type("echo $((20 + 3)) $X $TERM\n")
        screen.expect(r"\n23 of the job xterm-of-test")
        assert not screen.is_as_before()  # raw mode: every key is sent to the other side
        screen.type("stty size; pwd\n")
        screen.expect(rf"\n30 100\r\n{re.escape(str(described))}")
        screen.resize(40, 120)
        screen.process.send_signal(signal.SIGWINCH)  # (a shell's own terminal sends this signal)
        screen.type('until [ "$(stty size)" = "40 120" ]; do :; done; echo resi\'\'zed\n')
        screen.expect("resized")
        screen.type("sh -c 'echo be''gun; exec sleep 1000'\n")
        screen.expect("begun\r\n")  # (an earlier key would go to the shell)
        screen.type("\x03")  # Ctrl-C ends the command there, not the shell, and no process here
        screen.type("echo st''ill $?\n")
        screen.expect("still 130")
        screen.type("head -c 300000 /dev/zero | tr '\\0' x; echo; echo do''ne\n")
        screen.expect("x{100}\r\ndone")
        screen.type("exit 7\n")
        assert screen.process.wait(WAIT) == 7
        assert screen.is_as_before()


def test_which_host(described: Path) -> None:
    with terminal("shell", "--mesh", "a", "--point", "hosts=1") as screen:
        screen.type("echo name $HYPERACTOR_PROCESS_NAME; kill -KILL $$\n")
        screen.expect("name shell-0")
        assert screen.process.wait(WAIT) == 128 + signal.SIGKILL
    with terminal("shell", "--mesh", "zz") as screen:
        screen.expect("'zz' is not a valid host mesh name. Available names: a, b")
        assert screen.process.wait(WAIT) == 1


def test_input_that_is_no_terminal_is_run(described: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monarch.cli", "shell", "-e", "X=of the job"],
        input="echo $((20 + 3)) $X\necho aside >&2\nread line\na line\necho read $line\nexit 4\n",
        text=True,
        capture_output=True,
        env={**os.environ, "SHELL": "/bin/bash", "HOME": os.getcwd()},
        timeout=WAIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (4, "23 of the job\nread a line\n")
    assert "aside\n" in done.stderr


def test_the_end_of_a_terminal_hangs_up(described: Path) -> None:
    """The shell ends even if it ignores SIGHUP and SIGTERM."""
    stubborn = described / "stubborn"
    stubborn.write_text("#!/bin/sh\ntrap '' HUP TERM\necho ready\nwhile :; do sleep 1; done\n")
    stubborn.chmod(0o755)
    with terminal("shell", "-e", f"SHELL={stubborn}") as screen:
        screen.expect("ready")
        screen.hang_up()
        assert screen.process.wait(WAIT) == 128 + signal.SIGKILL


def test_a_shell_is_for_one_host() -> None:
    hosts = this_host()
    procs = hosts.spawn_procs({"gpus": 2})
    with pytest.raises(ValueError, match="a shell runs on one host"):
        shell(procs)  # type: ignore[arg-type]
    procs.stop().get(timeout=WAIT)
