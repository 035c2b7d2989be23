"""`gather_mount`: a directory of every host, shown on the script's machine.

Files are not copied ahead, and names and attributes are asked for at each use: a file that grows on
its host grows here. The kernel keeps contents until time or size of the file change, which it asks
for at each read. A reader gets pieces of up to 1 MiB, and pieces of that size move by
`RDMABuffer`.

One process here shows all hosts, with several threads, since each of its answers waits for a host.
A host that is lost, or does not answer in time, is an input/output error in its directory only.

A program that replaces a file (writes another one and renames it) must not make a reader see the
beginning of one and the rest of the other. So each file of a name is a node of its own, and a
reader that has the former one open gets ESTALE, as from NFS. Two files differ in inode, and in
size or time as well: some file systems change the inode of a file that is not in use.

Rejected: watching files (inotify) on the hosts to let the kernel keep attributes. A report that
comes later than the program's own message about the file would make the program read old content.
"""

from __future__ import annotations

import atexit
import errno
import mmap
import os
import stat
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch._mounts.block import Block
from monarch._mounts.kernel import Attributes, Channel, Read
from monarch._mounts.mount_point import MountPoint
from monarch._mounts.parties import each, key_of, stop, subdirectory, watched
from monarch._spi import start_thread
from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch.actor import HostMesh

__all__ = ["GatherMount", "gather_mount"]

_THREADS = 8
_PATIENCE = 60.0  # seconds for an answer of a host
_BY_RDMA = 1 << 20  # bytes from which on a piece is not part of a message
_ROOT = 1
_PAUSE = 0.1  # seconds between two attempts to unmount

Seen = tuple[int, int, int, int]
"""Mode, size, time of the last modification in ns, inode."""


def _seen(status: os.stat_result) -> Seen:
    return status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino


def _is_other(before: Seen, now: Seen) -> bool:
    """Whether a file has been replaced by another one of its name."""
    return before[3] != now[3] and before[1:3] != now[1:3]


class Folder(Actor):
    """A directory of a host. Paths are relative to it; an OSError is answered as its number."""

    def __init__(self, root: str) -> None:
        self._root = os.fsencode(os.path.abspath(subdirectory(root)))

    @endpoint
    def open(self) -> str:
        """Return the coordinates of this host, if it has the directory."""
        if not os.path.isdir(self._root):
            raise RuntimeError(f"gather_mount: there is no directory {os.fsdecode(self._root)}")
        return key_of()

    @endpoint
    def look(self, path: bytes) -> Seen | int:
        """Return the attributes of an entry."""
        try:
            return _seen(os.lstat(self._root + path))
        except OSError as error:
            return error.errno or errno.EIO

    @endpoint
    def entries(self, path: bytes) -> list[tuple[bytes, int]] | int:
        """Return names and types of the entries of a directory."""
        try:
            with os.scandir(self._root + path) as items:
                return [(item.name, _kind(item)) for item in items]
        except OSError as error:
            return error.errno or errno.EIO

    @endpoint
    def target(self, path: bytes) -> bytes | int:
        """Return the target of a link."""
        try:
            return os.readlink(self._root + path)
        except OSError as error:
            return error.errno or errno.EIO

    @endpoint
    def read(
        self, path: bytes, before: Seen, offset: int, length: int
    ) -> bytes | tuple[RDMABuffer, int] | int:
        """Return a piece of a file that had been `before`.

        A large piece is answered as a buffer, with the number of its bytes.
        """
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._root + path, flags)
            try:
                status = os.fstat(fd)
                if _is_other(before, _seen(status)):
                    return errno.ESTALE
                if not stat.S_ISREG(status.st_mode):
                    return errno.EINVAL  # to read a pipe here would take bytes from its reader
                if length < _BY_RDMA:
                    return os.pread(fd, length, offset)
                memory = mmap.mmap(-1, length)
                count = os.preadv(fd, [memory], offset)
                if count < _BY_RDMA:
                    return memory[:count]
                return RDMABuffer(memory, read_only=True, release="last-handle"), count
            finally:
                os.close(fd)
        except OSError as error:
            return error.errno or errno.EIO


