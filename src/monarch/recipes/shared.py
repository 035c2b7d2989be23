"""A large object that is put once, and read by processes on all hosts.

The object is pickled once, with its arrays beside the pickle (`pickle.PickleBuffer`), into one
piece of memory: a table of offsets, the pickle, the arrays, each aligned for vector instructions. A
handle is small and can be sent anywhere. A process of the same host maps that memory, so that its
arrays are views of the one copy. A process of another host copies it once by RDMA, and keeps it as
long as something of it is in use.

The mapping is reached through ``/proc/PID/fd``. The file has no name, so nothing is left behind
when a process is killed; and it is sealed, so that no process can change what the others see. Where
it cannot be reached (another user, another namespace of pids, no ``memfd_create``) the content is
copied, which is only slower.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import pickle
import secrets
import struct
import sys
import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import cloudpickle

from monarch import _spi
from monarch.rdma import RDMABuffer

__all__ = ["Shared"]

T = TypeVar("T")
_ALIGN = 64
_KEY = 16  # bytes: the memory begins with a key, then the number of parts, then the table of them
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")  # offset and size of a part: the pickle, then its buffers
_HEAD = _KEY + _COUNT.size
_WRITE = 1 << 30  # bytes at a time


class Shared(Generic[T]):
    """A handle on an object that does not change: `get` returns it, in any process.

    Args:
        value: anything that cloudpickle takes. Its numpy arrays and CPU tensors, at any depth, are
            not copied by readers of the same host.

    Blocks while it copies the object, once. The copy lives until no process holds a handle or an
    object that came from one, or until the actor that made it exits (for a script: the script).

    >>> import numpy as np
    >>> from monarch.actor import Actor, endpoint, this_host
    >>> class Reader(Actor):
    ...     @endpoint
    ...     def total(self, shared): return float(shared.get()["table"].sum())
    >>> shared = Shared({"table": np.ones(1000), "name": "ones"})
    >>> procs = this_host().spawn_procs({"procs": 2})
    >>> procs.spawn("readers", Reader).total.call(shared).get().values()
    [1000.0, 1000.0]
    >>> procs.stop().get()

    Arrays that `get` returns are read-only. A tensor cannot be: writing to it changes this
    process's view and no other.
    """

    def __init__(self, value: T) -> None:
        self._key = secrets.token_bytes(_KEY)
        self._content: _Content | None
        self._content, self._place = _put(value, self._key)
        self._size = len(self._content.memory)
        self._buffer = RDMABuffer(self._content.memory, read_only=True, release="last-handle")
        _contents[self._key] = self._content

    @property
    def nbytes(self) -> int:
        """The size of the copy, in bytes."""
        return self._size

    def get(self, *, timeout: float = 60.0) -> T:
        """Return the object; copy it from another host the first time.

        Two calls return different objects over the same memory. Raises `RdmaError`: `RdmaTimeout`
        after so many seconds, `RdmaOwnerLost` if the actor that made it has exited.
        """
        if self._content is None:
            self._content = _contents.get(self._key)
        if self._content is None:
            memory = _map(self._place, self._key, self._size)
            if memory is None:
                memory = mmap.mmap(-1, self._size)
                self._buffer.read_into(memory, timeout=timeout).get()
            self._content = _contents.setdefault(self._key, _Content(memory))
        value: T = self._content.load()
        return value

    def __repr__(self) -> str:
        return f"<Shared, {self._size} bytes>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_content": None}


class _Place(NamedTuple):
    """Where the processes of a host find the file without a name."""

    pid: int
    fd: int
    inode: int


class _Content:
    """The memory of an object in this process; `fd` is open as long as others may map it."""

    def __init__(self, memory: mmap.mmap, fd: int | None = None) -> None:
        self.memory = memory
        if fd is not None:
            weakref.finalize(self, os.close, fd)

    def load(self) -> Any:
        """Make the object anew, with views of the memory."""
        view = memoryview(self.memory)
        (count,) = _COUNT.unpack_from(view, _KEY)
        table = view[_HEAD : _HEAD + count * _ENTRY.size]
        parts = [view[offset : offset + size] for offset, size in _ENTRY.iter_unpack(table)]
        return pickle.loads(parts[0], buffers=parts[1:])


_contents: weakref.WeakValueDictionary[bytes, _Content] = weakref.WeakValueDictionary()


# -- writing ---------------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):
    """Keeps arrays and tensors out of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _is_shared(obj):
            if (plain := _spi.plain_tensor(obj)) is None:
                return super().reducer_override(obj)
            raw = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape))
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(obj) is numpy.ndarray and not obj.dtype.hasobject:
            raw = numpy.ascontiguousarray(obj).reshape(-1).view(numpy.uint8)
            return _array, (pickle.PickleBuffer(raw), obj.dtype, obj.shape)
        return super().reducer_override(obj)


def _is_shared(tensor: Any) -> bool:
    """Whether the copy in shared memory is all of a tensor, if its values are in memory."""
    return bool(tensor.is_cpu and not tensor.requires_grad and tensor.numel())


def _array(data: memoryview, dtype: Any, shape: tuple[int, ...]) -> Any:
    import numpy as np

    flat: Any = np.frombuffer(data.toreadonly(), np.uint8)
    return flat.view(dtype).reshape(shape)


def _tensor(data: memoryview, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _put(value: Any, key: bytes) -> tuple[_Content, _Place | None]:
    """Write the object to memory; return that, and where other processes find it."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [file.getbuffer(), *(buffer.raw() for buffer in buffers)]
    end = _HEAD + len(parts) * _ENTRY.size
    head = bytearray(key + _COUNT.pack(len(parts)))
    pieces: list[tuple[int, memoryview]] = []
    for part in parts:
        start = -(-end // _ALIGN) * _ALIGN
        end = start + len(part)
        head += _ENTRY.pack(start, len(part))
        pieces.append((start, part))
    pieces.append((0, memoryview(head)))
    if sys.platform != "linux":
        memory = mmap.mmap(-1, end)
        for start, piece in pieces:
            memory[start : start + len(piece)] = piece
        return _Content(memory), None
    fd = os.memfd_create("monarch-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, end)
        for start, piece in pieces:
            at = 0
            while at < len(piece):
                at += os.pwrite(fd, piece[at : at + _WRITE], start + at)
        fcntl.fcntl(
            fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
        )
        memory = mmap.mmap(fd, end, access=mmap.ACCESS_COPY)
    except BaseException:
        os.close(fd)
        raise
    return _Content(memory, fd), _Place(os.getpid(), fd, os.fstat(fd).st_ino)


# -- reading ---------------------------------------------------------------------------------------


def _map(place: _Place | None, key: bytes, size: int) -> mmap.mmap | None:
    """Map the memory of a process of this host; None if that is not possible."""
    if place is None or sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if (status.st_ino, status.st_size) == (place.inode, size) and os.pread(
                fd, _KEY, 0
            ) == key:
                return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
    return None
