"""The scratch directory of a proc, where multiprocessing keeps files; removed after the proc exits.

multiprocessing makes a directory for its sockets when it first needs one, and removes it in an exit
handler. A killed proc would leave the directory behind. So the launcher chooses the name of the
directory, and removes the directory once the proc and all that it started have exited
(`Children.debris`). Most procs never make one; for them the removal costs one look-up.

The scratch directories of an agent's procs are inside a directory of the agent (`ScratchFolder`,
see `own_folder`), whose lock the agent holds while it runs. A stale one was left by an agent that
was killed together with its launchers; the user's next agent removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from typing import Any

from monarch._engine.launch.own_folder import enter, make, remove, remove_content, remove_stale

__all__ = ["ScratchFolder", "give_multiprocessing", "install", "remove_if_empty", "remove_scratch"]

_PREFIX = "monarch-scratch-"

_path = ""


class ScratchFolder:
    """The directory that holds the scratch directories of an agent's procs; see the module."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[str, int]] = {}  # parent -> path and locked descriptor
        self._number = itertools.count(1)

    def new(self, environ: Mapping[str, str], cwd: str) -> str:
        """Return a new path for a proc that will run in `environ`; empty if none can be made.

        `cwd` is the proc's working directory. The path itself is not created yet.
        """
        parent = os.path.join(cwd, environ.get("TMPDIR") or "/tmp")  # noqa: S108 - see the module
        if parent not in self._folders:
            self._folders[parent] = "", -1
            with contextlib.suppress(OSError):  # multiprocessing then chooses a directory itself
                remove_stale(_PREFIX, parent, str.isdecimal)
                self._folders[parent] = make(_PREFIX, parent)
        path, _ = self._folders[parent]
        return os.path.join(path, str(next(self._number))) if path else ""

    def remove(self) -> None:
        """Remove the directory; to be called when all procs have exited."""
        for path, fd in self._folders.values():
            if path:
                remove_content(path, fd, str.isdecimal)
                os.close(fd)
        self._folders.clear()


def remove_scratch(path: str) -> None:
    """Remove the scratch directory at `path`, if it exists, as far as it can be removed."""
    if not os.path.lexists(path):
        return
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):
        fd = enter(folder)
        try:
            remove(fd, name)
        finally:
            os.close(fd)


def remove_if_empty(folder: str) -> None:
    """Remove the directory of an agent that has exited, unless something is left in it."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)


class _Config(dict[str, Any]):
    """multiprocessing's settings of this process; makes the temporary directory on demand."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == "tempdir" and key not in self and _path:
            folder, name = os.path.split(_path)
            with contextlib.suppress(OSError):  # multiprocessing then chooses a directory itself
                fd = enter(folder)
                try:
                    with contextlib.suppress(FileExistsError):  # a forked child has made it
                        os.mkdir(name, 0o700, dir_fd=fd)
                finally:
                    os.close(fd)
                self[key] = _path
        return super().get(key, default)

    def copy(self) -> dict[str, Any]:
        """Return a copy for a child process, which is to use the same directory."""
        return {**self, "tempdir": self.get("tempdir")}


def install() -> None:
    """Have multiprocessing get its directory from here, in this process and in forks of it."""
    import multiprocessing  # the agent, which needs this module as well, never does

    process: Any = multiprocessing.current_process()
    process._config = _Config(process._config)


def give_multiprocessing(path: str) -> None:
    """Set the scratch directory of this process; needs `install`, here or in the parent."""
    global _path
    _path = path
