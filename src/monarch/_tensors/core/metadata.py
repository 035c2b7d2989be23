"""`Metadata`: what a client knows of a distributed tensor: shape, strides, dtype, device.

Equal metadata are one object, so that the key of an operation hashes and compares identities.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch._tensors.core.absent_device import client_device

__all__ = ["Metadata", "metadata_of"]

_SMALL = 64 << 10  # bytes
_KEPT = 1 << 16  # distinct metadata after which the table starts again; equality is only a speed-up


class Metadata:
    """Shape, strides and offset (in elements), dtype, device and layout of a tensor.

    `is_small` is whether a few such tensors may wait for their deletion. `shown` is the device that
    the client's object has for torch.
    """

    __slots__ = ("device", "dtype", "is_small", "layout", "offset", "shown", "size", "stride")

    def __init__(
        self,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: torch.layout = torch.strided,
    ) -> None:
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.device = device
        self.shown = client_device(device)
        self.layout = layout
        self.is_small = self.nbytes() <= _SMALL

    def nbytes(self) -> int:
        """Return the bytes of its elements, if each is stored once."""
        count = 1
        for length in self.size:
            count *= length
        size: int = self.dtype.itemsize
        return count * size

    def extent(self) -> int:
        """Return the number of elements that a storage needs for it, from the storage's start."""
        if 0 in self.size:
            return self.offset
        last = sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        return self.offset + last + 1

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.size, self.stride, self.offset, self.dtype, self.device, self.layout)
        return interned, fields

    def __repr__(self) -> str:
        return f"Metadata({list(self.size)}, {self.dtype}, {self.device})"


_interned: dict[tuple[Any, ...], Metadata] = {}


def metadata_of(tensor: torch.Tensor) -> Metadata:
    """Return the metadata of a tensor, real or fake.

    >>> metadata_of(torch.zeros(2, 3))
    Metadata([2, 3], torch.float32, cpu)
    >>> metadata_of(torch.zeros(2, 3)) is metadata_of(torch.ones(2, 3))
    True
    """
    return interned(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
    )


def interned(*key: Any) -> Metadata:
    """Return the one object with these fields."""
    found = _interned.get(key)
    if found is None:
        if len(_interned) >= _KEPT:
            _interned.clear()
        found = _interned.setdefault(key, Metadata(*key))  # two threads get one object
    return found
