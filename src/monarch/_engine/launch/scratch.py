"""The scratch directory of a proc: what multiprocessing keeps in files there goes with the proc.

multiprocessing makes a directory for its sockets when it first needs one, and removes it in an exit
handler, so a proc that is killed leaves it behind. Here the directory has a name that the launcher
knows, and removes once the proc and what it started are gone (`Children.debris`). Most procs never
make it, so that it costs one look at the end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["give_multiprocessing", "install", "remove_scratch", "scratch_path"]

_path = ""


def scratch_path(environ: Mapping[str, str], uid: int) -> str:
    """The scratch directory of proc `uid`, which is to be started in `environ`."""
    parent = environ.get("TMPDIR") or "/tmp"  # noqa: S108 - no name there can be guessed: `uid`
    return os.path.join(parent, f"monarch-{uid:x}")


def remove_scratch(path: str) -> None:
    """Remove that directory, if there is one, as far as it can be removed."""
    # Not `shutil`: with what it imports, every fork of a launcher would copy a fifth more.
    if not os.path.lexists(path):
        return
    for folder, folders, files in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):
            for name in (*files, *folders):
                if os.path.islink(entry := os.path.join(folder, name)) or name in files:
                    os.unlink(entry)
            os.rmdir(folder)


class _Config(dict[str, Any]):
    """What multiprocessing knows of this process, its temporary directory among others."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == "tempdir" and key not in self and _path:
            with contextlib.suppress(OSError):  # then multiprocessing finds a place by itself
                os.makedirs(_path, 0o700, exist_ok=True)  # a fork of the proc may have been first
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
