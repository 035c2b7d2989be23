"""Stacks with native frames, by py-spy, of processes whose interpreter cannot describe itself."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["native_stacks"]

_MOST = 8  # processes
_LIMIT = 30.0  # seconds for one of them


def native_stacks(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each process of a diagnosis that did not answer.

    Args:
        data: of `Diagnosis.to_dict`.

    Processes of other machines are named, with the command to run there. Raises RuntimeError if
    py-spy is not installed.
    """
    program = _py_spy()
    answered = {account["uid"] for account in data["accounts"]}
    silent = [member for member in data["processes"] if member["uid"] not in answered]
    if not silent:
        yield "All processes answer, so no native stacks are shown."
    here = socket.gethostname()
    for number, member in enumerate(silent):
        pid, machine = member["pid"], member["machine"]
        if number == _MOST:
            yield f"and {len(silent) - _MOST} further processes that do not answer"
            return
        if machine != here or not os.path.exists(f"/proc/{pid}"):
            yield f"Process {pid} is on {machine}; there: py-spy dump --native --pid {pid}"
            continue
        yield f"Process {pid}, with native frames:\n{_dumped(program, pid)}"


def _py_spy() -> str:
    beside = os.path.dirname(sys.executable)
    found = shutil.which("py-spy") or shutil.which("py-spy", path=beside)
    if found is None:
        raise RuntimeError("--native needs py-spy: pip install 'pymonarch[native]'")
    return found


def _dumped(program: str, pid: int) -> str:
    command = [program, "dump", "--native", "--pid", str(pid)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"  py-spy gave no stack within {_LIMIT:g} s"
    text = run.stdout if run.returncode == 0 else run.stderr or run.stdout
    lines = text.strip().splitlines() or [f"py-spy ended with status {run.returncode}"]
    return "\n".join(f"  {line}" for line in lines)
