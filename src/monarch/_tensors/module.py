"""Modules of torch on a mesh: each parameter and buffer becomes a distributed tensor.

A module is changed in place, as `torch.nn.Module.to` does, so that code which holds the module or a
part of it goes on working. Its parameters are new objects: an optimizer is made after the move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch._tensors.tensor import Tensor

__all__ = ["move"]


def move(module: torch.nn.Module, moved: Callable[[torch.Tensor], Tensor]) -> None:
    """Replace parameters, buffers and gradients of `module` by what `moved` returns for them.

    A tensor that is in several places stays one tensor. If `moved` raises, the module is unchanged.
    """
    found: dict[int, torch.Tensor] = {}  # by the identity of the tensor that it replaces
    holders: list[dict[str, Any]] = []
    for part in module.modules():
        holders += [part._parameters, part._buffers]
    with torch.no_grad():
        for holder in holders:
            for tensor in holder.values():
                if tensor is not None and id(tensor) not in found:
                    found[id(tensor)] = _replacement(tensor, moved)
    for holder in holders:
        for name, tensor in holder.items():
            if tensor is not None:
                holder[name] = found[id(tensor)]


def _replacement(tensor: torch.Tensor, moved: Callable[[torch.Tensor], Tensor]) -> torch.Tensor:
    made = moved(tensor)
    if not isinstance(tensor, torch.nn.Parameter):
        return made
    with made.stream.activate():
        parameter = torch.nn.Parameter(made, tensor.requires_grad)
    if tensor.grad is not None:
        parameter.grad = moved(tensor.grad)
    return parameter
