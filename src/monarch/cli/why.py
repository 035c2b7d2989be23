"""``monarch why``: which actor of a running script is busy in which line, and which waits."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Generator
from typing import Any

from monarch.cli.script_pid import add_pid

__all__ = ["add_why", "chosen", "command_of", "diagnosis_of", "unreachable"]

_PATIENCE = 8.0  # seconds


def add_why(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_pid(parser, "the script; needed if several run here")
    parser.add_argument("--json", action="store_true", help="print the data, for programs")
    parser.add_argument(
        "--native",
        action="store_true",
        help="also the native stacks of processes here that do not answer (needs py-spy)",
    )
    parser.epilog = """\
The command is run on the machine of the script, by its user or root. The script need not have
been started in a special way, and goes on undisturbed.

examples:
  monarch why          the one script of this user on this machine
  monarch why 4242     the script with this pid
  sudo monarch why --native    where native code is stuck; py-spy needs the right to trace
  monarch why --json | jq '.processes[] | select(.state == "T")'
"""
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch._diagnosis.diagnosis import Diagnosis

    found = diagnosis_of(chosen(options.pid))
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print(Diagnosis.from_dict(found))
    if options.native:
        from monarch._diagnosis.native import native_stacks

        for text in native_stacks(found):
            print(text)
    return 0


def chosen(pid: int | None, command: str = "why") -> int:
    """Return the script that a command is about; RuntimeError if that is not clear.

    Without `pid`: the only script, or the only one that uses the job of this directory.
    """
    return pid if pid is not None else _only(command)


def diagnosis_of(pid: int) -> dict[str, Any]:
    """Return the diagnosis of a script of this machine, as data; RuntimeError says why not."""
    from monarch._diagnosis.door import ask_script

    with unreachable(pid):
        data = ask_script(pid, _PATIENCE)
    if not data:
        raise RuntimeError(f"the script with pid {pid} refuses: it belongs to another user, or "
                           "four diagnoses are under way")  # fmt: skip
    found: dict[str, Any] = json.loads(data)
    return found


@contextlib.contextmanager
def unreachable(pid: int) -> Generator[None, None, None]:
    """Raise RuntimeError with the reason if the script cannot be reached inside."""
    try:
        yield
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise RuntimeError(
            f"process {pid} is no script that uses processes of this library now"
        ) from error
    except TimeoutError as error:
        raise RuntimeError(_silent(pid)) from error


def _only(command: str) -> int:
    from monarch._diagnosis.door import running_scripts
    from monarch.cli.observed import job_users

    if sys.platform != "linux":
        raise RuntimeError("this command needs Linux; call monarch.diagnose() in the script")
    pids = running_scripts()
    if not pids:
        raise RuntimeError("no script of this user runs processes of this library here")
    if len(pids) > 1:
        ours = sorted(job_users().intersection(pids))
        if len(ours) == 1:
            return ours[0]
        rows = "\n".join(f"  monarch {command} {pid}    {command_of(pid)}" for pid in pids)
        raise RuntimeError(f"several scripts run here; name one:\n{rows}")
    return pids[0]


def command_of(pid: int) -> str:
    """Return the command of a process, for people."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return "(it has ended)"
    return b" ".join(words).decode(errors="replace").strip()[:100]


def _silent(pid: int) -> str:
    from monarch._diagnosis.kernel import state_of

    state = state_of(pid)[0]
    if state in ("T", "t"):
        return f"the script itself is stopped (state {state}); continue it with: kill -CONT {pid}"
    return (
        f"the script with pid {pid} does not answer (state {state}): native code holds its "
        f"interpreter, or it lacks processor time; see: py-spy dump --pid {pid}"
    )
