"""The origin of a mount: an actor beside the script that lists the directory and reads its blocks.

It runs in a process of its own on the script's host, so a script that computes delays no reader.
Memory for a block is held until the process that asked for the block has copied it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from monarch._mounts.memory import Pool
from monarch._mounts.plan import BLOCK, Extent, Found, Plan
from monarch._mounts.tree import ROOT
from monarch.actor import Actor, endpoint
from monarch.rdma import RDMABuffer

__all__ = ["EXCLUDED", "Place", "Source", "place_of", "scan"]

EXCLUDED = b".monarch"
"""Directories of this name hold the state of jobs, and are not shown."""

Place = tuple[str, int, int]
"""A directory of some machine: the boot of the machine, device, inode."""

_BOOT = "/proc/sys/kernel/random/boot_id"


def place_of(path: str) -> Place | None:
    """Return which directory this is; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    with open(_BOOT) as file:
        return file.read().strip(), status.st_dev, status.st_ino


def scan(root: bytes) -> Iterator[Found]:
    """Yield the directory and all that is below it, in the order that `Plan.update` needs.

    Sockets, pipes and devices are left out, and so are the contents of directories that are not
    readable or belong to another file system. Raises OSError if the root cannot be listed.
    """
    top = os.stat(root)
    yield Found(0, b"", top.st_mode, 0, top.st_mtime_ns, (top.st_dev, top.st_ino))
    folders = [(0, root)]
    count = 1
    for index, path in folders:  # it grows meanwhile
        try:
            with os.scandir(path) as items:
                found = list(items)
        except (PermissionError, FileNotFoundError, NotADirectoryError):
            if not index:
                raise
            continue
        for item in found:
            try:
                status = item.stat(follow_symlinks=False)
                mode = status.st_mode
                link = os.readlink(item.path) if stat.S_ISLNK(mode) else b""
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINVAL):  # removed or replaced meanwhile
                    continue
                raise
            size = len(link)
            if stat.S_ISDIR(mode):
                if item.name == EXCLUDED:
                    continue
                if status.st_dev == top.st_dev:
                    folders.append((count, item.path))
            elif stat.S_ISREG(mode):
                size = status.st_size
            elif not link:
                continue
            key = (status.st_dev, status.st_ino)
            yield Found(index, item.name, mode, size, status.st_mtime_ns, key, link)
            count += 1


class Source(Actor):
    """Lists the directory, and reads blocks of it.

    Args:
        root: the directory.
    """

    def __init__(self, root: str) -> None:
        self._root = os.fsencode(root)
        self._plan = Plan()
        self._memory = Pool(BLOCK)

    @endpoint
    def update(self) -> tuple[bytes, Place | None] | None:
        """Look at the directory; return the packed change, or None if there is none."""
        change = self._plan.update(scan(self._root))
        return (change.pack(), place_of(os.fsdecode(self._root))) if change else None

    @endpoint
    def block(self, number: int) -> tuple[RDMABuffer, dict[int, int]]:
        """Read a block. Return it, with the rows that cannot be read: row -> error number."""
        extents = self._plan.extents(number)
        last = extents[-1]
        memory = self._memory.lend(last.at + last.length)
        view = memoryview(memory).cast("B")
        bad: dict[int, int] = {}
        for extent in extents:
            part = view[extent.at : extent.at + extent.length]
            if problem := self._read(extent, part):
                bad[extent.row] = problem
        return RDMABuffer(memory, read_only=True, release="last-handle"), bad

    def _read(self, extent: Extent, into: memoryview) -> int:
        """Read a part of a file; return 0, or the number of the error."""
        try:
            # O_NONBLOCK: a pipe may have taken the place of the file.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._path(extent.row), flags)
        except PermissionError:
            return errno.EACCES
        except OSError:
            return errno.EIO
        try:
            if not self._is_unchanged(fd, extent.row):
                return errno.EIO
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], extent.offset + done)
                if not count:
                    return errno.EIO  # it became shorter
                done += count
            return 0 if self._is_unchanged(fd, extent.row) else errno.EIO
        except OSError:
            return errno.EIO
        finally:
            os.close(fd)

    def _is_unchanged(self, fd: int, row: int) -> bool:
        tree, here = self._plan.tree, os.fstat(fd)
        key = (here.st_dev, here.st_ino)
        now = (stat.S_IFMT(here.st_mode), here.st_size, here.st_mtime_ns, key)
        return now == (stat.S_IFREG, tree.sizes[row], tree.times[row], self._plan.keys[row])

    def _path(self, row: int) -> bytes:
        tree = self._plan.tree
        names: list[bytes] = []
        while row != ROOT:
            names.append(tree.names[row])
            row = tree.parents[row]
        return b"/".join([self._root, *reversed(names)])
