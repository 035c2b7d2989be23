"""Destinations for received bytes that go to no registered memory: read whole, or discarded."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["TRASH", "Text", "Trash"]

TRASH = memoryview(bytearray(1 << 16))
"""A buffer for bytes that are discarded."""


class Trash:
    """A `Landing` that discards bytes; `then` is called when all of them have arrived."""

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
    """A `Landing` for a few bytes; `then` is called with all of them."""

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