def _kind(item: os.DirEntry[bytes]) -> int:
    if item.is_symlink():
        return stat.S_IFLNK
    if item.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG  # of others the next look says more


class _Remote:
    """The directories of hosts as one file system.

    Args:
        hosts: an actor for each host.
        names: the directories of the hosts; empty: the only host is the root.
    """

    caches = False

    def __init__(self, hosts: Sequence[Any], names: Sequence[str]) -> None:
        self._hosts = hosts
        self._names = [os.fsencode(name) for name in names]
        self._lock = threading.Lock()
        self._nodes: dict[tuple[int, bytes, int], int] = {}
        self._seen: dict[int, Seen] = {}  # files, as they were when they were looked at last
        self._paths: list[tuple[int, bytes]] = [(-1, b""), (-1, b"")]  # node 0 is never used
        self._kinds: dict[int, int] = {}
        self._versions: dict[int, tuple[int, int]] = {}  # size and time when it was opened last
        if not names:
            self._paths[_ROOT] = (0, b"")

    def look_up(self, parent: int, name: bytes) -> int:
        host, path = self._paths[parent]
        if host < 0:
            return self._node(self._names.index(name), b"") if name in self._names else 0
        try:
            seen = self._ask(host, "look", path + b"/" + name)
        except FileNotFoundError:
            return 0
        is_file = stat.S_ISREG(seen[0])
        node = self._node(host, path + b"/" + name, seen[3] if is_file else 0)
        if is_file:
            self._seen[node] = seen
        self._kinds[node] = seen[0]
        return node

    def attributes(self, node: int) -> Attributes:
        host, path = self._paths[node]
        if host < 0:
            return Attributes(stat.S_IFDIR | 0o555, 0, 0)
        seen: Seen = self._ask(host, "look", path)
        before = self._seen.get(node)
        if before is not None:
            if _is_other(before, seen):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            self._seen[node] = seen
        self._kinds[node] = seen[0]
        return Attributes(*seen[:3])

    def kind(self, node: int) -> int:
        return self._kinds.get(node, stat.S_IFDIR)

    def entries(self, node: int) -> Sequence[tuple[bytes, int]]:
        host, path = self._paths[node]
        found = [(b".", node), (b"..", node)]
        if host < 0:
            return [*found, *((name, self._node(n, b"")) for n, name in enumerate(self._names))]
        for name, kind in self._ask(host, "entries", path):
            child = self._node(host, path + b"/" + name)
            self._kinds[child] = kind
            found.append((name, child))
        return found

    def target(self, node: int) -> bytes:
        host, path = self._paths[node]
        found: bytes = self._ask(host, "target", path)
        return found

    def open(self, node: int) -> bool:
        _, size, time_ns = self.attributes(node)
        before, self._versions[node] = self._versions.get(node), (size, time_ns)
        return before == (size, time_ns)

    def read(self, request: Read) -> None:
        host, path = self._paths[request.node]
        before = self._seen[request.node]
        piece = self._ask(host, "read", path, before, request.offset, request.length)
        if isinstance(piece, bytes):
            request.reply([piece])
            return
        buffer, count = piece
        memory = bytearray(buffer.size())
        try:
            buffer.read_into(memory, timeout=_PATIENCE).get()
        except Exception as error:
            raise OSError(errno.EIO, str(error)) from error
        request.reply([memoryview(memory)[:count]])

    def abandon(self, request: Read) -> None:
        """The thread that asks the host goes on; its answer has no receiver."""

    def _node(self, host: int, path: bytes, inode: int = 0) -> int:
        with self._lock:
            node = self._nodes.get((host, path, inode))
            if node is None:
                node = self._nodes[host, path, inode] = len(self._paths)
                self._paths.append((host, path))
            return node

    def _ask(self, host: int, what: str, *args: Any) -> Any:
        """Call an endpoint of a host; raise OSError for a number, and for a host that is lost."""
        try:
            answer = getattr(self._hosts[host], what).call_one(*args).get(timeout=_PATIENCE)
        except Exception as error:
            raise OSError(errno.EIO, str(error)) from error
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer


