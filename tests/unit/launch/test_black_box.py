"""The contents of a process's black box after each way in which a process can exit."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from monarch._engine.base.crash import crash_trace
from monarch._engine.base.memory_file import memory_file
from monarch._engine.launch import black_box

PROGRAM = """
import faulthandler, os, signal, sys, threading
from monarch._engine.launch import black_box

def die(number):
    os.kill(os.getpid(), number)

black_box.install(int(sys.argv[1]))
"""


@pytest.fixture
def box() -> Iterator[int]:
    fd = memory_file()
    yield fd
    os.close(fd)


def run(box: int, code: str) -> tuple[int, str]:
    """Run `code` in a process with this box; return its exit status and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + code, str(box)],
        check=False,
        pass_fds=[box],
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", "SIGILL"])
def test_a_crash_is_in_the_box(box: int, name: str) -> None:
    number = signal.Signals[name]
    assert run(box, f"die({int(number)})") == (-number, ""), "it still ends by that signal"
    assert "in die" in crash_trace(black_box.read(box))


def test_a_crash_of_another_thread_is_in_the_box(box: int) -> None:
    code = "t = threading.Thread(target=faulthandler._sigsegv)\nt.start()\nt.join()"
    assert run(box, code) == (-signal.SIGSEGV, "")
    assert "in <module>" in crash_trace(black_box.read(box))


@pytest.mark.parametrize(("code", "status"), [("", 0), ("os._exit(3)", 3), ("die(9)", -9)])
def test_nothing_is_in_the_box_of_who_did_not_crash(box: int, code: str, status: int) -> None:
    assert run(box, code) == (status, "")
    assert black_box.read(box) == ""


def test_a_program_that_enables_faulthandler_has_the_text_where_it_wants_it(box: int) -> None:
    status, said = run(box, "faulthandler.enable()\ndie(signal.SIGSEGV)")
    assert status == -signal.SIGSEGV
    assert "in die" in said
    assert black_box.read(box) == ""


def test_so_has_one_that_enabled_it_before(box: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    status, said = run(box, "die(signal.SIGSEGV)")
    assert status == -signal.SIGSEGV
    assert "in die" in said
    assert black_box.read(box) == ""


def test_a_forked_child_tells_stderr(box: int) -> None:
    code = "if os.fork():\n os.wait()\n os._exit(0)\ndie(signal.SIGSEGV)"
    status, said = run(box, code)
    assert status == 0
    assert "in die" in said
    assert black_box.read(box) == ""


def test_an_executed_child_does_not_have_it(box: int) -> None:
    code = f"os.execv('/bin/sh', ['sh', '-c', 'echo x >&{box}'])"
    assert run(box, code)[0] != 0
    assert black_box.read(box) == ""


@pytest.mark.parametrize(("version", "options"), [((3, 13), {}), ((3, 14), {"c_stack": False})])
def test_the_c_stack_is_not_written(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], options: dict[str, bool]
) -> None:
    """The code that writes it may wait for a lock that the crash has left held."""
    spec = black_box.__spec__
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.delattr(os, "register_at_fork")
    spec.loader.exec_module(fresh)
    assert fresh._options == options


def test_it_is_read_to_a_bound_and_whatever_is_in_it() -> None:
    box = memory_file(1 << 30)
    os.pwrite(box, b"\xff\xfe", 0)
    text = black_box.read(box)
    os.close(box)
    assert text.startswith("\ufffd\ufffd")
    assert len(text) <= 1 << 18
