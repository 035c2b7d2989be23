"""Where processes of the runtime import from: never from the working directory before the rest.

Python puts the working directory first in the path of ``python -c`` and ``python -m``. A file there
that is called like a module of the standard library would be imported by the host agent: a
``queue.py`` of an unsuspecting user ends it, and in a directory of another user, such as ``/tmp``,
a ``json.py`` is that user's code. So what runs here takes the empty entry off before it imports
anything. (Python 3.11 has ``-P`` for that. ``-I`` would ignore ``PYTHONPATH`` as well.)

Procs run user code, so they have the path of the script, where its directory is first if it is a
file. The working directory comes last, for programs that count on it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

__all__ = ["WITHOUT_CWD", "python_command", "with_folder", "working_directory"]

WITHOUT_CWD = "import sys; sys.path[:] = filter(None, sys.path); "
"""What code for ``python -c`` begins with."""

_ROOT = os.path.abspath(__file__).rsplit(os.sep, 4)[0]  # where this package is


def python_command(python: str, code: str, path: Iterable[str] | None = None) -> list[str]:
    """The command with which `python` runs `code`, which may import this package.

    `path` is the path that it has (without empty entries) if not its own.
    """
    if path is None:
        first = f"{WITHOUT_CWD}sys.path.insert(0, {_ROOT!r}); "
    else:
        first = f"import sys; sys.path[:] = {[_ROOT, *filter(None, path)]!r}; "
    return [python, "-c", first + code]


def with_folder(path: list[str], folder: str) -> list[str]:
    """`path` with a working directory at its end, unless any user may write there.

    Raises OSError if there is no such directory.
    """
    status = os.stat(folder)
    trusted = status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o002
    return [*path, folder] if trusted and folder not in path else path


def working_directory() -> str:
    """That of this process. Raises FileNotFoundError, with the remedy, if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        text = (
            "No such file or directory: the working directory was removed, and processes are to "
            "start in it: change to another"
        )
        raise FileNotFoundError(errno.ENOENT, text) from error
