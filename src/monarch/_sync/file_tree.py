"""A directory tree as a list of entries, and how another directory is made equal to it.

`scan` makes the list, with sizes and times instead of contents. `Copy.adapt` makes a directory
equal to a list but for contents: it removes other entries, makes directories and links, and returns
which files are missing, or differ in size or time of change. `Copy.put` writes those files. So only
the list and changed files are transferred. Times are compared with times of the same origin, which
`put` sets, and never with a clock.

Files appear under their names when they are complete. So several processes may work in one
directory, as hosts do that share a file system. Byte code (``__pycache__``) is not copied, and is
kept as long as its directory exists. Sockets, pipes and devices are left out; links are copied as
links. A directory stays writable for its owner, whatever the origin's mode.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Chunk", "Copy", "Entry", "identity", "scan"]

_CACHE = "__pycache__"
_DRAFT = ".monarch-sync"  # the suffix of a file that is being written
_OVERTAKEN = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # by another process


class Entry(NamedTuple):
    """A file, directory or link: `path` is relative, with ``/``; `link` is a link's target."""

    path: str
    mode: int
    size: int
    time: int
    """The time of the last change, in ns."""
    link: str | None = None

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


class Chunk(NamedTuple):
    """A part of a file. The file is complete with the last part."""

    entry: Entry
    offset: int
    data: bytes
    last: bool


def identity(root: str) -> tuple[int, int]:
    """Return what tells a directory from its copies, also on another machine that shares it."""
    status = os.stat(root)
    return status.st_ino, status.st_ctime_ns  # no program can set the latter


def scan(root: str, without: str = "") -> list[Entry]:
    """Return all entries of a directory, parents first, but the path `without` and those below it.

    Raises OSError if an entry cannot be read.
    """
    left_out = without and os.path.realpath(without)
    found: list[Entry] = []
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(os.path.join(root, folder)) as items:
            for item in sorted(items, key=lambda item: item.name):
                if item.name == _CACHE or item.name.endswith(_DRAFT):
                    continue
                if left_out and os.path.realpath(item.path) == left_out:
                    continue
                path = f"{folder}/{item.name}" if folder else item.name
                status = item.stat(follow_symlinks=False)
                link = os.readlink(item.path) if item.is_symlink() else None
                entry = Entry(path, status.st_mode, status.st_size, status.st_mtime_ns, link)
                if entry.is_folder:
                    folders.append(path)
                elif link is None and not entry.is_file:
                    continue
                found.append(entry)
    return found


class Copy:
    """A directory that is made equal to another.

    Args:
        root: the directory, created if necessary.
        run: a name for this attempt; several attempts may run at a time.
        who: a name for this participant in the attempt.
    """

    def __init__(self, root: str, run: str, who: str) -> None:
        self._root = root
        self._drafts = f".{run}{_DRAFT}"
        self._draft = f".{who}{self._drafts}"

    def adapt(
        self, entries: Iterable[Entry], *, sizes: bool = True, kept: str = ""
    ) -> tuple[list[str], list[str]]:
        """Make the directory equal to `entries` but for contents.

        Returns the paths to `put`, and those that were removed. Without `sizes` only the time of a
        file is compared, for files whose content is changed in transit. The entry `kept` is not
        removed.
        """
        os.makedirs(self._root, exist_ok=True)
        known = {entry.path: entry for entry in entries}
        removed = list(self._remove_others(known, kept))
        wanted = [entry.path for entry in known.values() if not self._settle(entry, sizes)]
        return wanted, removed

    def put(self, chunk: Chunk) -> None:
        """Write a part of a file. The parts of a file must come in order."""
        entry = chunk.entry
        path = os.path.join(self._root, entry.path)
        draft = path + self._draft
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if chunk.offset else os.O_TRUNC)
        with open(os.open(draft, flags, 0o600), "wb") as file:
            file.seek(chunk.offset)
            file.write(chunk.data)
        if chunk.last:
            os.chmod(draft, stat.S_IMODE(entry.mode))
            os.utime(draft, ns=(entry.time, entry.time))
            os.replace(draft, path)

    def _settle(self, entry: Entry, sizes: bool) -> bool:
        """Make one entry as it should be; return False for a file that has to be put."""
        path = os.path.join(self._root, entry.path)
        here = _look(path)
        mode = stat.S_IMODE(entry.mode)
        if entry.is_folder:
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode | stat.S_IRWXU)
        elif entry.link is not None:
            if here is None or os.readlink(path) != entry.link:
                os.symlink(entry.link, path + self._draft)
                os.replace(path + self._draft, path)
        elif (
            here is None or here.st_mtime_ns != entry.time or (sizes and here.st_size != entry.size)
        ):
            return False
        elif stat.S_IMODE(here.st_mode) != mode:
            os.chmod(path, mode)
        return True

    def _remove_others(self, known: dict[str, Entry], kept: str) -> Iterator[str]:
        """Remove entries that are unknown or of another type than known; yield their paths."""
        folders = [""]
        while folders:
            folder = folders.pop()
            for name in _names(os.path.join(self._root, folder)):
                if name == _CACHE or name.endswith(self._drafts):
                    continue
                path = f"{folder}/{name}" if folder else name
                if path == kept:
                    continue
                full = os.path.join(self._root, path)
                here = _look(full)
                if here is None:
                    continue
                is_folder = stat.S_ISDIR(here.st_mode)
                entry = known.get(path)
                if entry is not None and stat.S_IFMT(entry.mode) == stat.S_IFMT(here.st_mode):
                    if is_folder:
                        folders.append(path)
                    continue
                with contextlib.suppress(*_OVERTAKEN):
                    if is_folder:
                        shutil.rmtree(full)
                    else:
                        os.unlink(full)
                yield path


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except _OVERTAKEN:
        return []


def _look(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except _OVERTAKEN:
        return None
