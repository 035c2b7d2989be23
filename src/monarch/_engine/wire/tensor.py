"""Torch tensors in payloads: their memory is sent out of band, and they are rebuilt on the CPU.

A dense tensor is sent as its elements (a view of a large storage sends the view, not the storage)
and arrives contiguous. On one host the received tensor refers to the mapped segment, without a
copy. Tensors of other devices are copied to the CPU first. A tensor that is not dense (sparse,
quantised, nested) is pickled by torch itself. Sending never imports torch; receiving a tensor does.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["tensor_reducer"]

_SHORT = 256  # bytes which are copied sooner than a buffer is made of them


def tensor_reducer(kind: type) -> Callable[[Any], Any] | None:
    """Return the reducer for `kind` if it is torch's plain tensor class, else None."""
    torch: Any = sys.modules.get("torch")
    return _reduce if torch is not None and kind is torch.Tensor else None


def _reduce(tensor: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return NotImplemented
    if tensor.__dict__:  # attributes set by the user, which torch pickles as well
        return NotImplemented
    if tensor.is_nested:
        return NotImplemented
    with torch._C._DisableTorchDispatch():  # a mesh of distributed tensors may be active
        plain = tensor.data
        if type(plain) is not torch.Tensor:
            return NotImplemented
        if not (plain.is_cpu and plain.is_contiguous()) or plain.is_conj() or plain.is_neg():
            plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    nbytes = plain.numel() * plain.element_size()
    import ctypes  # already loaded by torch

    if not nbytes:
        buffer: Any = b""
    elif nbytes <= _SHORT:
        buffer = bytearray(ctypes.string_at(plain.data_ptr(), nbytes))
    else:
        memory: Any = (ctypes.c_char * nbytes).from_address(plain.data_ptr())
        memory.owner = plain  # the buffer keeps the tensor alive, the tensor its memory
        buffer = pickle.PickleBuffer(memory)
    return _rebuild, (buffer, plain.dtype, tuple(plain.shape), tensor.requires_grad)


def _rebuild(buffer: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    torch: Any = sys.modules.get("torch") or importlib.import_module("torch")
    with torch._C._DisableTorchDispatch():
        if not memoryview(buffer).nbytes:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            tensor = torch.frombuffer(buffer, dtype=dtype).reshape(shape)
        return tensor.requires_grad_() if requires_grad else tensor
