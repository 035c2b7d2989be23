"""The log files of a host: the output of its procs, one file per standard stream.

``/tmp/<user>/monarch_log_<hostname>__<run>.stdout`` and ``.stderr`` hold lines ``[rank] text`` of
all captured procs of one run, appended as they arrive. Only the user may read the files. A folder
that belongs to another user is not used.

A file that reaches its limit is renamed (``.1``, the one before ``.2``, and so on) and a new one is
begun, so a run takes a bounded part of the disk.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys

__all__ = ["LogFiles", "log_folder"]

_NAMES = {1: "stdout", 2: "stderr"}
_KEPT = 3  # full files


def log_folder() -> str:
    """Return the folder of this user's log files."""
    user = os.path.basename(os.environ.get("USER") or str(os.getuid()))
    return os.path.join("/tmp", user)  # noqa: S108 - checked before use; see _open


class LogFiles:
    """The two files, opened by their first lines. A file that fails is closed, with a warning."""

    def __init__(self, host: str, run: str, limit: int = 0) -> None:
        self._stem = f"monarch_log_{host}__{run}"
        self._limit = limit
        self._fds: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def write(self, stream: int, rank: int | None, lines: list[str]) -> None:
        """Append lines of `rank` (None: not shown) to the file of standard stream 1 or 2."""
        try:
            fd = self._fds.get(stream)
            if fd is None:
                fd = self._fds[stream] = self._open(stream)
            if fd >= 0:
                head = "" if rank is None else f"[{rank}] "
                text = "".join(f"{head}{line}\n" for line in lines).encode("utf-8", "replace")
                _write_all(fd, text)
                size = self._sizes.get(stream)
                size = os.fstat(fd).st_size if size is None else size + len(text)
                self._sizes[stream] = size
                if 0 < self._limit <= size:
                    self._rotate(stream)
        except OSError as error:
            self._fds[stream] = -1
            sys.stderr.write(f"monarch: no log file for {_NAMES[stream]}: {error}\n")

    def _rotate(self, stream: int) -> None:
        """Rename a full file, and those before it; the next line begins a new one."""
        os.close(self._fds.pop(stream))
        del self._sizes[stream]
        path = self._path(stream)
        for number in range(_KEPT, 0, -1):
            before = path if number == 1 else f"{path}.{number - 1}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(before, f"{path}.{number}")

    def _path(self, stream: int) -> str:
        return os.path.join(log_folder(), f"{self._stem}.{_NAMES[stream]}")

    def _open(self, stream: int) -> int:
        folder = log_folder()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{folder} is not a folder of this user")
        return os.open(
            self._path(stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
        )


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