class Gatherer(Actor):
    """Shows the directories on the script's machine."""

    def __init__(self) -> None:
        os.chdir("/")
        self._point: MountPoint | None = None

    @endpoint
    def open(self, path: str, folders: Any, names: list[str]) -> None:
        """Mount."""
        flat = folders.flatten("rank")
        hosts = [flat.slice(rank=rank) for rank in range(max(1, len(names)))]
        self._point = MountPoint(path, "monarch-gather")
        channel = Channel(self._point.fd, _Remote(hosts, names), lambda: None)
        channel.start(_THREADS, start_thread)

    @endpoint
    def close(self) -> None:
        """Unmount. Raises RuntimeError while a process uses the mount."""
        if self._point is not None:
            self._point.release()
            self._point = None

    def __cleanup__(self, error: Exception | None) -> None:
        """Unmount also when the actor is stopped."""
        if self._point is not None:
            self._point.abandon()
            self._point = None


def gather_mount(
    host_mesh: HostMesh, remote_mount_point: str, local_mount_point: str
) -> GatherMount:
    """Show a directory of each host on this machine, read-only; return the mount.

    Args:
        host_mesh: the hosts. Each is a directory that has its coordinates as name: ``hosts_0``. A
            mesh without dimensions is the mount point itself.
        remote_mount_point: the directory on the hosts. ``$SUBDIR`` stands for the coordinates.
        local_mount_point: where the directories appear; created if necessary.

    Blocks until it is mounted. Raises RuntimeError in one line if something is mounted there, if
    this machine cannot mount, or if a host has no such directory.
    """
    return GatherMount(host_mesh, remote_mount_point, local_mount_point)


class GatherMount(Block):
    """Directories of hosts on this machine; made by `gather_mount`. Closed when the script exits.

    A context manager, which calls `close`.
    """

    def __init__(self, hosts: HostMesh, remote: str, local: str) -> None:
        self.local_mount_point = os.path.abspath(os.path.expanduser(local))
        self._procs: list[Any] = []
        self._gatherer: Any = None
        try:
            there = hosts.spawn_procs(name="gather")
            self._procs.append(there)
            folders = watched(there, Folder, remote)
            names = each(folders.open)
            here = this_host().spawn_procs(name="gather-mount")
            self._procs.append(here)
            gatherer = watched(here, Gatherer)
            each(gatherer.open, self.local_mount_point, folders, [name for name in names if name])
        except BaseException:
            self._stop()
            raise
        self._gatherer = gatherer
        atexit.register(self._stop)

    def close(self, *, deadline: float | None = None) -> None:
        """Unmount. Does nothing if it is closed.

        Args:
            deadline: how many seconds to wait for processes that use the mount; None: do not wait.

        Raises RuntimeError ("failed to unmount ...") if a process uses the mount then. The mount
        stays, and `close` may be called again.
        """
        if self._gatherer is None:
            return
        limit = time.monotonic() + (deadline or 0.0)
        while True:
            try:
                each(self._gatherer.close, lost=False)
                break
            except RuntimeError:
                if time.monotonic() >= limit:
                    raise
                threading.Event().wait(_PAUSE)
        self._stop()

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        self._gatherer = None
        stop(self._procs)

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        state = "open" if self._gatherer is not None else "closed"
        return f"<gather_mount at {self.local_mount_point}, {state}>"


GatherMount.__module__ = "monarch.gather_mount"
gather_mount.__module__ = "monarch.gather_mount"
