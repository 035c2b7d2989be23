"""``monarch status``, ``logs``, ``ps`` and ``gc``: how jobs are, and what is left of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from typing import IO, Any

__all__ = ["add_gc", "add_logs", "add_ps", "add_status"]

_PAUSE = 0.2  # seconds between two looks at a log
_CHUNK = 1 << 16


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch status``."""
    parser.epilog = """\
examples:
  monarch status               the job of the active context
  monarch status experiment    that of another

Shows since when the job runs, which scripts use it, and which of its hosts run. The exit status is
1 if there is no job or one of its hosts has ended.
"""
    parser.add_argument("context", nargs="?", help="default: the active context")
    parser.set_defaults(run=_status)


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch logs``."""
    parser.epilog = """\
examples:
  monarch logs                    the output of all hosts
  monarch logs -f --rank 0        of the first host, as it comes, until the host ends
  monarch logs --mesh trainers    of one mesh

The output is that of the hosts and of all processes on them. Hosts of other machines may keep it
there; the command then says where. Of a ProcessJob, the last 64 to 128 MiB of each host are kept.
"""
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more output")
    parser.add_argument("--mesh", metavar="NAME", help="only hosts of this mesh")
    parser.add_argument("--rank", metavar="N", type=int, help="only the host of this rank")
    parser.set_defaults(run=_logs)


def add_ps(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch ps``."""
    parser.epilog = """\
examples:
  monarch ps    all jobs of this user that have hosts or a keeper on this machine
"""
    parser.set_defaults(run=_ps)


def add_gc(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch gc``."""
    parser.epilog = """\
examples:
  monarch gc --dry-run    list what would be removed
  monarch gc              remove it

Removes directories, lock files and mounts whose processes were killed, and hosts whose job's
directory is lost, of this user only. What a living process uses is never touched: a job that still
runs is ended by `monarch kill`, in its directory. (Memory that processes share has no names: it is
freed with the last of them.)
"""
    parser.add_argument("--dry-run", action="store_true", help="list only")
    parser.set_defaults(run=_gc)


# -- the commands ------------------------------------------------------------------------------


def _saved(name: str | None) -> tuple[str, Any]:
    """Return the context and its running job. Raises FileNotFoundError if none runs."""
    from monarch.job import DEFAULT_JOB_PATH, job_load
    from monarch.job.current import active_context, state_file

    context = name or active_context()
    path = state_file(context)
    if not os.path.exists(path) and context == active_context():
        path = DEFAULT_JOB_PATH  # the file of a script, written before there were contexts
    try:
        job = job_load(path)
    except FileNotFoundError:
        job = None
    if job is None or not job.active:
        raise FileNotFoundError(f"context {context!r} has no running job")
    return context, job


def _status(options: argparse.Namespace) -> int:
    from monarch.job.users import users

    context, job = _saved(options.context)
    since = "" if job._since is None else f", since {_when(job._since)}"
    print(f"context {context}: {type(job).__name__} {job.apply_id}{since}")
    using = users(job._folder)
    for user in using:
        print(f"  used by {user}")
    if not using:
        print("  used by no script of this machine")
    states = job._host_states()
    for one in states:
        state = {True: "runs", False: "has ended", None: "unknown from here"}[one.healthy]
        print(f"  {one.mesh} {one.rank}: {one.name} {state}")
    if not states:
        print(f"  hosts: {'running' if job._is_running() else 'not running'}")
        return 0 if job._is_running() else 1
    return 1 if any(one.healthy is False for one in states) else 0


def _logs(options: argparse.Namespace) -> int:
    _, job = _saved(None)
    states = job._host_states()
    chosen = [
        one
        for one in states
        if (options.mesh in (None, one.mesh)) and (options.rank in (None, one.rank))
    ]
    if not chosen:
        known = ", ".join(f"{one.mesh} {one.rank}" for one in states)
        kind = type(job).__name__
        raise ValueError(
            f"there is no such host; there are: {known}"
            if known
            else f"the hosts of a {kind} keep no output that this command could find"
        )
    away = [one for one in chosen if not one.log]
    for one in away:
        where = one.elsewhere or "on that host"
        print(f"monarch: the output of {one.mesh} {one.rank} is {where}", file=sys.stderr)
    tails = [_Tail(one, len(chosen) > 1) for one in chosen if one.log]
    pause = threading.Event()
    while tails:
        ended = not any(one.healthy for one in job._host_states())  # before the last look
        for tail in tails:
            tail.show(last=ended or not options.follow)
        if ended or not options.follow:
            break
        pause.wait(_PAUSE)
    return 1 if away and not tails else 0


class _Tail:
    """Shows the output of a host as it grows, also after the log was rotated."""

    def __init__(self, host: Any, named: bool) -> None:
        from monarch.job.host_log import former

        self._path: str = host.log
        self._head = f"[{host.mesh} {host.rank}] " if named else ""
        self._at = 0
        self._rest = b""
        with contextlib.suppress(FileNotFoundError), open(former(self._path), "rb") as file:
            self._print(file, last=False)

    def show(self, *, last: bool) -> None:
        """Show what is new; with `last`, an unfinished line as well."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._at:  # emptied meanwhile
                self._at = 0
            file.seek(self._at)
            self._print(file, last=last)
            self._at = file.tell()

    def _print(self, file: IO[bytes], *, last: bool) -> None:
        while data := file.read(_CHUNK):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._write(line)
        if last and self._rest:
            self._write(self._rest)
            self._rest = b""
        sys.stdout.flush()

    def _write(self, line: bytes) -> None:
        sys.stdout.write(f"{self._head}{line.decode(errors='replace')}\n")


def _ps(_options: argparse.Namespace) -> int:
    from monarch.job.leftovers import job_folders

    jobs = job_folders()
    for job in jobs:
        pids = " ".join(str(process.pid) for process in job.hosts if process.alive) or "none here"
        print(f"{job.kind} job, since {_when(job.since)}, in {job.path}")
        print(f"  hosts: {pids}")
        for user in job.users:
            print(f"  used by {user}")
    if not jobs:
        print("No jobs.")
    return 0


def _gc(options: argparse.Namespace) -> int:
    from monarch.job.leftovers import leftovers, remove

    found = leftovers()
    failed = 0
    for one in found:
        if one.kept:
            print(f"monarch: {one.what} {one.path} is kept: {one.kept}", file=sys.stderr)
        elif options.dry_run:
            print(f"would remove {one.what} {one.path}")
        elif remove(one):
            print(f"removed {one.what} {one.path}")
        else:
            failed += 1
            print(f"monarch: cannot remove {one.what} {one.path}", file=sys.stderr)
    if all(one.kept for one in found):
        print("Nothing is left behind.")
    return 1 if failed else 0


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
