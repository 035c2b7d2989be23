"""A program runs in whatever surroundings its process is started: its environment is its user's.

Each row starts the same program another way. It gives its answer by its exit status, because some
rows take its output away.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """\
import sys
from monarch.actor import Actor, endpoint, this_host

class Adder(Actor):
    @endpoint
    def add(self, left, right):
        return left + right

def main():
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    adders = procs.spawn("adders", Adder)
    total = sum(adders.add.call(2, 3).get(timeout=60).values())
    procs.stop().get(timeout=60)
    return total + 32

"""
LAST = "sys.exit(main())\n"
ANSWER = 42

ALL_SIGNALS = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)


def _without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


def _close(*descriptors: int) -> Callable[[], None]:
    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return close


@functools.cache
def _has_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--uts", "--net", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


Row = dict[str, Any]
ROWS: dict[str, Row] = {
    "no HOME": {"env": _without("HOME")},
    "a HOME that is not there": {"env": {**os.environ, "HOME": "/nonexistent/home"}},
    "no TMPDIR": {"env": _without("TMPDIR", "TEMP", "TMP")},
    "a TMPDIR that is not there": {"env": {**os.environ, "TMPDIR": "/nonexistent/tmp"}},
    "an empty environment": {"env": {}},
    "umask 0777": {"preexec_fn": lambda: os.umask(0o777)},
    "umask 0": {"preexec_fn": lambda: os.umask(0)},
    "closed stdin": {"preexec_fn": _close(0)},
    "closed stdout": {"preexec_fn": _close(1)},
    "closed stdin and stdout": {"preexec_fn": _close(0, 1)},
    "closed stdin, stdout and stderr": {"preexec_fn": _close(0, 1, 2)},
    "ignored signals": {"preexec_fn": _ignore_signals},
    "blocked signals": {"preexec_fn": _block_signals},
    "recursion limit 150": {"last": f"sys.setrecursionlimit(150)\n{LAST}"},
    "a thread": {
        "last": "import threading\nfound = []\n"
        "thread = threading.Thread(target=lambda: found.append(main()))\n"
        "thread.start()\nthread.join()\nsys.exit(found[0])\n"
    },
    "python -": {"command": ["-"], "stdin": True},
    "python -c": {"command": ["-c", PROGRAM + LAST]},
    "python -m": {"command": ["-m", "program"]},
    "python -I": {"command": ["-I", "program.py"]},
    "python -OO": {"command": ["-OO", "program.py"]},
    "python -W error": {"command": ["-W", "error", "program.py"]},
    "a zip": {"command": ["program.zip"]},
    "a host name that cannot be resolved": {
        "before": [
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname no.such.host.invalid && exec "$@"',
            "-",
        ]
    },
    "no network": {"before": ["unshare", "--net"]},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_program_runs(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    if "before" in row and not _has_namespaces():
        pytest.skip("no namespaces here")
    ended = _run(row, tmp_path)
    assert ended.returncode == ANSWER, ended.stderr


def _run(row: Row, folder: Path) -> subprocess.CompletedProcess[str]:
    text = PROGRAM + row.get("last", LAST)
    (folder / "program.py").write_text(text)
    with zipfile.ZipFile(folder / "program.zip", "w") as archive:
        archive.writestr("__main__.py", text)
    options: Row = {"input": text} if row.get("stdin") else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        [*row.get("before", []), sys.executable, *row.get("command", ["program.py"])],
        check=False,
        cwd=folder,
        env=row.get("env"),
        preexec_fn=row.get("preexec_fn"),
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.failures
def test_forty_descriptors_are_too_few_and_the_error_says_so(tmp_path: Path) -> None:
    few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))}
    ended = _run(few, tmp_path)
    assert ended.returncode == 1
    assert "may open no more than 40 descriptors (ulimit -n)" in ended.stderr
