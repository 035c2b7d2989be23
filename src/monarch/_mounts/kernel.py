"""The FUSE protocol: the requests that the kernel writes for a mounted file system, and answers.

`serve` reads requests from the descriptor of a mount and answers them from a `FileSystem`, until
it is unmounted. The protocol is that of ``linux/fuse.h``, version 7.31, of which a read-only file
system needs a dozen requests.

No library is used. libfuse's high-level interface, which `mfusepy` wraps, asks for a path and an
attribute at a time: a listing of 20,000 files with their attributes takes seconds, and open files
follow their path when a tree changes. Its low-level interface, which `pyfuse3` wraps, needs a
compiler on every host. The protocol itself is smaller than either wrapper. docs/mounts.md has the
measurements.

The speed depends on the kernel's cache. Names (also absent ones), attributes, links and contents
stay there until `Channel.forget_name` and `Channel.forget_node`. So a warm read of a file
makes no request at all, not even for `open` and `close`: their first requests are answered
with ENOSYS, which the kernel takes as "never ask again".

A request may be answered later, from any thread, and the thread that read it goes on with the next.
The kernel sends an interruption when a signal ends the process that waits; without an answer to
that, the process could not be killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["FOREVER", "Attributes", "Channel", "FileSystem", "Read"]

FOREVER = 1 << 31
"""How many seconds the kernel keeps what does not change without notice."""

_LOOKUP, _FORGET, _GETATTR, _READLINK, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 5, 14, 15, 17, 18
_INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _DESTROY = 26, 27, 28, 29, 36, 38
_BATCH_FORGET, _READDIRPLUS = 42, 44
_INVALIDATE_NODE, _INVALIDATE_NAME = 2, 3

_IN = struct.Struct("=IIQQIIII")  # length, operation, unique, node, user, group, process, rest
_OUT = struct.Struct("=IiQ")  # length, error, unique
_INIT_IN = struct.Struct("=IIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHH8I")
_ENTRY = struct.Struct("=QQQQII")
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_ATTR_OUT = struct.Struct("=QII")
_OPEN_OUT = struct.Struct("=QIi")
_READ_IN = struct.Struct("=QQI")
_STATFS_OUT = struct.Struct("=QQQQQIIII6I")
_DIRENT = struct.Struct("=QQII")

_FLAGS = (
    1 << 0  # reads in parallel
    | 1 << 12  # another time of modification empties the cache of a file or directory
    | 1 << 18  # look-ups in parallel
    | 1 << 22  # max_pages is set
    | 1 << 23  # links are cached
)
_CACHED = (
    1 << 13  # listings with attributes
    | 1 << 14  # ... when they are of use
    | 1 << 17  # the answer ENOSYS to an open, also of a directory
    | 1 << 24
)
_KEEP_CACHE = 1 << 1
_PAGES = 256  # of a read at most: 1 MiB
_BUFFER = 1 << 16  # a request without data is far smaller


class Attributes(NamedTuple):
    """The attributes of a file, as the kernel wants them. `time` is in ns."""

    mode: int
    size: int
    time: int


class Read:
    """A request for a part of a file. Answer it once, now or later, from any thread."""

    __slots__ = ("_channel", "_unique", "length", "node", "offset")

    def __init__(self, channel: Channel, unique: int, node: int, offset: int, length: int) -> None:
        self._channel = channel
        self._unique = unique
        self.node = node
        self.offset = offset
        self.length = length

    def reply(self, parts: Iterable[bytes | memoryview]) -> None:
        """Answer with bytes; fewer than asked for mean the end of the file."""
        self._channel.answer(self._unique, parts)

    def fail(self, number: int) -> None:
        """Answer with an error number."""
        self._channel.refuse(self._unique, number)


class FileSystem(Protocol):
    """A read-only file system. Node 1 is its root. Methods may raise OSError with a number."""

    caches: bool
    """Whether the kernel may keep everything until the file system says otherwise."""

    def look_up(self, parent: int, name: bytes) -> int:
        """Return the node of an entry; 0: there is none."""
        ...

    def attributes(self, node: int) -> Attributes:
        """Return the attributes of a node."""
        ...

    def kind(self, node: int) -> int:
        """Return the mode of a node, of which only the type counts. Must be quick."""
        ...

    def entries(self, node: int) -> Sequence[tuple[bytes, int]]:
        """Return names and nodes of a directory."""
        ...

    def target(self, node: int) -> bytes:
        """Return the target of a link."""
        ...

    def open(self, node: int) -> bool:
        """Open a file; return whether the kernel may use what it has of the content.

        Only called if the file system does not cache.
        """
        ...

    def read(self, request: Read) -> None:
        """Answer a request for content."""
        ...

    def abandon(self, request: Read) -> None:
        """Forget a request: its process was interrupted, and the answer would have no receiver."""
        ...


class Channel:
    """The connection with the kernel for one mount.

    Args:
        fd: the descriptor of the mount, which is closed at the end.
        files: answers the requests.
        ended: called, on a thread of the channel, once it is unmounted.
    """

    def __init__(self, fd: int, files: FileSystem, ended: Callable[[], None]) -> None:
        self._fd = fd
        self._files = files
        self._ended = ended
        self._lasting = FOREVER if files.caches else 0
        self._owner = (os.getuid(), os.getgid())
        self._open: dict[int, Read] = {}  # requests for content that have no answer yet
        self._lock = threading.Lock()
        self._left = 0
        self._listings: dict[int, Sequence[tuple[bytes, int]]] = {}
        self._handles = 0
        self._handlers: dict[int, Callable[[int, int, memoryview], None]] = {
            _LOOKUP: self._look_up,
            _GETATTR: self._get_attributes,
            _READLINK: self._read_link,
            _OPEN: self._open_file,
            _READ: self._read,
            _STATFS: self._statfs,
            _RELEASE: self._done,
            _OPENDIR: self._open_folder,
            _READDIR: self._list,
            _READDIRPLUS: self._list_with_attributes,
            _RELEASEDIR: self._close_folder,
            _INIT: self._init,
            _DESTROY: self._done,
            _INTERRUPT: self._interrupt,
        }

    def start(self, threads: int, start_thread: Callable[[str, Callable[[], None]], None]) -> None:
        """Begin to answer, on threads of their own."""
        self._left = threads
        for _ in range(threads):
            start_thread("monarch-mount", self._run)

    # -- answers ---------------------------------------------------------------------------------

    def answer(self, unique: int, parts: Iterable[bytes | memoryview]) -> None:
        """Send an answer."""
        body = list(parts)
        header = _OUT.pack(_OUT.size + sum(map(len, body)), 0, unique)
        self._write([header, *body], unique)

    def refuse(self, unique: int, number: int) -> None:
        """Send an error."""
        self._write([_OUT.pack(_OUT.size, -number, unique)], unique)

    def forget_node(self, node: int) -> None:
        """Make the kernel drop the attributes and the content that it has of a node."""
        self._notify(_INVALIDATE_NODE, struct.pack("=Qqq", node, 0, 0))

    def forget_name(self, parent: int, name: bytes) -> None:
        """Make the kernel look a name up again, also if there was no such entry."""
        body = struct.pack("=QII", parent, len(name), 0) + name + b"\0"
        self._notify(_INVALIDATE_NAME, body)

    def _notify(self, code: int, body: bytes) -> None:
        header = _OUT.pack(_OUT.size + len(body), code, 0)
        # ENOENT: the kernel does not have it. The others: it is unmounted.
        with contextlib.suppress(FileNotFoundError, ConnectionError):
            self._write([header, body], 0)

    def _write(self, parts: list[bytes | memoryview], unique: int) -> None:
        if unique:
            self._open.pop(unique, None)
        try:
            os.writev(self._fd, parts)
        except OSError as error:
            # ENOENT: the request was interrupted. ENODEV and EBADF: it is unmounted.
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EBADF, errno.ENOTCONN):
                raise

    # -- requests --------------------------------------------------------------------------------

    def _run(self) -> None:
        buffer = bytearray(_BUFFER)
        view = memoryview(buffer)
        try:
            while True:
                try:
                    size = os.readv(self._fd, [buffer])
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        continue  # the request was taken back
                    return  # ENODEV: it is unmounted
                self._handle(view[:size])
        finally:
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                os.close(self._fd)
                self._fd = -1
                self._ended()

    def _handle(self, request: memoryview) -> None:
        _, operation, unique, node, *_ = _IN.unpack_from(request)
        if operation in (_FORGET, _BATCH_FORGET):  # nodes are kept as long as the mount
            return
        handler = self._handlers.get(operation)
        if handler is None:
            self.refuse(unique, errno.ENOSYS)
            return
        try:
            handler(unique, node, request[_IN.size :])
        except OSError as error:
            self.refuse(unique, error.errno or errno.EIO)
        except Exception:  # an error of the file system must not leave a process waiting
            self.refuse(unique, errno.EIO)
            raise

    def _init(self, unique: int, _node: int, body: memoryview) -> None:
        _, _, ahead, offered = _INIT_IN.unpack_from(body)
        flags = _FLAGS | (_CACHED if self._files.caches else 0)
        out = _INIT_OUT.pack(
            7, 31, max(ahead, 1 << 20), flags & offered, 64, 48, 4096, 1, _PAGES, 0, *[0] * 8
        )
        self.answer(unique, [out[:64]])

    def _look_up(self, unique: int, node: int, body: memoryview) -> None:
        found = self._files.look_up(node, bytes(body[: len(body) - 1]))
        if found:
            self.answer(unique, [self._entry(found)])
        elif self._lasting:
            self.answer(unique, [_ENTRY.pack(0, 0, self._lasting, 0, 0, 0), bytes(88)])
        else:
            self.refuse(unique, errno.ENOENT)

    def _entry(self, node: int) -> bytes:
        kept = self._lasting
        return _ENTRY.pack(node, 0, kept, kept, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        mode, size, time = self._files.attributes(node)
        seconds, rest = divmod(time, 1_000_000_000)
        seconds &= (1 << 64) - 1  # a time before 1970
        return _ATTRIBUTES.pack(
            *(node, size, -(-size // 512), seconds, seconds, seconds, rest, rest, rest),
            *(mode, 2 if stat.S_ISDIR(mode) else 1, *self._owner, 0, 4096, 0),
        )

    def _get_attributes(self, unique: int, node: int, body: memoryview) -> None:
        self.answer(unique, [_ATTR_OUT.pack(self._lasting, 0, 0), self._attributes(node)])

    def _read_link(self, unique: int, node: int, body: memoryview) -> None:
        self.answer(unique, [self._files.target(node)])

    def _open_file(self, unique: int, node: int, body: memoryview) -> None:
        if self._files.caches:
            self.refuse(unique, errno.ENOSYS)  # from now on no open file is reported
            return
        flags = _KEEP_CACHE if self._files.open(node) else 0
        self.answer(unique, [_OPEN_OUT.pack(0, flags, 0)])

    def _read(self, unique: int, node: int, body: memoryview) -> None:
        _, offset, length = _READ_IN.unpack_from(body)
        request = self._open[unique] = Read(self, unique, node, offset, length)
        self._files.read(request)

    def _interrupt(self, unique: int, node: int, body: memoryview) -> None:
        (other,) = struct.unpack_from("=Q", body)
        request = self._open.pop(other, None)
        if request is not None:
            self._files.abandon(request)
            self.refuse(other, errno.EINTR)

    def _open_folder(self, unique: int, node: int, body: memoryview) -> None:
        if self._files.caches:
            self.refuse(unique, errno.ENOSYS)
            return
        with self._lock:
            self._handles += 1
            handle = self._handles
        self._listings[handle] = self._files.entries(node)
        self.answer(unique, [_OPEN_OUT.pack(handle, 0, 0)])

    def _list(self, unique: int, node: int, body: memoryview) -> None:
        self._page(unique, node, body, lambda _entry: b"")

    def _list_with_attributes(self, unique: int, node: int, body: memoryview) -> None:
        self._page(unique, node, body, self._entry)

    def _page(
        self, unique: int, node: int, body: memoryview, before: Callable[[int], bytes]
    ) -> None:
        handle, offset, room = _READ_IN.unpack_from(body)
        page = bytearray()
        # A listing has an open directory as its key, or its node where none are reported.
        key = handle or -node
        entries = self._listings.get(key)
        if entries is None or (not handle and not offset):
            entries = self._listings[key] = self._files.entries(node)
        for at in range(offset, len(entries)):
            name, child = entries[at]
            kind = self._files.kind(child) >> 12
            one = before(child) + _DIRENT.pack(child, at + 1, len(name), kind) + name
            one += bytes(-len(one) % 8)
            if len(page) + len(one) > room:
                break
            page += one
        if not page and not handle:
            self._listings.pop(key, None)
        self.answer(unique, [bytes(page)])

    def _close_folder(self, unique: int, node: int, body: memoryview) -> None:
        self._listings.pop(struct.unpack_from("=Q", body)[0], None)
        self.answer(unique, [])

    def _statfs(self, unique: int, node: int, body: memoryview) -> None:
        self.answer(unique, [_STATFS_OUT.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0, *[0] * 6)])

    def _done(self, unique: int, node: int, body: Any) -> None:
        self.answer(unique, [])
