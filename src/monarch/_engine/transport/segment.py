"""Shared-memory segments: how big payloads cross a process border with one copy.

The sender copies a payload once into a segment (an unlinked memory file) and passes the
descriptor with the frame; every receiver maps it privately, so what it gets is writable without
touching anybody else's copy, and no byte is copied until it writes. When the last object that
looks into a mapping is gone, the receiver says so (a RELEASE frame), and the segment goes back to
the sender's pool, its pages still warm: filling a warm segment is nine times faster than a fresh
one. A receiver that dies releases by losing its link.

The pool keeps at most `limit` bytes of unused segments, those last used. Segments in use are
bounded by what receivers hold. A process that already has `_MAX_MAPPINGS` live mappings copies
instead of mapping, since the kernel bounds mappings and descriptors.

Rejected: named shared memory (a name must be cleaned up after a SIGKILL; a descriptor is not),
one ring buffer per link (a receiver that keeps one array would pin the whole ring).
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
_COPY_STEP = 8 << 20  # one memory copy holds the interpreter lock: not longer than about 1 ms
_UNLOCKED = 1 << 20
_TWO_THREADS = 16 << 20
_MAX_MAPPINGS = 4096
_RESERVED = "reserved"  # a holder
_TAKES_LONG = 16 << 20
_MAX_FREE = 64  # unused segments kept: each holds two descriptors


class _Segment:
    __slots__ = ("fd", "holders", "id", "map", "retired", "size", "table")

    def __init__(self, ident: int, size: int) -> None:
        self.id = ident
        self.size = size
        self.fd = memory_file(size)
        try:
            self.map = mmap.mmap(self.fd, size)
        except BaseException:  # it takes another descriptor, and address space
            os.close(self.fd)
            raise
        if size >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
            # An optimisation the kernel may refuse (huge pages configured away); nothing is lost.
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.holders: Counter[Hashable] = Counter()
        self.retired = 0  # the when of its last use, while it is unused
        self.table = b""

    def close(self) -> None:
        _aside(self.size, self._close)

    def _close(self) -> None:
        _unmap(self.map)
        os.close(self.fd)


def _aside(nbytes: int, action: Callable[[], None]) -> None:
    """Give memory back, in a thread if that takes milliseconds: a gigabyte takes the kernel 200."""
    if nbytes < _TAKES_LONG or _start("monarch-unmap", action) is None:
        action()


def _start(name: str, action: Callable[[], object]) -> threading.Thread | None:
    """A thread that runs `action`; None if there can be none: a limit, or the interpreter ends."""
    thread = threading.Thread(target=action, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _unmap(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # who still looks into it keeps the mapping
        mapping.close()


def _size_class(size: int) -> int:
    """Round up to one of four steps per power of two, so that segments are found again."""
    size = max(size, _PAGE)
    step = max(_PAGE, 1 << (size.bit_length() - 3))
    return -(-size // step) * step


class SegmentPool:
    """The segments this process fills. Thread-safe.

    Args:
        limit: bytes of unused segments to keep warm.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.RLock()  # a finaliser may send while its thread is in here
        self._ids = itertools.count(1)
        self._free: dict[int, list[_Segment]] = {}  # by size, the oldest first
        self._retirements = itertools.count(1)
        self._free_bytes = 0
        self._used: dict[int, _Segment] = {}
        self._reserved: dict[int, tuple[_Segment, object]] = {}  # of those, by their mappings

    def store(self, payload: Payload) -> _Segment:
        """The segment that holds `payload`, copied on first use. Hold it with `hold` per send.

        The creator has one hold of its own under the key None; drop it with `release(None, id)`
        after the last send.
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
            at = -(-at // 64) * 64  # aligned as allocators align, vector loads want it
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
        """Memory of a segment that is filled by other means than `store`; held as long as this is.

        Whoever passes the segment on holds it before (`reserved`, `hold`).
        """
        segment = self._take(nbytes, _RESERVED)
        memory = memoryview(segment.map)[:nbytes]
        ident = segment.id
        gone = weakref.ref(memory, lambda _: self.release(_RESERVED, ident))
        self._reserved[id(segment.map)] = segment, gone
        return memory

    def reserved(self, memory: memoryview) -> _Segment | None:
        """The segment that `reserve` gave this memory of, if it did."""
        segment, _ = self._reserved.get(id(memory.obj), (None, None))
        return segment

    def hold(self, holder: Hashable, segment: _Segment) -> None:
        with self._lock:
            segment.holders[holder] += 1

    def release(self, holder: Hashable, ident: int) -> None:
        """`holder` no longer uses segment `ident`. Unknown ids are ignored: links may be late."""
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
        """Release everything `holder` held: its process or link is gone."""
        with self._lock:
            for segment in [s for s in list(self._used.values()) if holder in s.holders]:
                del segment.holders[holder]
                if not segment.holders:
                    self._retire(segment)

    def trim(self) -> None:
        """Give all unused segments back to the system."""
        with self._lock:
            for segments in self._free.values():
                for segment in segments:
                    segment.close()
            self._free.clear()
            self._free_bytes = 0

    @property
    def statistics(self) -> tuple[int, int, int]:
        """Segments in use, unused segments, bytes of unused segments."""
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
        """Of the unused: a program sends again what is like the last it has sent."""
        size = min(self._free, key=lambda size: self._free[size][0].retired)
        oldest = self._free[size].pop(0)
        if not self._free[size]:
            del self._free[size]
        self._free_bytes -= size
        oldest.close()


class Windows:
    """Segments of other processes, mapped to be read, and kept: they are filled again and again.

    Mapping anew costs more than half as much as sending what is read.

    Args:
        limit: bytes that are kept mapped, and so in memory, even if their owner is done with them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[tuple[int, int], tuple[Hashable, mmap.mmap]] = {}  # the oldest first
        self._bytes = 0

    def open(self, owner: Hashable, fd: int, used: int) -> memoryview:
        """The first `used` bytes of a segment of `owner`, whose descriptor the caller keeps.

        Raises ValueError if it has fewer.
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
        """Keep nothing of `owner` any more."""
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
    if nbytes < _UNLOCKED or source.readonly:  # (a read-only buffer does not give its address)
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
    """Reports that a mapping is gone, from whichever thread dropped it last."""

    __slots__ = ("ident", "released")

    ident: int
    released: Callable[[int], None]


_watches: dict[int, _Watch] = {}  # by id: what is watched need not be hashable


def _mapping_gone(watch: Any) -> None:
    _watches.pop(id(watch), None)
    if watch.ident:
        watch.released(watch.ident)


def _keep_for_children() -> None:
    """Before a fork by user code: the child sees the same memory, for longer than we know.

    So what is mapped now is not released for reuse; it goes with the link to its sender.
    """
    for watch in list(_watches.values()):
        watch.ident = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep_for_children)


def open_parts(
    table: bytes | bytearray, fd: int, released: Callable[[int], None], *, decoding: bool = True
) -> tuple[memoryview, list[memoryview]]:
    """Map the payload that `table` describes: (pickle stream, out-of-band buffers).

    Takes over `fd`. `released(segment id)` is called once, from any thread, when nothing looks
    into the mapping any more; it must not block or take locks. `decoding` says that the stream is
    kept exactly as long as the payload is decoded, and large `bytes` are copied meanwhile.

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
            # Everything is copied while it is decoded: nothing of its own to map. The stream, which
            # lives as long as the decoding, says when that is over.
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
    """A copied pickle stream that can be watched."""


def _warm_map(fd: int) -> memoryview | None:
    """A mapping of a whole segment that is kept, so that copies out of it fault in no pages.

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
