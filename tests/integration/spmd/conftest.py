"""One fork server for all tests of a module: it imports torch once, and ends with the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import files_of_processes

WAIT = 240
MARK = "MONARCH_TEST_RUN"

GROUP = """
import os, signal, sys, time
import torch, torch.distributed as dist
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def reduce():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())
"""


class Program:
    """A script in a directory of its own."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.environ = environ

    def start(self, source: str, *words: str) -> subprocess.Popen[str]:
        (self.folder / "train.py").write_text(source)
        options = [word for word in words if word.startswith("--")]
        rest = [word for word in words if not word.startswith("--")]
        return self._command(*options, "train.py", *rest)

    def _command(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("monarch")), "run", *words],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, source: str, *words: str) -> tuple[int, list[str], list[str]]:
        return self._finish(self.start(source, *words))

    def run(self, *words: str) -> tuple[int, list[str], list[str]]:
        """Run the command with these words."""
        return self._finish(self._command(*words))

    def _finish(self, process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
        with process:
            out, err = process.communicate(timeout=WAIT)
        return process.returncode, sorted(out.splitlines()), err.splitlines()


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """The environment of commands."""
    with own_fork_servers() as variables:
        yield {**os.environ, **variables}


@contextlib.contextmanager
def own_fork_servers() -> Iterator[dict[str, str]]:
    """Yield variables with which commands use fork servers that end with the block."""
    folder = tempfile.mkdtemp(prefix="run-")  # short: the path of a socket is limited
    yield {"TMPDIR": folder, MARK: folder}
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


def until(condition: Callable[[], bool], facts: object = "") -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"this does not happen {facts}"
        time.sleep(0.01)


@pytest.fixture
def program(tmp_path: Path, environ: dict[str, str]) -> Program:
    return Program(tmp_path, environ)
