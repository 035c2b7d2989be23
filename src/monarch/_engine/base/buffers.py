"""A byte sink that does not copy big pieces, and the byte source it freezes into.

``Buffer`` is what a pickler writes to: it keeps large ``bytes`` objects by reference (they cannot
change) and gathers everything else in between. ``freeze`` joins the pieces, once.

``FrozenBuffer`` is read from the front, and what is unread is its buffer-protocol content, so that
``memoryview(frozen)`` or ``pickle.loads(frozen)`` see the rest. Before Python 3.12 a class written
in Python can export a buffer only by inheriting from a type that does, and of those only
``bytearray`` can drop bytes from its front (in constant time): hence the base class. It also makes
equality and slices of the unread part work.

Known limits: a ``memoryview`` of a ``FrozenBuffer`` is writable, and while it exists, reading from
the ``FrozenBuffer`` raises ``BufferError``, because the bytes under the view must not move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch._engine.base.settings import settings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["Buffer", "FrozenBuffer"]


class Buffer:
    r"""Collects written bytes until ``freeze``. Not for several threads at once.

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
        """Append ``data``; gives its length in bytes.

        A ``bytes`` object of at least ``small_write_threshold`` bytes is kept, anything else is
        copied before this returns. Raises ``TypeError`` for what is not bytes-like.
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
        """Everything written so far, to be read; this buffer is empty afterwards."""
        frozen = FrozenBuffer()
        for piece in self._pieces:
            frozen += piece
        self._pieces, self._length = [], 0
        return frozen

    def __len__(self) -> int:
        return self._length


class FrozenBuffer(bytearray):
    """Bytes to be read from the front; made by ``Buffer.freeze``.

    Its length, its text and what the buffer protocol exports are the unread part.
    """

    __slots__ = ()

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes, fewer at the end; all that are left if negative."""
        return self._take(len(self) if size < 0 else size)

    def readline(self, size: int = -1) -> bytes:
        """The next bytes up to and with a newline, at most ``size`` of them if not negative."""
        newline = self.find(b"\n")
        end = len(self) if newline < 0 else newline + 1
        return self._take(end if size < 0 else min(size, end))

    def readinto(self, target: WriteableBuffer) -> int:
        """Fill ``target`` with the next bytes; gives how many, fewer than it holds at the end."""
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
        # Double quotes whatever the content.
        escaped = self.decode("latin-1").encode("unicode_escape").decode().replace('"', '\\"')
        return f'b"{escaped}"'

    def __repr__(self) -> str:
        return f"<FrozenBuffer, {len(self)} bytes unread>"


# Programs know these classes under this path; doctest has to be told then.
for _public in (Buffer, FrozenBuffer):
    _public.__module__ = "monarch._rust_bindings.monarch_hyperactor.buffers"
__test__ = {"Buffer": Buffer.__doc__}
