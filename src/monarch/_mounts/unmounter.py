"""The program of a guard, and its agreement with those that mount; see `guard`.

It runs as a script, without the site module and without this package, so it needs few milliseconds
and few megabytes.

A guard may come late, when another script mounts at the same place. `Lock` keeps the two apart: a
guard looks whether the mount is dead and unmounts it, and a script mounts, only with the lock. The
lock is an abstract socket address. The kernel frees it when its holder exits, and there is no file
to remove.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
import zlib

__all__ = ["Lock", "is_dead"]

_PATIENCE = 10.0  # seconds for the lock, which a stranger could keep
_PAUSE = 0.01


def is_dead(path: str) -> bool:
    """Whether a file system is mounted here, and the process that showed it has exited."""
    try:
        os.statvfs(path)  # other questions may be answered by the cache of the kernel
    except OSError as error:
        # ECONNABORTED: it exits at this moment.
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


class Lock:
    """The right to mount and unmount at a path: a context manager that waits for 10 s at most."""

    def __init__(self, path: str) -> None:
        # Two paths that have the same sum only wait for each other.
        self._address = f"\0monarch-mount-{os.getuid()}-{zlib.crc32(os.fsencode(path)):x}"
        self._held = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> None:
        limit = time.monotonic() + _PATIENCE
        while True:
            try:
                self._held.bind(self._address)
            except OSError:
                if time.monotonic() < limit:
                    time.sleep(_PAUSE)  # noqa: TID251 - no runtime, and no event of it
                    continue
            return

    def __exit__(self, *_: object) -> None:
        self._held.close()


def _main(tool: str, path: str) -> None:
    os.read(0, 1)  # until the process that mounted exits, or ends the guard
    with Lock(path):
        if is_dead(path):
            subprocess.run([tool, "-u", "-z", "--", path], check=False)


if __name__ == "__main__":
    _main(*sys.argv[1:])
