"""A person at the debugger: a connection to its server, line by line."""

from __future__ import annotations

import socket

from monarch._debug.console import PROMPT

__all__ = ["Person"]


class Person:
    """A user of a line-based client."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=60)
        self.text = ""

    def read(self, until: str = PROMPT) -> str:
        """Return the text up to and including ``until``, or up to the end."""
        while until not in self.text:
            data = self.socket.recv(65536)
            if not data:
                break
            self.text += data.decode()
        found, end, self.text = self.text.partition(until)
        return found + end

    def ask(self, line: str, until: str = PROMPT) -> str:
        """Type a line and return the answer, see `read`."""
        self.socket.sendall(line.encode() + b"\r\n")
        return self.read(until)
