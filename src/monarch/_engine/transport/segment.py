"""Shared-memory segments: big payloads cross a process boundary with one copy.

The sender copies a payload once into a segment (an unlinked memory file) and passes the descriptor
with the frame. Every receiver maps the segment privately, so its data is writable without affecting
other copies, and no byte is copied until it is written. When the last object that refers to a
mapping is freed, the receiver reports it (a RELEASE frame). Then the segment returns to the
sender's pool with its pages still warm: filling a warm segment is nine times faster than filling a
fresh one. A receiver that dies releases its segments by the loss of its link.

The pool keeps at most `limit` bytes of unused segments, the latest used ones, and gives back those
that were not used for half a minute: a burst costs memory only for a while. Segments in use are
bounded by what receivers hold. A process that already has `_MAX_MAPPINGS` live mappings copies
instead of mapping, since the kernel bounds mappings and descriptors.

Rejected: named shared memory (a name must be cleaned up after a SIGKILL; a descriptor is not), one
ring buffer per link (a receiver that keeps one array would pin the whole ring).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from monarch._engine.base.memory_file import memory_file
from monarch._engine.wire.bulk import is_bulk
from monarch._engine.wire.codec import Payload

__all__ = ["SegmentPool", "Windows", "open_parts"]

_TABLE_HEAD = struct.Struct("<QQI")  # segment id, bytes used, number of parts
_PART = struct.Struct("<QQB")  # offset, length, whether the receiver copies it at once
_PAGE = mmap.PAGESIZE
_COPY_STEP = 8 << 20  # a copy holds the interpreter lock, for at most about 1 ms
_UNLOCKED = 1 << 20
_TWO_THREADS = 16 << 20
_MAX_MAPPINGS = 4096
_RESERVED = "reserved"  # the holder of a segment filled by `reserve`
_TAKES_LONG = 16 << 20
_MAX_FREE = 64  # unused segments to keep: each has two descriptors
_KEPT = 30.0  # seconds between two looks for segments that nothing has used in between


class _Segment:
    __slots__ = ("fd", "holders", "id", "map", "retired", "size", "table")

    def __init__(self, ident: int, size: int) -> None:
        self.id = ident
        self.size = size
        self.fd = memory_file(size)
        try:
            self.map = mmap.mmap(self.fd, size)
        except BaseException:  # mapping needs another descriptor, and address space
            os.close(self.fd)
            raise
        if size >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
            # An optimisation that the kernel may refuse (huge pages configured away), without harm.
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.holders: Counter[Hashable] = Counter()
        self.retired = 0  # order of its last use, while it is unused
        self.table = b""

    def close(self) -> None:
        _aside(self.size, self._close)

    def give_back(self) -> None:
        """Close it, and free its pages even where a receiver keeps them mapped for the next one."""
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # not on each file system
                for at in range(0, self.size, _COPY_STEP):  # it holds the interpreter lock
                    self.map.madvise(mmap.MADV_REMOVE, at, min(_COPY_STEP, self.size - at))
        self._close()

    def _close(self) -> None:
        _unmap(self.map)
        os.close(self.fd)


def _aside(nbytes: int, action: Callable[[], None]) -> None:
    """Free memory, in a thread if that is slow: the kernel needs 200 ms for a gigabyte."""
    if nbytes < _TAKES_LONG or _start("monarch-unmap", action) is None:
        action()


def _start(name: str, action: Callable[[], object]) -> threading.Thread | None:
    """Start a thread that runs `action`; return it, or None if there can be none.

    None means that a limit is reached, or that the interpreter shuts down.
    """
    thread = threading.Thread(target=action, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _unmap(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a live view keeps the mapping
        mapping.close()


def _size_class(size: int) -> int:
    """Round up to one of four steps per power of two, so that segments can be reused."""
    size = max(size, _PAGE)
    step = max(_PAGE, 1 << (size.bit_length() - 3))
    return -(-size // step) * step


class SegmentPool:
    """The segments that this process fills. Thread-safe.

    Args:
        limit: bytes of unused segments to keep warm.
        later: calls a function after so many seconds, on any thread. Without it nothing but the
            limit bounds what is unused.
    """

    def __init__(
        self, limit: int, later: Callable[[float, Callable[[], None]], object] | None = None
    ) -> None:
        self._limit = limit
        self._later = later
        self._looks = False  # whether `trim` will be called
        self._trimmed = 0  # the order of its last call among the retirements
        self._lock = threading.RLock()  # a finaliser may send while its own thread holds the lock
        self._ids = itertools.count(1)
        self._free: dict[int, list[_Segment]] = {}  # by size; the oldest is first
        self._retirements = itertools.count(1)
        self._free_bytes = 0
        self._used: dict[int, _Segment] = {}
        # segments made by `reserve`, by the id of their mapping
        self._reserved: dict[int, tuple[_Segment, object]] = {}

    def store(self, payload: Payload) -> _Segment:
        """Return the segment that holds `payload`, copied on first use; call `hold` for each send.

        The creator has one hold under the key None; drop it with `release(None, id)` after the last
        send.
        """
        if payload.stored is not None:
            stored: _Segment = payload.stored
            return stored
        parts: list[tuple[int, int, bool]] = []
        at = 0
        for chunk in payload.chunks:
            at += memoryview(chunk).nbytes
        parts.append((0, at, False))
        for buffer in payload.buffers:
            at = -(-at // 64) * 64  # the alignment of allocators, which suits vector loads
            parts.append((at, buffer.nbytes, is_bulk(buffer)))
            at += buffer.nbytes
        segment = self._take(at)
        view = memoryview(segment.map)
        position = 0
        for chunk in payload.chunks:
            position += _copy(view, position, memoryview(chunk).cast("B"))
        for (offset, _, _), buffer in zip(parts[1:], payload.buffers, strict=True):
            _copy(view, offset, buffer)
        view.release()
        segment.table = _TABLE_HEAD.pack(segment.id, at, len(parts)) + b"".join(
            _PART.pack(*part) for part in parts
        )
        payload.stored = segment
        return segment

    def reserve(self, nbytes: int) -> memoryview:
        """Return memory of a segment to fill by other means than `store`.

        The segment is in use while the memory is alive.

        To pass the segment on, hold it before the memory is freed (`reserved`, `hold`).
        """
        segment = self._take(nbytes, _RESERVED)
        memory = memoryview(segment.map)[:nbytes]
        ident = segment.id
        gone = weakref.ref(memory, lambda _: self.release(_RESERVED, ident))
        self._reserved[id(segment.map)] = segment, gone
        return memory

    def reserved(self, memory: memoryview) -> _Segment | None:
        """Return the segment of memory that `reserve` returned; None for other memory."""
        segment, _ = self._reserved.get(id(memory.obj), (None, None))
        return segment

    def hold(self, holder: Hashable, segment: _Segment) -> None:
        with self._lock:
            segment.holders[holder] += 1

    def release(self, holder: Hashable, ident: int) -> None:
        """End one hold of `holder` on segment `ident`.

        Ignores unknown ids, since links may be late.
        """
        with self._lock:
            segment = self._used.get(ident)
            if segment is None or segment.holders[holder] <= 0:
                return
            segment.holders[holder] -= 1
            if not segment.holders[holder]:
                del segment.holders[holder]
            if not segment.holders:
                self._retire(segment)

    def drop_holder(self, holder: Hashable) -> None:
        """End all holds of `holder`, whose process or link was lost."""
        with self._lock:
            for segment in [s for s in list(self._used.values()) if holder in s.holders]:
                del segment.holders[holder]
                if not segment.holders:
                    self._retire(segment)

    def trim(self) -> None:
        """Give the segments back to the system that nothing has used since the last call.

        The pool has this called every half minute while it has segments.
        """
        unused: list[_Segment] = []
        with self._lock:
            for size, segments in list(self._free.items()):
                while segments and segments[0].retired < self._trimmed:
                    unused.append(segments.pop(0))
                    self._free_bytes -= size
                if not segments:
                    del self._free[size]
            self._trimmed = next(self._retirements)
            self._looks = False
            if self._free or self._used:
                self._look_later()
        for segment in unused:
            segment.give_back()

    def _look_later(self) -> None:
        if self._later is not None and not self._looks:
            self._looks = True
            self._later(_KEPT, self.trim)

    @property
    def statistics(self) -> tuple[int, int, int]:
        """The numbers of segments in use, of unused segments, and of bytes of unused segments."""
        with self._lock:
            return len(self._used), sum(map(len, self._free.values())), self._free_bytes

    def _take(self, nbytes: int, holder: Hashable = None) -> _Segment:
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            if free:
                segment = free.pop()
                if not free:
                    del self._free[size]
                self._free_bytes -= size
            else:
                segment = _Segment(next(self._ids), size)
            segment.holders[holder] = 1
            self._used[segment.id] = segment
            self._look_later()
            return segment

    def _retire(self, segment: _Segment) -> None:
        del self._used[segment.id]
        self._reserved.pop(id(segment.map), None)
        if segment.size > self._limit:
            segment.close()
            return
        count = sum(map(len, self._free.values()))
        while self._free_bytes + segment.size > self._limit or count >= _MAX_FREE:
            self._drop_oldest()
            count -= 1
        segment.retired = next(self._retirements)
        self._free.setdefault(segment.size, []).append(segment)
        self._free_bytes += segment.size

    def _drop_oldest(self) -> None:
        """Free the least recently used segment: next payloads resemble the latest ones."""
        size = min(self._free, key=lambda size: self._free[size][0].retired)
        oldest = self._free[size].pop(0)
        if not self._free[size]:
            del self._free[size]
        self._free_bytes -= size
        oldest.close()


class Windows:
    """Segments of other processes, mapped read-only and cached, since they are filled again.

    Mapping a segment anew costs more than half as much as sending the data read from it.

    Args:
        limit: bytes that are kept mapped, and so in memory, even after their owner dropped them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[tuple[int, int], tuple[Hashable, mmap.mmap]] = {}  # the oldest is first
        self._bytes = 0

    def open(self, owner: Hashable, fd: int, used: int) -> memoryview:
        """Return the first `used` bytes of a segment of `owner`; the caller keeps the descriptor.

        Raises ValueError if the segment has fewer.
        """
        status = os.fstat(fd)
        if used > status.st_size:
            raise ValueError("a segment table points outside its segment")
        key = status.st_dev, status.st_ino
        known = self._kept.pop(key, None)
        if known is None:
            mapping = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
            self._bytes += len(mapping)
        else:
            _, mapping = known
        self._kept[key] = owner, mapping
        while self._bytes > self._limit and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))
        return memoryview(mapping)[:used]

    def drop(self, owner: Hashable) -> None:
        """Unmap all segments of `owner`."""
        for key in [key for key, (whose, _) in self._kept.items() if whose == owner]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        _, mapping = self._kept.pop(key)
        size = len(mapping)
        self._bytes -= size
        _aside(size, lambda: _unmap(mapping))


