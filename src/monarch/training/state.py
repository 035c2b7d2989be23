"""States: a nested state dict as tensors and a rest, in memory, and read from another process.

`pack` takes a state dict apart: its tensors, and the pickled rest, in which a number stands for
each tensor. So tensors move as memory, without pickling or copies, and everything else (step
numbers, learning rates, parameter groups, tensors that are not plain memory) travels along.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch

from monarch import _spi
from monarch.rdma import RDMAAction, RDMABuffer

__all__ = ["Lent", "Packed", "lend", "pack", "read", "unpack"]


class Packed(NamedTuple):
    """A state dict: `rest` is pickled, with the index of a tensor for each tensor."""

    rest: bytes
    tensors: list[torch.Tensor]

    def clone(self) -> Packed:
        """Return a copy in main memory that nobody else changes."""
        copies = [torch.empty_like(each, device="cpu").copy_(each) for each in self.tensors]
        return Packed(self.rest, copies)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor) or (plain := _spi.plain_tensor(obj)) is None:
            return None
        self.tensors.append(plain.contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed) -> None:
        super().__init__(io.BytesIO(packed.rest))
        self._tensors = packed.tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def pack(state: dict[str, Any]) -> Packed:
    """Take a state dict apart. Its tensors are not copied if they are contiguous."""
    pickler = _Pickler(file := io.BytesIO())
    pickler.dump(state)
    return Packed(file.getvalue(), pickler.tensors)


def unpack(packed: Packed) -> dict[str, Any]:
    """Put a state dict together again. Its tensors are those of `packed`, not copies."""
    state: dict[str, Any] = _Unpickler(packed).load()
    return state


class Lent(NamedTuple):
    """Memory that others read: `manifest` describes it."""

    manifest: bytes
    buffers: list[RDMABuffer]
    packed: Packed

    def drop(self) -> None:
        """End the permission to read."""
        for buffer in self.buffers:
            buffer.drop()


def lend(packed: Packed) -> Lent:
    """Register the tensors of a packed state, so that others can read them with the manifest."""
    buffers = [
        RDMABuffer(_bytes(each), read_only=True) if each.numel() else None
        for each in packed.tensors
    ]
    shapes = [(tuple(each.shape), each.dtype) for each in packed.tensors]
    manifest = pickle.dumps((packed.rest, shapes, buffers))
    return Lent(manifest, [each for each in buffers if each is not None], packed)


def read(manifest: bytes, timeout: float) -> Packed:
    """Read a state that another process lends into new memory. Raises `RdmaError`."""
    rest, shapes, buffers = pickle.loads(manifest)
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    action = RDMAAction()
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not None:
            action.read_remote(_bytes(tensor), buffer)
    action.submit(timeout=timeout).get()
    return Packed(rest, tensors)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
