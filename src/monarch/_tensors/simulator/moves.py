"""Moves of tensors to devices that the script's machine lacks.

``tensor.to("cuda")`` asks the driver which GPU that is, before it becomes an operation. While a
simulated mesh is active, these methods become the operation directly, with the first GPU: each
simulated process has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from monarch._tensors.core.absent_device import CPU
from monarch._tensors.tensor import Tensor

__all__ = ["Moves"]


_PARSER: Any = vars(torch._C)["_nn"]


class Moves(TorchFunctionMode):  # type: ignore[misc]  # torch is optional
    """Issues ``to``, ``cuda`` and ``cpu`` of distributed tensors without asking a driver."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        move = _MOVES.get(func)
        if move is not None and type(args[0]) is Tensor:
            return move(*args, **kwargs)
        return func(*args, **kwargs)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    other = args[0] if args else kwargs.get("other")
    if type(other) is Tensor:
        return _moved(tensor, other.device, other.dtype, kwargs.get("copy", False))
    copy = bool(kwargs.pop("copy", False))
    device, dtype, non_blocking, memory_format = _PARSER._parse_to(*args, **kwargs)
    return _moved(tensor, device, dtype, copy, non_blocking, memory_format)


def _cuda(tensor: Tensor, device: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    index = device if isinstance(device, int) else torch.device(device or "cuda").index
    return _moved(tensor, torch.device("cuda", index or 0))


def _cpu(tensor: Tensor, *_args: Any, **_kwargs: Any) -> Any:
    return _moved(tensor, CPU)


def _moved(
    tensor: Tensor,
    device: torch.device | None,
    dtype: torch.dtype | None = None,
    copy: bool = False,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Any:
    """Return the tensor with this device and type; itself if it has them already."""
    device = tensor.device if device is None else device
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    dtype = dtype or tensor.dtype
    if device == tensor.device and dtype is tensor.dtype and memory_format is None and not copy:
        return tensor
    return torch.ops.aten._to_copy.default(
        tensor, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format
    )


_MOVES: dict[Any, Any] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
}
