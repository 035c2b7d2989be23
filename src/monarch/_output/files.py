"""The log files of a host: the output of its procs, as lines.

There are two kinds, and both are for the user only:

- `RunFiles`: two files for all procs of one run, ``/tmp/<user>/monarch_log_<hostname>__<run>`` with
  the endings ``.stdout`` and ``.stderr``, with lines ``[rank] text``. A folder that belongs to
  another user is not used.
- `open_proc_file`: a file for each proc, ``<log_dir>/<run>/<proc>.log``, with the lines of both
  streams as they arrive. Several hosts may share the folder.

A file that reaches its limit is renamed (``.1``, the one before ``.2``, and so on) and a new one is
begun, so a run takes a bounded part of the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
from urllib.parse import quote

__all__ = ["LogFile", "RunFiles", "log_folder", "open_proc_file"]

_NAMES = {1: "stdout", 2: "stderr"}
_KEPT = 3  # full files
_NEW = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


def log_folder() -> str:
    """Return the folder of this user's log files."""
    user = os.path.basename(os.environ.get("USER") or str(os.getuid()))
    return os.path.join("/tmp", user)  # noqa: S108 - checked before use; see RunFiles


class LogFile:
    """A file of lines that is rotated. If it fails, it is closed, with a warning.

    Args:
        path: of the file; its folder exists.
        limit: bytes at which a new file is begun; 0: none.
        exclusive: refuse a file that exists, by FileExistsError.
    """

    def __init__(self, path: str, limit: int, *, exclusive: bool = False) -> None:
        self.path = path
        self._limit = limit
        self._fd = os.open(path, _NEW | (os.O_EXCL if exclusive else 0), 0o600)
        self._size = os.fstat(self._fd).st_size

    def write(self, lines: list[str], head: str = "") -> None:
        """Append lines, each with `head` before it."""
        if self._fd < 0:
            return
        text = "".join(f"{head}{line}\n" for line in lines).encode("utf-8", "replace")
        try:
            _write_all(self._fd, text)
            self._size += len(text)
            if 0 < self._limit <= self._size:
                self._rotate()
        except OSError as error:
            self.close()
            sys.stderr.write(f"monarch: the log file {self.path} ends here: {error}\n")

    def close(self) -> None:
        """Close the file; what is written later is dropped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rotate(self) -> None:
        """Rename the full file, and those before it; begin a new one."""
        self.close()
        for number in range(_KEPT, 0, -1):
            before = self.path if number == 1 else f"{self.path}.{number - 1}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(before, f"{self.path}.{number}")
        self._fd = os.open(self.path, _NEW, 0o600)
        self._size = 0


class RunFiles:
    """The two files of a run, opened by their first lines."""

    def __init__(self, host: str, run: str, limit: int = 0) -> None:
        self._stem = f"monarch_log_{host}__{run}"
        self._limit = limit
        self._files: dict[int, LogFile | None] = {}

    def write(self, stream: int, rank: int | None, lines: list[str]) -> None:
        """Append lines of `rank` (None: not shown) to the file of standard stream 1 or 2."""
        if stream not in self._files:
            self._files[stream] = self._open(stream)
        file = self._files[stream]
        if file is not None:
            file.write(lines, "" if rank is None else f"[{rank}] ")

    def _open(self, stream: int) -> LogFile | None:
        folder = log_folder()
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            found = os.lstat(folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise PermissionError(f"{folder} is not a folder of this user")
            return LogFile(os.path.join(folder, f"{self._stem}.{_NAMES[stream]}"), self._limit)
        except OSError as error:
            sys.stderr.write(f"monarch: no log file for {_NAMES[stream]}: {error}\n")
            return None


def open_proc_file(folder: str, run: str, proc: str, limit: int) -> LogFile | None:
    """Begin the file of a proc; None, with a warning, if that is not possible.

    The proc that has the name of an earlier one of this run gets ``<proc>.2.log``, and so on.
    """
    try:
        os.makedirs(os.path.join(folder, run), mode=0o700, exist_ok=True)
        stem = os.path.join(folder, run, quote(proc, safe=" "))
        for number in itertools.count(1):
            path = f"{stem}.log" if number == 1 else f"{stem}.{number}.log"
            with contextlib.suppress(FileExistsError):
                return LogFile(path, limit, exclusive=True)
    except OSError as error:
        sys.stderr.write(f"monarch: no log file for {proc} in {folder}: {error}\n")
    return None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
