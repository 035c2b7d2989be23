"""``monarch logs``: the output of a job's hosts, and of each process on them, also as it grows."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote

from monarch.cli.status import saved

if TYPE_CHECKING:
    from monarch.job import JobTrait

__all__ = ["add_logs"]

_CHUNK = 1 << 20
_PAUSE = 0.2  # seconds between two looks at a growing log
_FILE = re.compile(r"(?P<proc>.*-(?P<rank>\d+))(\.\d+)?\.log")


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = """\
examples:
  monarch logs                             the output of all hosts
  monarch logs --mesh trainers --host 1    of the second host of a mesh
  monarch logs -f --rank 3                 of the processes with rank 3, as it comes
  monarch logs --proc workers              of all processes of the mesh "workers"
  monarch logs --dir runs --rank 3         of a script that ran with MONARCH_LOG_DIR=runs

The output of a host is that of all processes on it. Hosts of other machines may keep it there; the
command then says where. Of a ProcessJob, the last 64 to 128 MiB of each host are kept.

With --rank and --proc it is that of single processes, of the last script that had some. They are
files too, one for each process, in a directory of the job or in the one that the setting `log_dir`
(MONARCH_LOG_DIR) names: DIRECTORY/SCRIPT/PROCESS.log. With -f the command ends with the job; with
--dir it ends at Ctrl-C.
"""
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more output")
    parser.add_argument("--mesh", metavar="NAME", help="only hosts of this mesh")
    parser.add_argument("--host", metavar="N", type=int, help="only the host of this rank")
    parser.add_argument("--rank", metavar="N", type=int, help="only processes of this rank")
    parser.add_argument("--proc", metavar="NAME", help="only processes of the mesh of this name")
    parser.add_argument("--dir", metavar="DIRECTORY", help="read the files of this log_dir")
    parser.set_defaults(run=_logs)


def _logs(options: argparse.Namespace) -> int:
    of_procs = (options.rank, options.proc, options.dir) != (None, None, None)
    if of_procs and (options.mesh, options.host) != (None, None):
        raise ValueError(
            "--mesh and --host choose hosts, --rank, --proc and --dir processes; give one kind"
        )
    return _show_procs(options) if of_procs else _show_hosts(options)


def _show_hosts(options: argparse.Namespace) -> int:
    _, job = saved(None)
    states = job._host_states()
    chosen = [
        one
        for one in states
        if (options.mesh in (None, one.mesh)) and (options.host in (None, one.rank))
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
    shown = [
        (one.log, f"[{one.mesh} {one.rank}] " if len(chosen) > 1 else "")
        for one in chosen
        if one.log
    ]
    if shown:
        _show(lambda: shown, job, options.follow)
    return 1 if away and not shown else 0


def _show_procs(options: argparse.Namespace) -> int:
    if options.dir is None:
        _, job = saved(None)
        folder = job._proc_logs()
        if not folder:
            raise ValueError(
                f"the hosts of a {type(job).__name__} keep no files of single processes; start the "
                "job with MONARCH_LOG_DIR=DIRECTORY, which all its hosts share, and add --dir"
            )
    else:
        folder, job = options.dir, None

    def logs() -> list[tuple[str, str]]:
        found = _files(folder, options.rank, options.proc)
        return [(path, f"[{proc}] " if len(found) > 1 else "") for path, proc in found]

    if not _show(logs, job, options.follow):
        raise ValueError(_missing(folder, options))
    return 0


def _show(logs: Callable[[], list[tuple[str, str]]], job: JobTrait | None, follow: bool) -> bool:
    """Show logs, each a path and the head of its lines; with `follow` until the job has ended.

    Return whether there were any.
    """
    pause = threading.Event()
    tails: dict[str, _Tail] = {}
    with contextlib.ExitStack() as stack:
        while True:
            ended = job is not None and not any(one.healthy for one in job._host_states())
            last = ended or not follow  # decided before the last look
            for path, head in logs():
                if path not in tails:
                    tails[path] = _Tail(path, head)
                    stack.callback(tails[path].close)
                tails[path].show(last=last)
            if last:
                return bool(tails)
            pause.wait(_PAUSE)


def _files(folder: str, rank: int | None, mesh: str | None) -> list[tuple[str, str]]:
    """Return the path of each chosen process of the last run that has one, and its name."""
    for run in sorted(_listed(folder), reverse=True):
        found: list[tuple[str, str]] = []
        for name in sorted(_listed(os.path.join(folder, run))):
            match = _FILE.fullmatch(name)
            if match is None:
                continue
            proc = unquote(match["proc"])
            ours = mesh in (None, proc.rpartition("-")[0], proc)
            if ours and rank in (None, int(match["rank"])):
                found.append((os.path.join(folder, run, name), proc))
        if found:
            return found
    return []


def _listed(folder: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def _missing(folder: str, options: argparse.Namespace) -> str:
    everything = sorted({proc for _, proc in _files(folder, None, None)})
    if not everything:
        return (
            f"there is no output of processes in {folder}; it is kept of processes that a script "
            "spawns on the job's hosts, or with the setting log_dir"
        )
    known = ", ".join(everything[:20]) + (", ..." if len(everything) > 20 else "")
    wanted = " of ".join(
        part
        for part in (
            "" if options.rank is None else f"rank {options.rank}",
            "" if options.proc is None else f"{options.proc!r}",
        )
        if part
    )
    return f"the last script has no process {wanted}; it has: {known}"


class _Tail:
    """Shows a log as it grows, from its former part on, also when it is rotated meanwhile."""

    def __init__(self, path: str, head: str) -> None:
        from monarch.job.host_log import former

        self._path = path
        self._head = head
        self._rest = b""
        self._file: IO[bytes] | None = None
        with contextlib.suppress(FileNotFoundError), open(former(path), "rb") as file:
            self._print(file)

    def show(self, *, last: bool) -> None:
        """Show what is new; with `last`, an unfinished line as well."""
        if self._file is not None:
            self._print(self._file)
        with contextlib.suppress(FileNotFoundError):
            if self._file is None or _is_other(self._file, self._path):
                if self._file is not None:
                    self._print(self._file)  # what came between the last look and the change
                    self._file.close()
                self._file = open(self._path, "rb")  # noqa: SIM115 - stays open until the next one
                self._print(self._file)
        if last and self._rest:
            self._write(self._rest)
            self._rest = b""
        sys.stdout.flush()

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            self._file.close()

    def _print(self, file: IO[bytes]) -> None:
        if os.fstat(file.fileno()).st_size < file.tell():  # emptied meanwhile
            file.seek(0)
        while data := file.read(_CHUNK):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._write(line)

    def _write(self, line: bytes) -> None:
        sys.stdout.write(f"{self._head}{line.decode(errors='replace')}\n")


def _is_other(file: IO[bytes], path: str) -> bool:
    """Whether the path is another file by now."""
    return not os.path.samestat(os.fstat(file.fileno()), os.stat(path))
