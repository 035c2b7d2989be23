"""`torch.nn.init.trunc_normal_` of a distributed tensor: each process draws until its values fit.

Torch draws again in a loop that reads whether all values fit. The script would read that of the
first process, and leave values of the others that do not. So the loop runs in each process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.init

from monarch._tensors.tensor import Tensor

__all__ = ["define"]

_local: Any = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)


def _trunc_normal(
    tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
) -> Any:
    if type(tensor) is not Tensor:
        return _local(tensor, mean, std, a, b, generator=generator)
    if generator is not None:
        raise ValueError(
            "trunc_normal_ of a distributed tensor uses the generator of each process, not one of "
            "the script"
        )
    from monarch._tensors.remote import remote

    with torch.no_grad():
        remote(_in_place, propagate=_written)(tensor, mean, std, a, b)
    return tensor


def _in_place(tensor: Any, mean: float, std: float, a: float, b: float) -> None:
    torch.nn.init.trunc_normal_(tensor, mean, std, a, b)


def _written(tensor: Any, *_: float) -> None:
    tensor.zero_()


def define() -> None:
    """Let torch's functions call the one of this module."""
    if _local is not None:
        torch.nn.init._no_grad_trunc_normal_ = _trunc_normal
