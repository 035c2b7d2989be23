"""One host of a mount: the actor that shows the tree on its host, and passes blocks on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from typing import Any

from monarch._mounts.delivery import Block, Delivery, Shelf, parent_of
from monarch._mounts.kernel import Attributes, Channel, Read
from monarch._mounts.mount_point import MountPoint, mounted
from monarch._mounts.parties import subdirectory
from monarch._mounts.plan import BLOCK
from monarch._mounts.source import Place, place_of
from monarch._mounts.tree import Change, Tree
from monarch._spi import start_thread
from monarch.actor import Actor, current_rank, endpoint

__all__ = ["Mounter"]

_THREADS = 3  # they never wait for content
_AHEAD = 2  # blocks that are fetched ahead of a sequential reader


class _Files:
    """A tree whose contents are blocks. Node numbers are rows, plus one."""

    caches = True

    def __init__(self, tree: Tree, delivery: Delivery) -> None:
        self._tree = tree
        self._delivery = delivery
        self._lock = threading.Lock()  # a directory is not looked at while its map is made

    def apply(self, change: Change) -> None:
        with self._lock:
            self._tree.apply(change)

    def look_up(self, parent: int, name: bytes) -> int:
        with self._lock:
            return self._tree.folder(parent - 1).get(name, -1) + 1

    def attributes(self, node: int) -> Attributes:
        tree, row = self._tree, node - 1
        return Attributes(tree.modes[row], tree.sizes[row], tree.times[row])

    def kind(self, node: int) -> int:
        return self._tree.modes[node - 1]

    def entries(self, node: int) -> Sequence[tuple[bytes, int]]:
        with self._lock:
            found = self._tree.folder(node - 1)
            above = self._tree.parents[node - 1] + 1
            return [
                (b".", node),
                (b"..", above),
                *((name, row + 1) for name, row in found.items()),
            ]

    def target(self, node: int) -> bytes:
        return self._tree.links[node - 1]

    def open(self, node: int) -> bool:
        return True

    def abandon(self, request: Read) -> None:
        """The block is fetched all the same; the answer has no receiver."""

    def read(self, request: Read) -> None:
        row = request.node - 1
        size = self._tree.sizes[row]
        offset = min(request.offset, size)
        at = self._tree.places[row] + offset
        left = min(request.length, size - offset)
        last = (self._tree.places[row] + size - 1) // BLOCK
        parts: list[memoryview] = []
        while left:
            number, start = divmod(at, BLOCK)
            block = self._delivery.blocks.get(number)
            if block is None:
                self._delivery.need(number, lambda found: self._resume(request, found))
                return
            if row in block.bad:
                request.fail(block.bad[row])
                return
            count = min(left, BLOCK - start)
            parts.append(memoryview(block.memory)[start : start + count])
            at += count
            left -= count
            for ahead in range(number + 1, min(number + _AHEAD, last) + 1):
                self._delivery.expect(ahead)
        request.reply(parts)

    def _resume(self, request: Read, block: Block | None) -> None:
        if block is None:
            request.fail(errno.EIO)
        else:
            self.read(request)


class Mounter(Actor):
    """Shows the tree at a mount point of its host."""

    def __init__(self) -> None:
        self._files: _Files | None = None
        self._point: MountPoint | None = None
        self._channel: Channel | None = None
        self._delivery: Delivery | None = None
        self._shelf = Shelf()
        self._unmounted = threading.Event()
        os.chdir("/")  # the directory of the script may be what is mounted over

    @endpoint
    def open(
        self,
        packed: bytes,
        path: str,
        origin: Place | None,
        shared: bool,
        source: Any,
        mounters: Any,
    ) -> str:
        """Mount; return where. With `shared`, another mount of the same directory will do."""
        path = os.path.abspath(os.path.expanduser(subdirectory(path)))
        if origin is not None and place_of(path) == origin:
            raise ValueError(
                f"{path} is the directory itself, since this host is the script's machine: give "
                "another mount point"
            )
        rank = current_rank().rank
        above = parent_of(rank)
        providers = [source]
        if above is not None:
            providers.insert(0, mounters.flatten("rank").slice(rank=above))
        label = "monarch" if origin is None else "monarch-{}-{}-{}".format(*origin)
        if shared and mounted(path) == label and os.path.isdir(path):
            return path
        self._point = MountPoint(path, label)
        change = Change.unpack(packed)
        tree = Tree()
        tree.apply(change)
        self._delivery = Delivery(providers)
        self._files = _Files(tree, self._delivery)
        self._channel = Channel(self._point.fd, self._files, self._unmounted.set)
        self._channel.start(_THREADS, start_thread)
        self._point.read_ahead()
        return path

    @endpoint
    def prefill(self, first: int, last: int) -> None:
        """Begin to fetch small files."""
        if self._delivery is not None:
            self._delivery.prefill(range(first, last))

    @endpoint
    def update(self, packed: bytes) -> None:
        """Show the next version of the tree."""
        if self._files is None or self._channel is None or self._delivery is None:
            return  # the mount is that of another script
        change = Change.unpack(packed)
        self._files.apply(change)
        names = [*zip(change.parents, change.names, strict=True), *change.removed]
        for parent, name in names:
            self._channel.forget_name(parent + 1, name)
        for row in {*(parent for parent, _ in names), *(row for row, _, _ in change.touched)}:
            self._channel.forget_node(row + 1)
        self._delivery.prefill(range(*change.blocks))

    @endpoint(explicit_response_port=True)
    def block(self, port: Any, number: int) -> None:
        """Answer with a block as soon as it is here: a buffer, and the rows without content."""

        def send(block: Block | None) -> None:
            if block is None:
                port.exception(OSError(errno.EIO, f"there is no block {number}"))
            else:
                port.send((self._shelf.buffer(number, block), block.bad))

        if self._delivery is None:
            send(None)
        else:
            self._delivery.need(number, send)

    @endpoint
    def close(self) -> None:
        """Unmount. Raises RuntimeError while a process uses the mount."""
        if self._point is not None:
            self._point.release()
            self._point = None
        self._end()

    def __cleanup__(self, error: Exception | None) -> None:
        """Unmount also when the actor is stopped."""
        if self._point is not None:
            self._point.abandon()
            self._point = None
        self._end()

    def _end(self) -> None:
        if self._delivery is not None:
            self._delivery.close()
