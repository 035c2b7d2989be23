"""Stacks of a process: by py-spy where it may look, else from the accounts of its actors.

py-spy runs beside the observer, so it sees processes of this machine. For others, and where the
system forbids it, the process's own account is shown, with `capture_mode` ``in_process``: it has
the frames of the program, also those of suspended coroutines.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import Any

from monarch._admin.answers import Fault
from monarch._admin.options import Options
from monarch._admin.picture import Process

__all__ = ["capture", "flame_graph", "tables_of"]

_RATES = (1, 1000)
_MISSING = "py-spy is not installed: pip install 'pymonarch[native]'"


def find_pyspy(options: Options) -> str | None:
    """Return the path of py-spy: the configured one, or one on PATH or beside Python."""
    if options.pyspy:
        return options.pyspy
    beside = os.path.dirname(sys.executable)
    return shutil.which("py-spy") or shutil.which("py-spy", path=beside)


def capture(process: Process, options: Options) -> dict[str, Any]:
    """Return a PySpyResult. Blocks for the timeout at most."""
    program = find_pyspy(options)
    why = _MISSING
    if program is not None:
        why = f"process {process.pid} is on {process.machine}, where py-spy was not run"
    if program is not None and _is_here(process):
        command = [program, "dump", "--json", "--pid", str(process.pid)]
        try:
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=options.pyspy_timeout,
                check=False,
                errors="replace",
            )
            if run.returncode == 0:
                return {"Ok": _result(process, program, json.loads(run.stdout))}
            lines = run.stderr.strip().splitlines()
            why = f"py-spy: {lines[-1] if lines else f'it ended with status {run.returncode}'}"
        except subprocess.TimeoutExpired:
            why = f"py-spy gave no stack within {options.pyspy_timeout:g} s"
        except (OSError, ValueError) as error:
            why = f"py-spy: {error}"
    if not process.answers:
        failed = {"pid": process.pid, "binary": program or "py-spy", "exit_code": None}
        return {"Failed": {**failed, "stderr": f"{why}; and {process.trouble}"}}
    return {"Ok": _own(process, why)}


def _is_here(process: Process) -> bool:
    return process.machine == socket.gethostname() and os.path.exists(f"/proc/{process.pid}")


def _result(process: Process, program: str, threads: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "binary": program,
        "capture_mode": "python_only",
        "stack_traces": [_thread(process.pid, thread) for thread in threads],
        "warnings": [],
    }


def _thread(pid: int, thread: dict[str, Any]) -> dict[str, Any]:
    frames = [
        {
            "name": frame["name"],
            "filename": frame["filename"],
            "module": frame.get("module"),
            "short_filename": frame.get("short_filename"),
            "line": frame["line"],
            "locals": frame.get("locals"),
            "is_entry": frame.get("is_entry", False),
        }
        for frame in thread["frames"]
    ]
    names = ("thread_name", "os_thread_id")
    return {
        "pid": pid,
        "thread_id": thread["thread_id"],
        **{name: thread.get(name) for name in names},
        "active": thread["active"],
        "owns_gil": thread["owns_gil"],
        "frames": frames,
    }


def _own(process: Process, why: str) -> dict[str, Any]:
    """Return the stacks that the process itself gave."""
    activities = [("MainThread", process.script)] if process.script else []
    activities += [(actor.short, one) for actor in process.actors for one in actor.doing]
    return {
        "pid": process.pid,
        "binary": "",
        "capture_mode": "in_process",
        "stack_traces": [
            {
                "pid": process.pid,
                "thread_id": number,
                "thread_name": name,
                "os_thread_id": None,
                "active": activity["wait"] is None,
                "owns_gil": False,
                "frames": [_frame(line) for line in activity["stack"]],
            }
            for number, (name, activity) in enumerate(activities)
        ],
        "warnings": [f"only the program's own frames of actors that work: {why}"],
    }


def _frame(line: str) -> dict[str, Any]:
    """Return the frame of a line of an account.

    >>> frame = _frame("step() at /a/train.py:12")
    >>> frame["name"], frame["filename"], frame["line"]
    ('step', '/a/train.py', 12)
    """
    name, _, where = line.partition("() at ")
    filename, _, number = where.rpartition(":")
    return {
        "name": name,
        "filename": filename,
        "module": None,
        "short_filename": os.path.basename(filename),
        "line": int(number) if number.isdigit() else 0,
        "locals": None,
        "is_entry": False,
    }


def flame_graph(process: Process, options: Options, asked: dict[str, Any]) -> bytes:
    """Return an SVG of samples. Blocks for as long as it samples. Raises Fault."""
    seconds, rate = asked.get("duration_s"), asked.get("rate_hz")
    for name in ("duration_s", "rate_hz", "native", "threads", "nonblocking"):
        wanted = bool if name in ("native", "threads", "nonblocking") else int
        if type(asked.get(name)) is not wanted:
            raise Fault("bad_request", f"{name} is missing, or is no {wanted.__name__}")
    assert isinstance(seconds, int)
    assert isinstance(rate, int)
    if not 1 <= seconds <= options.longest_profile:
        raise Fault("bad_request", f"duration_s is 1 to {options.longest_profile:g}")
    if not _RATES[0] <= rate <= _RATES[1]:
        raise Fault("bad_request", f"rate_hz is {_RATES[0]} to {_RATES[1]}")
    program = find_pyspy(options)
    if program is None:
        raise Fault("service_unavailable", _MISSING)
    if not _is_here(process):
        where = f"process {process.pid} is on {process.machine}"
        raise Fault("profile_failed", f"{where}: use `monarch profile --cpu`")
    with tempfile.TemporaryDirectory(prefix="monarch-profile-") as folder:
        path = os.path.join(folder, "profile.svg")
        command = [program, "record", "--format", "flamegraph", "--output", path]
        command += ["--duration", str(seconds), "--rate", str(rate), "--pid", str(process.pid)]
        command += [f"--{name}" for name in ("native", "threads", "nonblocking") if asked[name]]
        try:
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=seconds + 2 * options.pyspy_timeout,
                check=False,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise Fault("gateway_timeout", "py-spy did not end in time") from None
        except OSError as error:
            raise Fault("profile_failed", f"py-spy: {error}") from None
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            lines = run.stderr.strip().splitlines() or [f"status {run.returncode}"]
            raise Fault("profile_failed", f"py-spy: {lines[-1]}") from None


def tables_of(result: dict[str, Any], proc: str) -> tuple[str, dict[str, dict[str, Sequence[Any]]]]:
    """Return an id, and the columns of the tables ``pyspy_*`` for a PySpyResult that is Ok."""
    found, dump = result["Ok"], str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
    traces = found["stack_traces"]
    frames = [
        (trace["thread_id"], depth, frame)
        for trace in traces
        for depth, frame in enumerate(trace["frames"])
    ]
    local = [
        (thread, depth, each)
        for thread, depth, frame in frames
        for each in frame.get("locals") or ()
    ]
    names = ("pid", "thread_id", "thread_name", "os_thread_id", "active", "owns_gil")
    parts = ("name", "filename", "module", "short_filename", "line", "is_entry")
    return dump, {
        "pyspy_dumps": {
            "dump_id": [dump],
            "timestamp_us": [time.time_ns() // 1000],
            "pid": [found["pid"]],
            "binary": [found["binary"]],
            "proc_ref": [proc],
            "capture_mode": [found["capture_mode"]],
            "warnings_json": [json.dumps(found["warnings"])],
        },
        "pyspy_stack_traces": {
            "dump_id": [dump] * len(traces),
            **{name: [trace[name] for trace in traces] for name in names},
        },
        "pyspy_frames": {
            "dump_id": [dump] * len(frames),
            "thread_id": [thread for thread, _, _ in frames],
            "frame_depth": [depth for _, depth, _ in frames],
            **{name: [frame[name] for _, _, frame in frames] for name in parts},
        },
        "pyspy_local_variables": {
            "dump_id": [dump] * len(local),
            "thread_id": [thread for thread, _, _ in local],
            "frame_depth": [depth for _, depth, _ in local],
            **{name: [each[name] for _, _, each in local] for name in ("name", "addr", "arg")},
            "repr": [each.get("repr") for _, _, each in local],
        },
    }
