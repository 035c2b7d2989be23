"""Torch tensors and storages in payloads: memory is sent out of band, and rebuilt on the CPU.

A dense tensor is sent as its elements (a view of a large storage sends the view, not the storage)
and arrives contiguous. On one host the received tensor refers to the mapped segment, without a
copy. Tensors of other devices are copied to the CPU first. Sending never imports torch; receiving a
tensor does.

Many tensors of torch have values that are not the bytes at their address. So `plain_tensor` knows
the few kinds whose values are, by torch's dispatch keys, and all that moves tensors as memory asks
it: messages, `monarch.rdma`, `monarch.training`, the processes of a mesh of tensors. All other
kinds (sparse, quantised, nested, meta, subclasses, tensors inside of `torch.func`) are pickled by
torch itself, or refused. A list of the kinds to exclude was rejected: torch gets new ones.

A storage is sent as its bytes, and a typed one as its storage and dtype: what torch pickles of a
bare storage cannot be loaded. A storage that several typed ones of a message have is sent once, and
they share it at the receiver. A tensor does not share memory with other parts of its message.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["plain_tensor", "tensor_reducer"]

_SHORT = 256  # bytes which are copied sooner than a buffer is made of them
_DENSE = (
    *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
    "ADInplaceOrView",
)
_LAZY = ("Conjugate", "Negative", "ZeroTensor")  # their values are computed when they are read


def tensor_reducer(kind: type) -> Callable[[Any], Any] | None:
    """Return the reducer for torch's plain tensors and its storages; None for other classes."""
    reducer = _REDUCERS.get(kind.__name__)
    if reducer is None or getattr(sys.modules.get("torch"), kind.__name__, None) is not kind:
        return None
    return reducer


@functools.lru_cache(maxsize=1)
def _keys(torch: Any) -> tuple[int, int, int]:
    """Return the bits of unknown dispatch keys, of those of `_LAZY`, and of ``ZeroTensor``."""
    key, members = torch._C.DispatchKeySet, torch._C.DispatchKey.__members__
    dense, lazy = (
        functools.reduce(int.__or__, (key(members[name]).raw_repr() for name in names))
        for names in (_DENSE, _LAZY)
    )
    return ~(dense | lazy), lazy, key(members["ZeroTensor"]).raw_repr()


def plain_tensor(tensor: Any) -> Any:
    """Return a tensor of the same values, outside of autograd, that are the bytes at its address.

    It shares the memory of `tensor` unless the values are computed when they are read: zeros
    without memory, a conjugate, a negative. Return None for a tensor of a kind that is not known to
    have its values in memory. Raises pickle.PicklingError if the memory was freed or cut.
    """
    torch: Any = sys.modules["torch"]
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    unknown, lazy, zeros = _keys(torch)
    if keys & unknown:
        return None
    with torch._C._DisableTorchDispatch():  # a mesh of distributed tensors may be active
        plain = tensor.data
        if not keys & zeros:
            _check_memory(plain)
        return plain.clone() if keys & lazy else plain


def _check_memory(plain: Any) -> None:
    last = plain.numel() - 1
    if last < 0:
        return
    if not plain.is_contiguous():
        steps = zip(plain.shape, plain.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
    needed = (plain.storage_offset() + last + 1) * plain.element_size()
    nbytes = plain.untyped_storage().nbytes()
    if needed > nbytes:
        raise pickle.PicklingError(
            f"a tensor of shape {tuple(plain.shape)} has no memory for its values: its storage has "
            f"{nbytes} of {needed} bytes, as it was freed or resized; clone the tensor before that"
        )


def _reduce(tensor: Any) -> Any:
    torch: Any = sys.modules["torch"]
    plain = plain_tensor(tensor)
    if plain is None or tensor.__dict__:  # attributes set by the user are pickled by torch, too
        return NotImplemented
    if not (plain.is_cpu and plain.is_contiguous()):
        with torch._C._DisableTorchDispatch():
            plain = plain.cpu().contiguous()
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
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            tensor = torch.frombuffer(buffer, dtype=dtype).reshape(shape)
        return tensor.requires_grad_() if requires_grad else tensor


def _reduce_storage(storage: Any) -> Any:
    nbytes: int = storage.nbytes()
    if storage.device.type == "meta":
        return _rebuild_without_memory, (nbytes,)
    plain = storage.cpu()
    buffer: Any = b""
    if nbytes:
        import ctypes  # see above

        memory: Any = (ctypes.c_char * nbytes).from_address(plain.data_ptr())
        memory.owner = plain
        buffer = pickle.PickleBuffer(memory)
    return _rebuild_storage, (buffer, nbytes)


def _rebuild_storage(buffer: Any, nbytes: int) -> Any:
    torch: Any = sys.modules.get("torch") or importlib.import_module("torch")
    return _rebuild(buffer, torch.uint8, (nbytes,), False).untyped_storage()


def _rebuild_without_memory(nbytes: int) -> Any:
    torch: Any = sys.modules.get("torch") or importlib.import_module("torch")
    return torch.UntypedStorage(nbytes, device="meta")


def _reduce_typed(storage: Any) -> Any:
    return _rebuild_typed, (storage._untyped_storage, storage.dtype)


def _rebuild_typed(storage: Any, dtype: Any) -> Any:
    torch: Any = sys.modules["torch"]  # its storage was loaded before
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


_REDUCERS = {
    "Tensor": _reduce,
    "TypedStorage": _reduce_typed,
    "UntypedStorage": _reduce_storage,
}
