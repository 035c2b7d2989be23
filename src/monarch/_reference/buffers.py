"""A byte sink that does not copy big pieces, and the byte source that it freezes into.

A pickler writes to a ``Buffer``. It keeps large ``bytes`` objects by reference (they cannot change)
and collects everything else in between. ``freeze`` joins the pieces, once.

A ``FrozenBuffer`` is read from the front. It exports its unread part by the buffer protocol, so
``memoryview(frozen)`` or ``pickle.loads(frozen)`` see the rest. Before Python 3.12 a class written
in Python can export a buffer only by inheriting from a type that does, and of those only
``bytearray`` can drop bytes from its front (in constant time): hence the base class. It also makes
equality and slices of the unread part work.

Known limits: a ``memoryview`` of a ``FrozenBuffer`` is writable, and while it exists, reading from
the ``FrozenBuffer`` raises ``BufferError``, because the bytes under the view must not move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._spi import settings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["Buffer", "FrozenBuffer"]


class Buffer:
    r"""Collects written bytes until ``freeze``. Not thread-safe.

    >>> buffer = Buffer()
    >>> buffer.write(b"line 1\n"), buffer.write(bytearray(b"line 2")), len(buffer)
    (7, 6, 13)
    >>> frozen = buffer.freeze()
    >>> frozen.readline(), len(frozen), len(buffer)
    (b'line 1\n', 6, 0)
    """

    __slots__ = ("_length", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []
        self._length = 0

    def write(self, data: ReadableBuffer) -> int:
        """Append ``data``; return its length in bytes.

        A ``bytes`` object of at least ``small_write_threshold`` bytes is kept by reference, other
        data is copied before this returns. Raises ``TypeError`` if the data is not bytes-like.
        """
        view = memoryview(data)
        if isinstance(data, bytes) and view.nbytes >= settings.small_write_threshold:
            self._pieces.append(data)
        else:
            if not (self._pieces and isinstance(self._pieces[-1], bytearray)):
                self._pieces.append(bytearray())
            self._pieces[-1] += view if view.c_contiguous else view.tobytes()
        self._length += view.nbytes
        return view.nbytes

    def freeze(self) -> FrozenBuffer:
        """Return everything written so far, to be read; this buffer is empty afterwards."""
        frozen = FrozenBuffer()
        for piece in self._pieces:
            frozen += piece
        self._pieces, self._length = [], 0
        return frozen

    def __len__(self) -> int:
        return self._length


class FrozenBuffer(bytearray):
    """Bytes to be read from the front; made by ``Buffer.freeze``.

    Its length, its text and its buffer-protocol content are those of the unread part.
    """

    __slots__ = ()

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes, or fewer at the end; all that are left if negative."""
        return self._take(len(self) if size < 0 else size)

    def readline(self, size: int = -1) -> bytes:
        """Return the next bytes up to and including a newline, at most ``size`` if not negative."""
        newline = self.find(b"\n")
        end = len(self) if newline < 0 else newline + 1
        return self._take(end if size < 0 else min(size, end))

    def readinto(self, target: WriteableBuffer) -> int:
        """Fill ``target`` with the next bytes; return their number, which is less at the end."""
        with memoryview(target) as view, view.cast("B") as into:
            if into.readonly:
                raise BufferError("cannot write to read-only buffer")
            data = self._take(len(into))
            into[: len(data)] = data
        return len(data)

    def _take(self, count: int) -> bytes:
        with memoryview(self) as view:
            data = bytes(view[:count])
        del self[:count]
        return data

    def __str__(self) -> str:
        # Double quotes, whatever the content is.
        escaped = self.decode("latin-1").encode("unicode_escape").decode().replace('"', '\\"')
        return f'b"{escaped}"'

    def __repr__(self) -> str:
        return f"<FrozenBuffer, {len(self)} bytes unread>"


# Programs import these classes from this path; `__test__` points doctest to the examples.
for _public in (Buffer, FrozenBuffer):
    _public.__module__ = "monarch._rust_bindings.monarch_hyperactor.buffers"
__test__ = {"Buffer": Buffer.__doc__}
