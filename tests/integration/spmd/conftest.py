"""One fork server for all tests of a module: it imports torch once, and ends with the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

from tests.processes import files_of_processes

WAIT = 240
MARK = "MONARCH_TEST_RUN"


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """The environment of commands."""
    folder = tempfile.mkdtemp(prefix="run-")  # short: the path of a socket is limited
    yield {**os.environ, "TMPDIR": folder, MARK: folder}
    for pid in marked(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not marked(folder))
    shutil.rmtree(folder)


def marked(value: str) -> set[int]:
    """Return the processes that have inherited the mark."""
    found = set()
    for path in files_of_processes("environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={value}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "this does not happen"
        time.sleep(0.01)
