"""A terminal in which a command runs, with a test as its user."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

__all__ = ["Terminal"]

WAIT = 60.0


class Terminal:
    """A terminal with a command that runs in it; the test acts as its user."""

    def __init__(self, *command: str, **environ: str) -> None:
        self._fd, other = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(other)
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, **environ},
        )
        self._other = other
        self._seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until the pattern appears on the screen after the previous match."""
        deadline = time.monotonic() + WAIT
        while not (found := re.search(pattern, self._seen)):
            wait = deadline - time.monotonic()
            assert wait > 0, f"{pattern!r} is not in {self._seen!r}"
            if select.select([self._fd], [], [], wait)[0]:
                self._seen += self._decoder.decode(os.read(self._fd, 65536))
        self._seen = self._seen[found.end() :]
        return found

    def until(self, part: str) -> str:
        """Wait until a text appears; return what has come since the previous match, up to it."""
        seen: str = self.expect(f"(?s).*?{re.escape(part)}")[0]
        return seen

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._other) == self.before

    def hang_up(self) -> None:
        """Close the user's side of the terminal."""
        os.close(self._fd)

    def close(self) -> None:
        for fd in (self._fd, self._other):
            with contextlib.suppress(OSError):  # already hung up
                os.close(fd)
        self.process.kill()
        self.process.wait()
