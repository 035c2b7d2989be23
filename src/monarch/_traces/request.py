"""The command's side of a CPU profile: it asks a script, waits, and adds up what the processes saw.

With native frames the profile is taken by py-spy, which reads the memory of the processes of this
machine, and needs the right to trace them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from monarch._diagnosis.door import knock
from monarch._traces.sampler import Options
from monarch._traces.session import HEADER
from monarch._traces.stack_formats import parse_collapsed
from monarch._traces.stacks import Profile

__all__ = ["Selection", "cpu_profile", "native_profile", "torch_traces"]

_STARTING = 20.0  # seconds for the processes to start their samplers
_FETCHING = 320.0  # seconds for each answer, once the time is over
_MOST = 16  # processes that py-spy looks at
_STACKS = 1 << 28  # bytes of one answer


class Selection(NamedTuple):
    """Which processes are meant: those with an actor of this mesh, or of a process mesh; ranks."""

    mesh: str | None = None
    ranks: Sequence[int] | None = None


def cpu_profile(
    pid: int, options: Options, which: Selection, wait: Callable[[int, float], bool]
) -> Profile:
    """Return a profile of the script with this pid, and of its processes.

    Args:
        pid: the script.
        options: how it is sampled.
        which: which processes are.
        wait: called with the number of processes and the seconds once the profile runs. It returns
            when these are over; or earlier, with False, to end the profile then.

    Raises RuntimeError if no process can be sampled, with the reason; and as `ask_script` if the
    script cannot be reached.
    """
    profile = Profile("wall" if options.wall else "CPU")
    with _begun(pid, "stacks", options, which, wait, profile.notes) as sock:
        while answer := _message(sock):
            if "fault" in answer:
                profile.notes.append(f"{answer['fault']}; it is not in the profile")
            elif "error" in answer:
                profile.failures.append(_failure(answer, "it is not in the profile"))
            else:
                profile.add(answer)
    return profile


def torch_traces(
    pid: int, seconds: float, which: Selection, folder: str, wait: Callable[[int, float], bool]
) -> tuple[list[str], list[str], list[str]]:
    """Record what processes compute, by torch's profiler; return the paths, notes and failures.

    Args:
        pid: the script.
        seconds: for how long.
        which: which processes are recorded, of those that have imported torch.
        folder: where the files ``trace_<rank>.json`` are written; it is made if it is missing.
        wait: as for `cpu_profile`, with the same errors.
    """
    notes: list[str] = []
    paths: list[str] = []
    failures: list[str] = []
    with _begun(pid, "torch", Options(seconds), which, wait, notes) as sock:
        while answer := _message(sock):
            if "fault" in answer:
                notes.append(f"{answer['fault']}; there is no trace of it")
                continue
            if "error" in answer:
                failures.append(_failure(answer, "there is no trace of it"))
                continue
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"trace_{answer['rank']}.json")
            if os.path.exists(path):  # another mesh has this rank, too
                name = f"trace_{answer['mesh'] or answer['label']}_{answer['rank']}"
                path = os.path.join(folder, f"{name}_{answer['pid']}.json")
            left = int(answer["size"])
            with open(path, "xb") as file:
                while left:
                    data = sock.recv(min(1 << 20, left))
                    if not data:
                        raise RuntimeError(f"the script has ended; {path} is incomplete")
                    file.write(data)
                    left -= len(data)
            paths.append(path)
    return paths, notes, failures


@contextlib.contextmanager
def _begun(
    pid: int,
    kind: str,
    options: Options,
    which: Selection,
    wait: Callable[[int, float], bool],
    notes: list[str],
) -> Generator[socket.socket, None, None]:
    """Ask for a profile and wait for its time; yield the connection on which the results come."""
    request = {
        "ask": "profile",
        "kind": kind,
        "options": list(options),
        "mesh": which.mesh,
        "ranks": which.ranks,
    }
    with knock(pid, request, _STARTING) as sock:
        began = _message(sock)
        notes += _absent(began)
        if not began["joined"]:
            raise RuntimeError(_why_none(began, which))
        if not wait(began["joined"], options.seconds):
            sock.sendall(b"stop\n")
        sock.settimeout(_FETCHING)
        yield sock


def _failure(answer: dict[str, Any], missing: str) -> str:
    process = f"{answer['label']} (pid {answer['pid']} on {answer['machine']})"
    return f"{process}: {answer['error']}; {missing}"


def _message(sock: socket.socket) -> dict[str, Any]:
    size = HEADER.unpack(_exactly(sock, HEADER.size))[0]
    if size > _STACKS:
        raise RuntimeError(f"the script sends an answer of {size} bytes")
    found: dict[str, Any] = json.loads(_exactly(sock, size))
    return found


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(1 << 20, size - len(data)))
        if not chunk:
            raise RuntimeError(
                "the script has ended, or refuses: it belongs to another user, or four commands "
                "ask it already"
            )
        data += chunk
    return bytes(data)


def _absent(began: dict[str, Any]) -> list[str]:
    notes = [f"{name} does not answer, and is not in the profile" for name in began["silent"]]
    notes += [
        f"host {name} does not answer, and is not in the profile" for name in began["missing"]
    ]
    return notes


def _why_none(began: dict[str, Any], which: Selection) -> str:
    if began["refused"]:
        return f"{'; '.join(began['refused'])}: one profile of a script is taken at a time"
    if began["lacks"]:
        return f"no such process has imported {', '.join(began['lacks'])}"
    if began["meshes"]:
        ranks = "" if which.ranks is None else f" with rank {', '.join(map(str, which.ranks))}"
        wanted = "a process" if which.mesh is None else f"a process of {which.mesh}"
        return f"there is no {wanted.removeprefix('a ')}{ranks}; the meshes are " + ", ".join(
            began["meshes"]
        )
    return "; ".join(_absent(began)) or "no process can be sampled"


def native_profile(
    pids: Sequence[int], options: Options, wait: Callable[[int, float], bool]
) -> Profile:
    """Return a profile of processes of this machine, with native frames, by py-spy.

    The arguments are those of `cpu_profile`. Raises RuntimeError without py-spy, or if it may not
    trace any of the processes.
    """
    program = _py_spy()
    profile = Profile("wall" if options.wall else "CPU")
    if len(pids) > _MOST:
        profile.notes.append(f"{len(pids) - _MOST} further processes are left out")
    with tempfile.TemporaryDirectory(prefix="monarch-profile-") as folder:
        running = [
            (pid, _record(program, pid, options, os.path.join(folder, str(pid))))
            for pid in pids[:_MOST]
        ]
        try:
            if not wait(len(running), options.seconds):
                for _, process in running:
                    process.send_signal(2)  # SIGINT: it writes what it has
            for pid, process in running:
                _collect(profile, pid, process, os.path.join(folder, str(pid)), options)
        finally:
            for _, process in running:
                if process.poll() is None:
                    process.kill()
                process.communicate()
    profile.seconds = options.seconds
    if not profile.count:
        raise RuntimeError("; ".join(profile.notes) or "there are no processes on this machine")
    return profile


def _py_spy() -> str:
    beside = os.path.dirname(sys.executable)
    found = shutil.which("py-spy") or shutil.which("py-spy", path=beside)
    if found is None:
        raise RuntimeError("--native needs py-spy: pip install 'pymonarch[native]'")
    return found


def _record(program: str, pid: int, options: Options, path: str) -> subprocess.Popen[str]:
    seconds = max(1, round(options.seconds))
    command = [
        program,
        "record",
        "--native",
        "--pid",
        str(pid),
        "--format",
        "raw",
        "--output",
        path,
    ]
    command += ["--duration", str(seconds), "--rate", str(options.rate)]
    command += ["--idle"] if options.wall else []
    command += [] if options.lines else ["--function"]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is the command's
    )


def _collect(
    profile: Profile, pid: int, process: subprocess.Popen[str], path: str, options: Options
) -> None:
    said, _ = process.communicate(timeout=options.seconds + _FETCHING)
    if process.returncode or not os.path.exists(path):
        lines = [line for line in said.splitlines() if line.strip()] or ["it gave no reason"]
        reason = next((line for line in lines if "ermission" in line), lines[-1]).strip()
        profile.notes.append(f"py-spy could not trace process {pid}: {reason}")
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        profile.add_stacks(f"process {pid}", parse_collapsed(file.read(), 1e9 / options.rate))
