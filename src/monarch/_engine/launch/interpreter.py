"""The import path of the runtime's processes: the working directory is never searched first.

Python puts the working directory first in the path of ``python -c`` and ``python -m``. The host
agent would then import files there that are named like modules of the standard library. A user's
own ``queue.py`` would crash the agent; a ``json.py`` in a directory of another user, such as
``/tmp``, would be that user's code. So commands made here have the option ``-P``, which Python 3.11
introduced. For Python 3.10 their code removes the empty entry of the path before it imports
anything. (That alone does not suffice: Python 3.13 imports `linecache` before it runs the code of
``-c``. ``-I`` was rejected, since it ignores ``PYTHONPATH`` as well.)

A Python on another machine may be of any version, and an old one refuses ``-P``. So `ANY_PYTHON`
sets a variable, which an old one ignores, and `FROM_ANY_PYTHON` removes the variable.

Procs run user code, so they have the path of the script; if the script is a file, its directory is
first. The working directory is last, for programs that rely on it. On another host the interpreter
may be elsewhere, so `on_host` puts what the script has before its installation before that of the
host: the same modules win as in the script.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
from collections.abc import Iterable

__all__ = [
    "ANY_PYTHON",
    "FROM_ANY_PYTHON",
    "SAFE_PATH",
    "WITHOUT_CWD",
    "on_host",
    "python_command",
    "with_folder",
    "working_directory",
]

SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
"""The option of this Python that keeps the working directory out of the path, if there is one."""

WITHOUT_CWD = "import sys; sys.path[:] = filter(None, sys.path); "
"""The first statements of code for ``python -c``: remove the working directory from the path."""

ANY_PYTHON = ("env", "PYTHONSAFEPATH=1")
"""The words before the command of a Python that may be of another version."""

FROM_ANY_PYTHON = f"import os; os.environ.pop('PYTHONSAFEPATH', None); {WITHOUT_CWD}"
"""The first statements of code for such a Python."""

_ROOT = os.path.abspath(__file__).rsplit(os.sep, 4)[0]  # where this package is


def python_command(python: str, code: str, path: Iterable[str] | None = None) -> list[str]:
    """Return the command that runs `code` in the interpreter `python`; it can import this package.

    `path` replaces the interpreter's own path; empty entries are left out.
    """
    if path is None:
        first = f"{WITHOUT_CWD}sys.path.insert(0, {_ROOT!r}); "
    else:
        first = f"import sys; sys.path[:] = {[_ROOT, *filter(None, path)]!r}; "
    return [python, *SAFE_PATH, "-c", first + code]


def on_host(own: list[str], script: list[str]) -> list[str]:
    """Return the path of a process on a host.

    Args:
        own: the path of the host's worker.
        script: the path of the script, on a machine that may be another one.

    Directories that the script searches before the files of its Python come first, unless every
    user of this host may write to them. All others of the script come last.
    """
    before = itertools.takewhile(lambda entry: not _INSTALLED.search(entry), script)
    first = [entry for entry in before if _is_trusted(entry)]
    found = dict.fromkeys([*first, *own, *script])
    return list(found)


_INSTALLED = re.compile(r"[/\\](python\d+\.zip|python\d+\.\d+|(site|dist)-packages)$")


def _is_trusted(entry: str) -> bool:
    """Whether code there is this user's, or root's; also for a file, such as a zip."""
    try:
        status = os.stat(entry)
    except OSError:
        return False
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o002


def with_folder(path: list[str], folder: str) -> list[str]:
    """Return `path` with the working directory `folder` appended, if it can be trusted.

    A trusted directory belongs to this user or to root, and not every user may write to it.
    Otherwise, and if `folder` is in `path` already, return `path`. Raises OSError if there is no
    such directory.
    """
    os.stat(folder)
    return [*path, folder] if _is_trusted(folder) and folder not in path else path


def working_directory() -> str:
    """Return this process's working directory.

    Raises FileNotFoundError, with the remedy, if the directory was removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        text = (
            "No such file or directory: the working directory of this process was removed, and new "
            "processes start in it; change to another one with os.chdir()"
        )
        raise FileNotFoundError(errno.ENOENT, text) from error
