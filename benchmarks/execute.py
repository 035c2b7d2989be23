"""Run one program in one fresh process, and leave no process of it behind.

A program's workers are its descendants. But an engine that crashes may leave orphans, which would
slow down the next program. So this process adopts orphans (a *subreaper*), gives them some time to
exit after each program, and kills the rest. Linux only, as is the memory row.
"""

import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from environments import ROOT
from machine import free_gigabytes, load_when_quiet
from rows import RAY, Program

PROGRAMS = Path(__file__).resolve().parent / "programs"
PR_SET_CHILD_SUBREAPER = 36
GRACE = 3.0
ONE_CORE = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))
"""What stands before a command that runs on one core, with all that it starts."""


@dataclass(frozen=True)
class Outcome:
    """The result of one run of a program: figures, or a message why there are none.

    `unavailable` is the reason if this machine lacks what the program measures, which is no
    failure. `load` is the machine's load before the run.
    """

    seconds: float
    figures: dict[str, dict[str, float]] | None = None
    failure: str | None = None
    unavailable: str | None = None
    load: float = 0.0


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def run_program(program: Program, engine: str, python: Path, span: float) -> Outcome:
    """Run `program` on `engine`. Blocks until all its processes have exited."""
    needed = program.gigabytes.get(engine, 0)
    if (free := free_gigabytes()) < needed:
        return Outcome(0, failure=f"needs {needed:g} GB of free memory; there are {free:.1f}")
    file = f"ray_{program.file}.py" if engine == RAY else f"{program.file}.py"
    command = [str(python), str(PROGRAMS / file), *filter(None, [program.argument])]
    if program.one_core:
        command = [*ONE_CORE, *command]
    load = load_when_quiet()
    return replace(run_command(command, program.timeout, span, program.environment), load=load)


def run_command(
    command: list[str], timeout: float, span: float, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command that prints figures as programs/timing.py does, and return its outcome."""
    # A file and not a pipe: a surviving worker that holds a pipe open would delay the reader.
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        printed = Path(scratch) / "printed"
        started = time.perf_counter()
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=PROGRAMS,  # workers import `timing` and `values` from there
                env=_environment(span, scratch) | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        failure = None
        try:
            if process.wait(timeout):
                failure = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"no end after {timeout:g} s"
        finally:
            process.kill()
            process.wait()
            seconds = time.perf_counter() - started
            _bury_orphans(grace=GRACE if failure is None else 0)
        words = printed.read_text(errors="replace")

    answer = _answer(words)
    if failure is None and answer is None:
        failure = "printed no figures"
    if failure is not None or answer is None:
        last_words = words[-1500:].replace(f"{ROOT}/", "")
        return Outcome(seconds, failure=f"{failure}\n{last_words}".strip())
    return Outcome(seconds, figures=answer["figures"], unavailable=answer.get("unavailable"))


def _environment(span: float, scratch: str) -> dict[str, str]:
    """Return the caller's environment without variables that change what is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept.pop("VIRTUAL_ENV", None)
    return kept | {
        "BENCH_SECONDS": str(span),
        "RAY_TMPDIR": scratch,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _answer(words: str) -> dict[str, Any] | None:
    for line in reversed(words.splitlines()):
        if line.startswith('{"figures":'):
            answer: dict[str, Any] = json.loads(line)
            return answer
    return None


def _bury_orphans(grace: float) -> None:
    """Wait up to `grace` seconds for the descendants of this process to exit, then kill them."""
    deadline = time.monotonic() + grace
    while descendants := _descendants():
        if time.monotonic() > deadline:
            for pid in descendants:
                _signal(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # the process has just exited
            children.setdefault(int(after_name[1]), []).append(int(entry.name))
    found: set[int] = set()
    unseen = list(children.get(os.getpid(), ()))
    while unseen:
        pid = unseen.pop()
        found.add(pid)
        unseen += children.get(pid, ())
    return found


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