def _copy(view: memoryview, offset: int, source: memoryview) -> int:
    """Copy `source` to `offset`; big ones without the interpreter lock, the biggest by two threads.

    Two, because one core does not saturate the memory of current machines, and more gain nothing.
    """
    nbytes = source.nbytes
    if nbytes < _UNLOCKED or source.readonly:  # the address of a read-only buffer is unknown
        for at in range(0, nbytes, _COPY_STEP):
            step = min(_COPY_STEP, nbytes - at)
            view[offset + at : offset + at + step] = source[at : at + step]
        return nbytes
    import ctypes

    to = ctypes.addressof(ctypes.c_char.from_buffer(view, offset))
    start = ctypes.addressof(ctypes.c_char.from_buffer(source))
    half = nbytes // 2
    other = None
    if nbytes >= _TWO_THREADS:
        rest = functools.partial(ctypes.memmove, to + half, start + half, nbytes - half)
        other = _start("monarch-copy", rest)
    ctypes.memmove(to, start, nbytes if other is None else half)
    if other is not None:
        other.join()
    return nbytes


class _Watch(weakref.ref[Any]):
    """Reports that a mapping was freed, from whichever thread dropped it last."""

    __slots__ = ("ident", "released")

    ident: int
    released: Callable[[int], None]


_watches: dict[int, _Watch] = {}  # by id: a watched object need not be hashable


