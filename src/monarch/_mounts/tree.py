"""A directory tree as a table of rows, and the changes that turn one version into the next.

`Tree` holds one row per file, directory or link. The number of a row is its id, for good: rows are
appended and never removed, so an id that a kernel or an open file still uses keeps its meaning. A
directory maps names to ids, and only these maps change. A file whose content changed is a new row,
and the old row goes on describing the old content.

`Change` is the step from one version to the next, and the first version is a step as well. Packed,
it is a few columns of numbers and one of names, compressed: about 15 bytes per file. So a tree of
20,000 files is one message. A receiver unpacks columns and not rows: it builds the map of a
directory when that directory is looked at.

The content of a file is a range of addresses (`place`, `size`), see `plan`. A table has no owner,
device or inode: on each host the files belong to the user of the mount. Names are bytes, since a
name need not be text.
"""

from __future__ import annotations

import stat
import struct
import sys
import zlib
from array import array
from itertools import groupby
from typing import NamedTuple

__all__ = ["ROOT", "Change", "Tree"]

ROOT = 0
"""The id of the directory that the tree belongs to."""

_COUNT = struct.Struct("<I")


class Change(NamedTuple):
    """A step from one version of a tree to the next. The columns describe appended rows."""

    first: int
    """The id of the first appended row: the number of rows before."""
    parents: array[int]
    """The directory of each row. Rows of one directory follow each other, parents come first."""
    names: list[bytes]
    modes: array[int]
    sizes: array[int]
    times: array[int]
    """The time of the last modification, in ns."""
    places: array[int]
    links: dict[int, bytes]
    """The targets of appended symbolic links, by id."""
    removed: list[tuple[int, bytes]]
    """Names that no longer exist, with their directories."""
    touched: list[tuple[int, int, int]]
    """Rows whose mode or time changed, but no content: id, mode, time."""
    blocks: tuple[int, int]
    """The first block of small files, and the one after the last; see `plan`."""

    def __bool__(self) -> bool:
        return bool(self.names or self.removed or self.touched)

    def pack(self) -> bytes:
        """Return the change as bytes, for `unpack`."""
        columns = [
            array("Q", (self.first, *self.blocks)),
            self.parents,
            self.modes,
            self.sizes,
            self.times,
            self.places,
            array("I", self.links),
            array("I", (parent for parent, _ in self.removed)),
            array("I", (row for row, _, _ in self.touched)),
            array("I", (mode for _, mode, _ in self.touched)),
            array("q", (time for _, _, time in self.touched)),
        ]
        texts = [self.names, list(self.links.values()), [name for _, name in self.removed]]
        parts = [*map(_to_bytes, columns), *(b"".join(t + b"\0" for t in each) for each in texts)]
        return zlib.compress(b"".join(_COUNT.pack(len(part)) + part for part in parts), 1)

    @staticmethod
    def unpack(data: bytes) -> Change:
        """Return the change that `pack` made these bytes of."""
        raw = zlib.decompress(data)
        parts: list[bytes] = []
        at = 0
        while at < len(raw):
            (size,) = _COUNT.unpack_from(raw, at)
            at += _COUNT.size
            parts.append(raw[at : at + size])
            at += size
        numbers = [
            _from_bytes(code, part) for code, part in zip("QIIQqQIIIIq", parts, strict=False)
        ]
        names, targets, gone = ([*part.split(b"\0")[:-1]] for part in parts[len(numbers) :])
        head, parents, modes, sizes, times, places, linked, parted, rows, touched, when = numbers
        return Change(
            head[0],
            parents,
            names,
            modes,
            sizes,
            times,
            places,
            dict(zip(linked, targets, strict=True)),
            list(zip(parted, gone, strict=True)),
            list(zip(rows, touched, when, strict=True)),
            (head[1], head[2]),
        )


class Tree:
    """A version of a tree. A new one is empty: apply changes to it, all and in order."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.parents = array("I")
        self.modes = array("I")
        self.sizes = array("Q")
        self.times = array("q")
        self.places = array("Q")
        self.links: dict[int, bytes] = {}
        self._folders: dict[int, dict[bytes, int]] = {}
        self._fresh: dict[int, list[range]] = {}  # rows that are not yet in the map of a directory

    def __len__(self) -> int:
        return len(self.names)

    def is_folder(self, row: int) -> bool:
        """Whether this row is a directory."""
        return stat.S_ISDIR(self.modes[row])

    def folder(self, row: int) -> dict[bytes, int]:
        """Return the entries of a directory: ids by name. It must not be changed."""
        found = self._folders.get(row)
        if found is None:
            found = self._folders[row] = {}
        for rows in self._fresh.pop(row, ()):
            found.update(zip(self.names[rows.start : rows.stop], rows, strict=True))
        return found

    def apply(self, change: Change) -> None:
        """Become the next version. Raises ValueError for a step from another version."""
        if change.first != len(self):
            raise ValueError(f"this change begins at row {change.first} of a tree of {len(self)}")
        for parent, name in change.removed:
            del self.folder(parent)[name]
        self.names += change.names
        self.parents += change.parents
        self.modes += change.modes
        self.sizes += change.sizes
        self.times += change.times
        self.places += change.places
        self.links.update(change.links)
        for row, mode, time in change.touched:
            self.modes[row] = mode
            self.times[row] = time
        at = change.first
        for parent, rows in groupby(change.parents):
            stop = at + sum(1 for _ in rows)
            start = max(at, 1)  # the root is in no directory
            if start < stop:
                self._fresh.setdefault(parent, []).append(range(start, stop))
            at = stop


def _to_bytes(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def _from_bytes(code: str, data: bytes) -> array[int]:
    column: array[int] = array(code)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
