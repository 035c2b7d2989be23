"""The input and output of a debugger's console: a connection, or this process's own terminal.

A debugger runs any code as the user. So by default the server listens on the loopback interface and
serves only the same user (`peer`). Requests of web browsers are refused to that user, too: any web
page can send requests to loopback addresses, and a request consists of lines of text.
"""

from __future__ import annotations

import asyncio
import re
import sys
from abc import ABC, abstractmethod
from contextlib import suppress

__all__ = ["DebugCliIO", "DebugIO", "DebugIOError", "DebugStdIO"]

_HTTP = re.compile(r" HTTP/\d")


class DebugIOError(RuntimeError):
    """Raised when the other end of the console has closed, or the connection was lost."""


class DebugIO(ABC):
    """The interface of a console: lines of input, and text as output."""

    @abstractmethod
    async def input(self, prompt: str = "") -> str:
        """Return the next line without its end. Raises `DebugIOError` if there is none."""

    @abstractmethod
    async def output(self, msg: str) -> None:
        """Print ``msg`` unchanged. Raises `DebugIOError` if the other end has closed."""

    @abstractmethod
    async def quit(self) -> None:
        """Flush the output and close."""


class DebugStdIO(DebugIO):
    """The console on standard input and output of this process."""

    async def input(self, prompt: str = "") -> str:
        """Read a line on a thread, so that the event loop is not blocked."""
        await self.output(prompt)
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise DebugIOError("standard input has ended")
        return line.rstrip("\r\n")

    async def output(self, msg: str) -> None:
        """Print and flush."""
        sys.stdout.write(msg)
        sys.stdout.flush()

    async def quit(self) -> None:
        """Leave the terminal open."""


class DebugCliIO(DebugIO):
    """The console over a connection that carries lines, such as that of ``nc localhost 27000``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._first = True

    async def input(self, prompt: str = "") -> str:
        """Return the next line. Raises `DebugIOError` for a request of a web browser, too."""
        await self.output(prompt)
        try:
            raw = await self._reader.readline()
        except ValueError as error:
            raise DebugIOError("a line of input was too long") from error
        except OSError as error:
            raise DebugIOError(str(error)) from error
        line = raw.decode("utf-8", "replace")
        if not line or (self._first and _HTTP.search(line)):
            raise DebugIOError("the connection has ended" if not line else "this is not HTTP")
        self._first = False
        return line.rstrip("\r\n")

    async def output(self, msg: str) -> None:
        """Send ``msg``. Wait while the other end reads too slowly (back-pressure)."""
        try:
            self._writer.write(msg.encode("utf-8", "backslashreplace"))
            await self._writer.drain()
        except OSError as error:
            raise DebugIOError(str(error)) from error

    def say(self, msg: str) -> None:
        """Send ``msg`` before the connection is closed. Does not wait."""
        self._writer.write(msg.encode())

    async def quit(self) -> None:
        """Close the connection."""
        self._writer.close()
        # A peer that has closed, or does not read, delays the program no longer than this.
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
        self._writer.transport.abort()
