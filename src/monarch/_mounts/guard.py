"""A guard of a mount: it unmounts if the process that mounted exits without having done so.

A killed process leaves a dead mount point: all that use it fail with "Transport endpoint is not
connected". The guard is a process in a session of its own. It waits for the end of a pipe whose
other end only the mounting process has, and needs no more privilege than the mount did.

The mounting process starts another guard if the guard is killed. So a dead mount point remains only
where both were killed at once. The next mount at that place removes it, and so does ``monarch gc``.

Rejected: the option ``auto_unmount`` of ``fusermount3``, whose process does the same for root. For
other users it unmounts nothing (3.14), and it is not started again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from monarch._mounts import unmounter

__all__ = ["Guard"]

_PAUSE = 1.0  # seconds before the next guard: one that cannot run must not use up a processor


class Guard:
    """Unmounts `path` by the command `tool` after this process, until `end`."""

    def __init__(self, tool: str, path: str) -> None:
        self._command = [sys.executable, "-I", "-S", unmounter.__file__, tool, path]
        self._read, self._write = os.pipe()
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=self._read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def keep(self) -> None:
        """Start another guard whenever it is killed. Blocks until `end`."""
        while True:
            self._process.wait()
            if self._ends.wait(_PAUSE):
                return
            with self._lock:
                if not self._ends.is_set():
                    self._process = self._start()

    def end(self) -> None:
        """End the guard. Blocks until it has exited."""
        with self._lock:
            self._ends.set()
        os.close(self._write)
        self._process.wait()
        os.close(self._read)
