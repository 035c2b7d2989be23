"""Run a script or a module of the user as ``__main__`` in this process."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Generator, Sequence

__all__ = ["run_script"]


def run_script(arguments: Sequence[str]) -> None:
    """Run ``["-m", MODULE, ...]`` or ``[PATH, ...]``, and return when the program ends.

    The program sees its own `sys.argv`, and finds modules as ``python`` would have it: first beside
    the script, or in the working directory for a module. ``sys.exit(0)`` is a normal end.

    Raises ValueError without a program, FileNotFoundError for a path that does not exist,
    RuntimeError for a program that exits with another status, and the program's own exceptions.
    """
    words = list(arguments)
    module = words[0] == "-m" if words else False
    if len(words) <= module:
        raise ValueError("No script or module specified: pass [PATH, ...] or ['-m', MODULE, ...]")
    name, rest = words[module], words[module + 1 :]
    if not module and not os.path.exists(name):
        raise FileNotFoundError(
            f"the script {name!r} does not exist in {os.getcwd()} of {os.uname().nodename}"
        )
    folder = os.getcwd() if module else os.path.dirname(os.path.abspath(name))
    with _seen_as(name, rest, folder):
        try:
            if module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                text = f"{name} exited with status {error.code}"
                raise RuntimeError(text) from error
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


@contextlib.contextmanager
def _seen_as(name: str, rest: list[str], folder: str) -> Generator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [name, *rest]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
