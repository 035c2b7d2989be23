"""``monarch why``: which actor of a running script is busy in which line, and which waits."""

from __future__ import annotations

import argparse
import json
import sys

__all__ = ["add_why"]

_PATIENCE = 8.0  # seconds


def add_why(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("pid", nargs="?", type=int, help="the script; needed if several run here")
    parser.add_argument("--json", action="store_true", help="print the data, for programs")
    parser.epilog = """\
The command is run on the machine of the script, by its user or root. The script need not have
been started in a special way, and goes on undisturbed.

examples:
  monarch why          the one script of this user on this machine
  monarch why 4242     the script with this pid
  monarch why --json | jq '.processes[] | select(.state == "T")'
"""
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from monarch._diagnosis.diagnosis import Diagnosis
    from monarch._diagnosis.door import ask_script

    pid = options.pid if options.pid is not None else _only()
    try:
        data = ask_script(pid, _PATIENCE)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise RuntimeError(
            f"process {pid} is no script that uses processes of this library now"
        ) from error
    except TimeoutError as error:
        raise RuntimeError(_silent(pid)) from error
    if not data:
        raise RuntimeError(f"the script with pid {pid} refuses: it belongs to another user, or "
                           "four diagnoses are under way")  # fmt: skip
    found = json.loads(data)
    print(json.dumps(found, indent=1) if options.json else Diagnosis.from_dict(found))
    return 0


def _only() -> int:
    from monarch._diagnosis.door import running_scripts

    if sys.platform != "linux":
        raise RuntimeError("this command needs Linux; call monarch.diagnose() in the script")
    pids = running_scripts()
    if not pids:
        raise RuntimeError("no script of this user runs processes of this library here")
    if len(pids) > 1:
        rows = "\n".join(f"  monarch why {pid}    {_command(pid)}" for pid in pids)
        raise RuntimeError(f"several scripts run here; name one:\n{rows}")
    return pids[0]


def _command(pid: int) -> str:
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
