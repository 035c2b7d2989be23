"""Devices that the processes have and the client's machine lacks.

Torch's autograd asks the driver of a tensor's device about streams, so a machine without CUDA
cannot keep a graph of CUDA tensors. There the client's objects are "meta" tensors to torch;
`Tensor.device` says what they are. Operators that torch calls with the device of such an object get
the true one.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CPU", "GPU", "client_device", "is_shown_as_meta", "true_devices"]

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
_META = torch.device("meta")


def is_shown_as_meta(device: torch.device) -> bool:
    """Whether a tensor on this device is a "meta" tensor to the client's torch."""
    return device.type == "cuda" and not torch.cuda.is_available()


def client_device(device: torch.device) -> torch.device:
    """Return the device of the client's object for a tensor on `device`.

    >>> client_device(torch.device("cpu"))
    device(type='cpu')
    """
    return _META if is_shown_as_meta(device) else device


def true_devices(arguments: Any, device: torch.device) -> Any:
    """Return the arguments of an operator with `device` for "meta", in tuples and dicts."""
    if type(arguments) is tuple:
        return tuple(device if value == _META else value for value in arguments)
    return {name: device if value == _META else value for name, value in arguments.items()}
