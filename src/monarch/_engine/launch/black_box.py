"""The black box of a proc: where Python writes its stacks if a signal such as SIGSEGV kills it.

A crash leaves no exception and no word, so `faulthandler`, which can still write then, writes to a
memory file. Launcher and proc share it, the host agent gets it with the proc's pidfd and reads it
when the proc has failed. It has no name, so nobody need remove it; it takes a page once something
is written; and it costs a spawn a few microseconds.

A program that calls ``faulthandler.enable()``, or runs with ``PYTHONFAULTHANDLER``, gets the text
where it wants it, and only there, since `faulthandler` has one place to write to. (To show it in
both, the agent would have to print it for a process that is gone, and to know where.)

A child that the program forks is not the proc. What it has to say when it crashes goes to its
stderr.

Not written to are crashes by stack overflow in other threads than the main one, which have no spare
stack for signals, and `Py_FatalError`, which prints to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from typing import Any

__all__ = ["install", "read"]

_LIMIT = 1 << 18  # bytes that are read of it

_fd = -1
# Since 3.14 the C stack would be written as well, by code that may wait for a lock of malloc.
_options: dict[str, Any] = {"c_stack": False} if sys.version_info >= (3, 14) else {}


def install(fd: int) -> None:
    """In a proc: have crashes written to the memory file `fd`, which is kept open."""
    global _fd
    os.set_inheritable(fd, False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=fd, **_options)
        _fd = fd


def read(fd: int) -> str:
    """What has been written there."""
    return os.pread(fd, _LIMIT, 0).decode(errors="replace")


def _leave_in_child() -> None:
    global _fd
    if _fd >= 0:
        # The number stays taken, since `faulthandler` may go on to use it. (Without a stderr there
        # is nobody to tell.)
        with contextlib.suppress(OSError):
            os.dup2(2, _fd, inheritable=False)
        _fd = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
