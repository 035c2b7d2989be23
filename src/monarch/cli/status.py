"""``monarch status``, ``ps`` and ``gc``: how jobs are, and what is left of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from monarch.cli.job_modules import find_modules_here

__all__ = ["add_gc", "add_ps", "add_status", "saved"]


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


def saved(name: str | None) -> tuple[str, Any]:
    """Return the context and its running job. Raises FileNotFoundError if none runs."""
    from monarch.job import DEFAULT_JOB_PATH, job_load
    from monarch.job.current import active_context, state_file

    find_modules_here()
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

    context, job = saved(options.context)
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
