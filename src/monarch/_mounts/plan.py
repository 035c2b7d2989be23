"""The plan of a mount: which rows a tree gets, and at which address the content of a file is.

All content of a tree is one address space, cut into blocks of `BLOCK` bytes. A block is the unit of
delivery: it is read once at its origin, and every host has it whole or not at all. Files follow
each other without gaps, so one delivery carries hundreds of small files. Small files have blocks of
their own, at the front, which are delivered before anything asks for them. A large file is in
blocks that only a reader makes travel.

Addresses are never used twice: a change starts at a new block. So blocks that hosts already have
stay valid, and an open file keeps its content.

A sparse file of a petabyte has a place, and costs no more than a row: `extents` computes what is in
a block from the starts of the files.
"""

from __future__ import annotations

import stat
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from monarch._mounts.tree import ROOT, Change, Tree

__all__ = ["BLOCK", "SMALL", "Extent", "Found", "Plan"]

BLOCK = 64 << 20
"""The size of a block in bytes."""

SMALL = 1 << 20
"""Files with fewer bytes are delivered ahead of their use."""


class Found(NamedTuple):
    """An entry of the directory, as it was found there."""

    parent: int
    """The index of the directory in the list of what was found; the first entry is the root."""
    name: bytes
    mode: int
    size: int
    time: int
    key: tuple[int, int]
    """Device and inode. Two names of one file have the same key."""
    link: bytes = b""


class Extent(NamedTuple):
    """A part of a block that comes from a file."""

    row: int
    at: int
    """The offset in the block."""
    offset: int
    """The offset in the file."""
    length: int


class Plan:
    """The tree at its origin, with the places of all contents."""

    def __init__(self, block: int = BLOCK, small: int = SMALL) -> None:
        self.tree = Tree()
        self.keys: list[tuple[int, int]] = []
        """Device and inode of the file that each row describes."""
        self._block = block
        self._small = small
        self._starts: list[int] = []  # sorted addresses of contents, and the rows they belong to
        self._rows: list[int] = []
        self._end = 0  # the first free address

    @property
    def size(self) -> int:
        """The size of the address space in bytes: a multiple of that of a block."""
        return self._end

    def update(self, found: Iterable[Found]) -> Change:
        """Make the tree equal to what was found; return the step.

        `found` begins with the root, and the entries of a directory follow each other. A file
        counts as unchanged if device, inode, size and time of modification are the same.
        """
        tree, first = self.tree, len(self.tree)
        ids: list[int] = []
        new: list[tuple[int, Found]] = []
        touched: list[tuple[int, int, int]] = []
        seen: dict[int, set[bytes]] = {}
        folders = [0] if first else []
        for entry in found:
            parent = ids[entry.parent] if ids else ROOT
            known = tree.folder(parent) if ids and parent < first else {}
            row = known.get(entry.name) if ids else (ROOT if first else None)
            if row is not None and ids:
                seen.setdefault(parent, set()).add(entry.name)
            if row is not None and self._same(row, entry):
                if (tree.modes[row], tree.times[row]) != (entry.mode, entry.time):
                    touched.append((row, entry.mode, entry.time))
                if ids and stat.S_ISDIR(entry.mode):
                    folders.append(row)
            else:
                row = first + len(new)
                new.append((parent, entry))
            ids.append(row)
        removed = [
            (folder, name)
            for folder in folders
            for name in tree.folder(folder).keys() - seen.get(folder, set())
        ]
        places, blocks = self._place(first, [entry for _, entry in new])
        change = Change(
            first,
            array("I", (parent for parent, _ in new)),
            [entry.name for _, entry in new],
            array("I", (entry.mode for _, entry in new)),
            array("Q", (entry.size for _, entry in new)),
            array("q", (entry.time for _, entry in new)),
            places,
            {first + n: e.link for n, (_, e) in enumerate(new) if stat.S_ISLNK(e.mode)},
            removed,
            touched,
            blocks,
        )
        self.keys += [entry.key for _, entry in new]
        tree.apply(change)
        return change

    def extents(self, block: int) -> list[Extent]:
        """Return what a block consists of, in order and without gaps; nothing beyond the last."""
        start = block * self._block
        stop = start + self._block
        found: list[Extent] = []
        for n in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            begin, row = self._starts[n], self._rows[n]
            end = begin + self.tree.sizes[row]
            if begin >= stop:
                break
            low, high = max(begin, start), min(end, stop)
            if low < high:
                found.append(Extent(row, low - start, low - begin, high - low))
        return found

    def _same(self, row: int, entry: Found) -> bool:
        """Whether the row still describes the entry, but for mode and time."""
        tree = self.tree
        if stat.S_IFMT(tree.modes[row]) != stat.S_IFMT(entry.mode):
            return False
        if stat.S_ISLNK(entry.mode):
            return tree.links[row] == entry.link
        if stat.S_ISDIR(entry.mode):
            return True
        was = (tree.sizes[row], tree.times[row], self.keys[row])
        return was == (entry.size, entry.time, entry.key)

    def _place(self, first: int, entries: list[Found]) -> tuple[array[int], tuple[int, int]]:
        """Give places to new contents; return them, and the range of blocks with small files."""
        places = array("Q", bytes(8 * len(entries)))
        files = [n for n, entry in enumerate(entries) if stat.S_ISREG(entry.mode) and entry.size]
        known: dict[tuple[tuple[int, int], int, int], int] = {}  # files with several names
        ranges: list[int] = []
        for small in (True, False):
            ranges.append(self._end // self._block)
            for n in files:
                entry = entries[n]
                if (entry.size < self._small) is not small:
                    continue
                content = (entry.key, entry.size, entry.time)
                places[n] = known.setdefault(content, self._end)
                if places[n] != self._end:
                    continue
                self._starts.append(self._end)
                self._rows.append(first + n)
                self._end += entry.size
            self._end = -(-self._end // self._block) * self._block
        return places, (ranges[0], ranges[1])