def _mapping_gone(watch: Any) -> None:
    _watches.pop(id(watch), None)
    if watch.ident:
        watch.released(watch.ident)


def _keep_for_children() -> None:
    """Before a fork by user code, keep the current mappings until their senders' links are lost.

    The child shares this memory for an unknown time, so its segments must not be released for
    reuse.
    """
    for watch in list(_watches.values()):
        watch.ident = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep_for_children)


def open_parts(
    table: bytes | bytearray, fd: int, released: Callable[[int], None], *, decoding: bool = True
) -> tuple[memoryview, list[memoryview]]:
    """Map the payload that `table` describes; return (pickle stream, out-of-band buffers).

    Takes over `fd`. `released(segment id)` is called once, from any thread, when no object refers
    to the mapping; it must not block or take locks. `decoding` promises that the stream is kept
    exactly as long as the payload is decoded, and that large `bytes` are copied in that time.

    Raises ValueError for a table that does not fit the segment.
    """
    try:
        ident, used, count = _TABLE_HEAD.unpack_from(table)
        if len(table) != _TABLE_HEAD.size + count * _PART.size or count < 1:
            raise ValueError(f"segment table of {len(table)} bytes for {count} parts")
        parts = list(_PART.iter_unpack(memoryview(table)[_TABLE_HEAD.size :]))
        if used > os.fstat(fd).st_size or any(off + n > used for off, n, _ in parts):
            raise ValueError("segment table points outside its segment")
        crowded = len(_watches) >= _MAX_MAPPINGS
        warm = decoding and not crowded and any(bulk for *_, bulk in parts)
        shared = _warm_map(fd) if warm else None
        if shared is not None and all(bulk for *_, bulk in parts[1:]):
            # All buffers are copied during decoding, so a mapping of their own is not needed. The
            # stream lives as long as the decoding, so its end reports the end of the decoding.
            offset, length, _ = parts[0]
            mapping: Any = _Stream(shared[offset : offset + length])
        else:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            mapping = mmap.mmap(fd, used, flags=mmap.MAP_PRIVATE, prot=protection)
    except struct.error as error:
        raise ValueError(f"segment table: {error}") from None
    finally:
        os.close(fd)
    if crowded:
        whole = memoryview(bytearray(mapping))
        mapping.close()
        released(ident)
    else:
        watch = _Watch(mapping, _mapping_gone)
        watch.ident = ident
        watch.released = released
        _watches[id(watch)] = watch
        whole = memoryview(mapping)
    if isinstance(mapping, _Stream):
        assert shared is not None
        return whole, [shared[offset : offset + length] for offset, length, _ in parts[1:]]
    stream, *buffers = [
        (shared if bulk and shared is not None else whole)[offset : offset + length]
        for offset, length, bulk in parts
    ]
    return stream, buffers


class _Stream(bytearray):
    """A copied pickle stream that can be watched by a weak reference."""


def _warm_map(fd: int) -> memoryview | None:
    """Return a cached mapping of a whole segment, so that copies out of it cause no page faults.

    Only for parts that are copied before the segment is released: the sender writes the next
    payload into the same memory.
    """
    status = os.fstat(fd)
    if not _WARM_LEAST <= status.st_size <= _WARM_LIMIT:
        return None
    key = (status.st_dev, status.st_ino)
    with _warm_lock:
        mapping = _warm.pop(key, None)
        if mapping is None:
            mapping = memoryview(mmap.mmap(fd, status.st_size))
        _warm[key] = mapping  # the newest is last
        while sum(view.nbytes for view in _warm.values()) > _WARM_LIMIT:
            del _warm[next(iter(_warm))]
    return mapping


_WARM_LEAST = 1 << 20
_WARM_LIMIT = 128 << 20
_warm: dict[tuple[int, int], memoryview] = {}
_warm_lock = threading.Lock()
