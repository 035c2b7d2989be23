"""Where bytes go that are for nobody's memory: to be read as a whole, or nowhere."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["TRASH", "Text", "Trash"]

TRASH = memoryview(bytearray(1 << 16))
"""What is received into it is lost."""


class Trash:
    """A `Landing` for what is not wanted any more; `then` is called when all of it has come."""

    __slots__ = ("_then", "left")

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self.left = count
        self._then = then

    def put(self, data: memoryview) -> None:
        """See `Landing`."""
        self.left -= len(data)

    def fill(self, receive: Callable[[memoryview], int]) -> int:
        """See `Landing`."""
        count = receive(TRASH[: self.left])
        self.left -= count
        return count

    def done(self) -> None:
        """See `Landing`."""
        self._then()


class Text:
    """A `Landing` for a few bytes, with which `then` is called."""

    __slots__ = ("_content", "_then", "left")

    def __init__(self, count: int, then: Callable[[bytes], None]) -> None:
        self.left = count
        self._content = bytearray()
        self._then = then

    def put(self, data: memoryview) -> None:
        """See `Landing`."""
        self._content += data
        self.left -= len(data)

    def fill(self, receive: Callable[[memoryview], int]) -> int:
        """See `Landing`."""
        room = memoryview(bytearray(self.left))
        count = receive(room)
        self.put(room[:count])
        return count

    def done(self) -> None:
        """See `Landing`."""
        self._then(bytes(self._content))
