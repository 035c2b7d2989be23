"""`Memory`: the address and size of a user's object, and what keeps its bytes there.

Every object whose address can be found is accepted: objects with the buffer protocol (bytearray,
mmap, arrays, memoryviews of every format, numpy), numpy arrays whose dtype has no buffer format,
and torch tensors of any device, if the program has imported torch. The shape may be any, but the
memory must be contiguous: a transfer has one address and one length.

While a `Memory` exists its object can neither be freed nor resized, since the exporter counts the
view. (Tensors are the exception: a program can resize the storage of a tensor that is kept alive.
`stale` detects that.) Read-only memory is marked as such and never written. This module copies no
bytes and locks no pages.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import sys
from typing import Any

from monarch import _spi

__all__ = ["CPU", "Memory", "memory_of"]

CPU = "cpu"

_addressof = ctypes.addressof
_from_buffer = ctypes.c_char.from_buffer


class Memory:
    """`nbytes` at `address` of `device` ("cpu", "cuda:0", ...), kept alive by `pin`."""

    __slots__ = ("address", "device", "nbytes", "pin", "writable")

    def __init__(
        self, address: int, nbytes: int, writable: bool, pin: Any, device: str = CPU
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.writable = writable
        self.pin = pin
        self.device = device

    @property
    def stale(self) -> bool:
        """Whether the object has moved or shrunk its memory nevertheless."""
        return False


class _TensorMemory(Memory):
    """The memory of a tensor, which is its own `pin`."""

    __slots__ = ()

    @property
    def stale(self) -> bool:
        tensor = self.pin
        storage = tensor.untyped_storage()
        end: int = tensor.storage_offset() * tensor.element_size() + self.nbytes
        return bool(tensor.data_ptr() != self.address or end > storage.nbytes())


def memory_of(data: Any) -> Memory:
    """Return the memory of `data`, which stays valid as long as the result exists.

    Raises ValueError for memory that is not contiguous, and for objects without memory that can be
    shared. A size of zero is allowed.
    """
    if type(data) is bytearray:  # first, since it is the most common
        nbytes = len(data)
        if not nbytes:
            return Memory(0, 0, True, data)
        held = _from_buffer(data)
        return Memory(_addressof(held), nbytes, True, held)
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _of_tensor(data)
    if type(data) is memoryview:
        return _of_view(data, data)
    if isinstance(data, Memory):
        return data
    try:
        view = memoryview(data)
    except (TypeError, ValueError, BufferError):
        return _of_view(_bytes_of_array(data), data)
    return _of_view(view, data)


def _of_view(view: memoryview, data: Any) -> Memory:
    if not view.c_contiguous or _has_objects(view):
        raise ValueError(_layout(data))
    nbytes = view.nbytes
    if not nbytes:
        return Memory(0, 0, not view.readonly, view)
    if view.readonly:
        held = _ReadOnly(view)
        return Memory(held.address, nbytes, False, held)
    writable = _from_buffer(view)
    return Memory(_addressof(writable), nbytes, True, writable)


def _has_objects(view: memoryview) -> bool:
    """Whether it holds addresses of Python objects, which are invalid in other processes."""
    return view.format != "B" and (
        view.format[-1:] == "O" or getattr(getattr(view.obj, "dtype", None), "hasobject", False)
    )


def _bytes_of_array(data: Any) -> memoryview:
    """Return the bytes of a numpy array whose dtype has no buffer format, such as dates."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(data, numpy.ndarray) or not data.flags.c_contiguous:
        raise ValueError(_layout(data))
    return memoryview(data.reshape(-1).view(numpy.uint8))


def _of_tensor(tensor: Any) -> Memory:
    try:
        plain = _spi.plain_tensor(tensor)
    except pickle.PicklingError as error:
        raise ValueError(f"{_layout(tensor)}: {error}") from None
    if plain is None:
        raise ValueError(_refused(f"a tensor ({tensor.layout}) whose values are not its memory"))
    if not plain.is_contiguous():
        raise ValueError(_layout(tensor))
    nbytes: int = plain.numel() * plain.element_size()
    address: int = plain.data_ptr() if nbytes else 0
    if nbytes and address != tensor.data_ptr():
        raise ValueError(
            f"{_layout(tensor)}: its elements are computed when read, clone() it first"
        )
    device = CPU if plain.is_cpu else str(plain.device)
    # (Torch forgets that an array or a file is read-only. It never resizes memory of others.)
    writable = not nbytes or plain.untyped_storage().resizable() or _is_writable(address, nbytes)
    return _TensorMemory(address, nbytes, writable, plain, device)


def _is_writable(address: int, nbytes: int) -> bool:
    """Whether the pages there may be written; elsewhere than on Linux they are taken to be."""
    if sys.platform != "linux":
        return True
    ends = (at & -mmap.PAGESIZE for at in (address, address + nbytes - 1))
    if not any(_madvise(page, mmap.PAGESIZE, _POPULATE_WRITE) for page in ends):
        return True
    # One may not, or the kernel is older than 5.14. This takes a millisecond.
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, rights = line.split(None, 2)[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start < address + nbytes and address < end and rights[1] != "w":
                return False
    return True


def _layout(data: Any) -> str:
    kind: type[Any] = type(data)  # pyright: ignore[reportUnknownVariableType] - it is any
    shape = getattr(data, "shape", None)
    strides = getattr(data, "strides", None)
    if strides is None and callable(getattr(data, "stride", None)):
        strides = data.stride()
    what = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if shape is not None:
        what += f" of shape {tuple(shape)}"
    if strides is not None and not callable(strides):
        what += f", strides {tuple(strides)}"
    return _refused(what)


def _refused(what: str) -> str:
    return (
        "RDMABuffer only supports 1d contiguous torch.Tensor or 1d c-contiguous memoryview, "
        "and other contiguous memory: arrays of any shape, bytearray, bytes, mmap. "
        f"Got: {what}"
    )


_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: make the pages ready to be written


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the C API, the only way to the address of read-only memory."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)
_release.restype = None


class _ReadOnly:
    """A view of read-only memory, held as long as this object exists."""

    __slots__ = ("_buffer", "address")

    def __init__(self, view: memoryview) -> None:
        self._buffer = _PyBuffer()
        _get_buffer(view, ctypes.byref(self._buffer), 0)  # 0: PyBUF_SIMPLE; raises if refused
        self.address: int = self._buffer.buf or 0

    def __del__(self, _release: Any = _release, _byref: Any = ctypes.byref) -> None:
        _release(_byref(self._buffer))
