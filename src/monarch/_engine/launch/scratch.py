"""The scratch directory of a proc: what multiprocessing keeps in files there goes with the proc.

multiprocessing makes a directory for its sockets when it first needs one, and removes it in an exit
handler, so a proc that is killed leaves it behind. Here the directory has a name that the launcher
knows, and removes once the proc and what it started are gone (`Children.debris`). Most procs never
make it, so that it costs one look at the end.

The directories of an agent's procs are in one of the agent's own (`ScratchFolder`, see
`own_folder`), of which it holds the lock as long as it lives. A stale one was left by an agent
that was killed together with its launchers, and the user's next agent removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

from monarch._engine.launch.own_folder import enter, make, remove, remove_content, remove_stale

__all__ = ["ScratchFolder", "give_multiprocessing", "install", "remove_if_empty", "remove_scratch"]

_PREFIX = "monarch-scratch-"

_path = ""


class ScratchFolder:
    """Where an agent's procs have their scratch directories; see the module."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[str, int]] = {}  # parent -> path and locked descriptor
        self._number = itertools.count(1)

    def new(self, environ: Mapping[str, str], cwd: str) -> str:
        """A path for a proc that is to be started in `environ`; empty if there can be none."""
        parent = os.path.join(cwd, environ.get("TMPDIR") or "/tmp")  # noqa: S108 - see the module
        if parent not in self._folders:
            self._folders[parent] = "", -1
            with contextlib.suppress(OSError):  # then multiprocessing finds a place by itself
                remove_stale(_PREFIX, parent, str.isdecimal)
                self._folders[parent] = make(_PREFIX, parent)
        path, _ = self._folders[parent]
        return os.path.join(path, str(next(self._number))) if path else ""

    def remove(self) -> None:
        """Remove it, when all procs have ended."""
        for path, fd in self._folders.values():
            if path:
                remove_content(path, fd, str.isdecimal)
                os.close(fd)
        self._folders.clear()


def remove_scratch(path: str) -> None:
    """Remove that directory, if there is one, as far as it can be removed."""
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
    """Remove the directory of an agent that has ended, unless something is left there."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)


class _Config(dict[str, Any]):
    """What multiprocessing knows of this process, its temporary directory among others."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == "tempdir" and key not in self and _path:
            folder, name = os.path.split(_path)
            with contextlib.suppress(OSError):  # then multiprocessing finds a place by itself
                fd = enter(folder)
                try:
                    with contextlib.suppress(FileExistsError):  # a fork of the proc was first
                        os.mkdir(name, 0o700, dir_fd=fd)
                finally:
                    os.close(fd)
                self[key] = _path
        return super().get(key, default)

    def copy(self) -> dict[str, Any]:
        """For a child process, which is to have its files in the same place."""
        return {**self, "tempdir": self.get("tempdir")}


def install() -> None:
    """Have multiprocessing ask us for a directory, in this process and those forked from it."""
    process: Any = multiprocessing.current_process()
    process._config = _Config(process._config)


def give_multiprocessing(path: str) -> None:
    """The directory of this process, once `install` was called here or in its parent."""
    global _path
    _path = path
