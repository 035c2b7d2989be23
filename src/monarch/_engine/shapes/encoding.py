"""The encoding of an `Extent` or a `Shape` in the headers of wire frames.

Not pickle: headers are read before the peer is trusted. A natural number is written seven bits a
byte, low bits first; the high bit means that more bytes follow. A string is its length in bytes and
UTF-8. The encoding is canonical (a number has one form, no byte may follow the end), so equal
values have equal bytes and decoded values can be cached by their bytes.
"""

from __future__ import annotations

from monarch._engine.shapes.natural import LIMIT

MAX_DIMS = 64
"""More dimensions than any mesh has. A larger count is refused before memory is allocated."""


def put_natural(out: bytearray, value: int) -> None:
    """Append a natural number below 2**64."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def put_count(out: bytearray, ndim: int) -> None:
    """Append a number of dimensions."""
    if ndim > MAX_DIMS:
        raise ValueError(f"{ndim} dimensions; at most {MAX_DIMS} can be encoded")
    put_natural(out, ndim)


def put_text(out: bytearray, text: str) -> None:
    """Append a string."""
    data = text.encode()
    put_natural(out, len(data))
    out += data


class Reader:
    """Reads values from the front of `data`; any flaw is a `ValueError`."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def natural(self) -> int:
        """Read a natural number below 2**64."""
        value = shift = 0
        while self._at < len(self._data):
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise ValueError("encoded number is longer than it needs to be")
                if value >= LIMIT:
                    break
                return value
            shift += 7
            if shift > 63:
                break
        else:
            raise ValueError("encoded number is cut short")
        raise ValueError("encoded number does not fit into 64 bits")

    def count(self) -> int:
        """Read a number of dimensions."""
        ndim = self.natural()
        if ndim > MAX_DIMS:
            raise ValueError(f"{ndim} dimensions encoded; at most {MAX_DIMS} are accepted")
        return ndim

    def text(self) -> str:
        """Read a string."""
        length = self.natural()
        end = self._at + length
        if end > len(self._data):
            raise ValueError(f"encoded string of {length} bytes is cut short")
        text = self._data[self._at : end].decode()
        self._at = end
        return text

    def finish(self) -> None:
        """Check that no bytes are left."""
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes follow the encoded value")
