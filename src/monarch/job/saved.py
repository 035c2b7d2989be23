"""Files of saved jobs: how they are written, and who may have written one that is read.

A saved job is a pickle, since programs define jobs of their own, and reading a pickle runs code. So
a file is read only if it belongs to this user (or root) and nobody else can write it: a script
that is started in somebody else's directory does not run what that one left there. Writing is
atomic, and goes through a symbolic link to what it names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Generator

__all__ = ["DEFAULT_JOB_PATH", "locked", "read", "write"]

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
"""Where the job of a directory is kept, unless a program says otherwise."""


def read(filename: str) -> bytes:
    """What was written there. Raises FileNotFoundError; PermissionError if others may have."""
    with open(filename, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.getuid(), 0):
            raise PermissionError(
                f"{filename} belongs to another user; reading a saved job runs what is in it"
            )
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise PermissionError(
                f"{filename} can be written by others, and reading a saved job runs what is in "
                f"it; if you trust it: chmod go-w {filename}"
            )
        return file.read()


def write(filename: str, data: bytes) -> None:
    """Put `data` where `filename` leads, at once; its directory is made."""
    target = os.path.realpath(filename)
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    fd, draft = tempfile.mkstemp(dir=folder, prefix=".job_state.")  # mode 0600
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(draft, target)
    except BaseException:
        os.unlink(draft)
        raise


@contextlib.contextmanager
def locked(filename: str) -> Generator[None]:
    """Alone with this file among those who ask: two scripts at once do not start two jobs."""
    target = os.path.realpath(filename)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(f"{target}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
