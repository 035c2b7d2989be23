"""The black box of a proc: where Python writes its stacks if a signal such as SIGSEGV kills it.

Such a crash raises no exception, but `faulthandler` can still write the stacks of all threads. Here
it writes them to a memory file. The launcher and the proc share the file; the host agent receives
its descriptor together with the proc's pidfd, and reads the file after the proc has failed. The
file has no name, so it needs no removal. It takes one page of memory once something is written, and
costs a spawn a few microseconds.

A program that calls ``faulthandler.enable()``, or runs with ``PYTHONFAULTHANDLER``, gets the text
in the place it chose and only there, since `faulthandler` writes to one file. (To show the text in
both places, the agent would have to print it on behalf of an exited process, and to know where.)

A child that the program forks is not the proc: the stacks of a crashed child go to its stderr.

Two kinds of crashes are not recorded: a stack overflow in a thread other than the main one, which
has no spare stack for signal handlers, and `Py_FatalError`, which prints to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from typing import Any

__all__ = ["install", "read"]

_LIMIT = 1 << 18  # bytes read from the file

_fd = -1
# Python 3.14 and later also write the C stack, with code that may wait for a lock of malloc.
_options: dict[str, Any] = {"c_stack": False} if sys.version_info >= (3, 14) else {}


def install(fd: int) -> None:
    """In a proc: have crashes written to the memory file `fd`, which stays open."""
    global _fd
    os.set_inheritable(fd, False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=fd, **_options)
        _fd = fd


def read(fd: int) -> str:
    """Return the text written to the memory file `fd`; empty if there was no crash."""
    return os.pread(fd, _LIMIT, 0).decode(errors="replace")


def _leave_in_child() -> None:
    global _fd
    if _fd >= 0:
        # The descriptor's number must stay in use, since `faulthandler` still writes to it.
        # Without a stderr the text is dropped.
        with contextlib.suppress(OSError):
            os.dup2(2, _fd, inheritable=False)
        _fd = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
