"""``tensor.data = other``: the tensor has the data of the other one from then on.

For torch this is an exchange of what the two Python objects refer to, and no operation, so nothing
of it would reach the processes. Here the tensor takes over a new reference to the other's data.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch._tensors.active import recording
from monarch._tensors.misplaced import explain, refuse
from monarch._tensors.tensor import Live, Tensor

__all__ = ["define"]

_own: Any = torch._C.TensorBase.data


def define() -> None:
    """Give distributed tensors the attribute."""
    setattr(Tensor, "data", property(_own.__get__, _set_data))  # noqa: B010 - a property, as there


def _set_data(tensor: Tensor, value: Any) -> None:
    """Let `tensor` have the data of `value` from now on, as ``tensor.data = value`` says.

    Raises `Misplaced` for a value that is no distributed tensor of the same proc mesh, and while
    `tensor` is borrowed.
    """
    place = tensor._place
    engine = place.engine
    if (
        type(value) is not Tensor
        or value._place.engine is not engine
        or value.dropped
        or tensor.dropped
    ):
        raise explain("set_data", (tensor, value), {}, None, place)
    if not tensor._aliases.writable:
        raise refuse(
            "set_data", tensor, "MUTATING_BORROW", "it would be mutated while it is borrowed"
        )
    if recording() is not None:
        raise NotImplementedError("a compiled function cannot set the data of a tensor")
    with engine.lock:
        with value.stream.activate(), torch.no_grad():
            made: Any = value.detach()
        _own.__set__(tensor, made)
        # The two exchange their places in the engine, which deletes the old data with `made`.
        lives = engine.live[tensor._ref], engine.live[made._ref]
        for one, other in (lives, lives[::-1]):
            engine.live[other.number] = one
        for name in Live.__slots__:
            _exchange(*lives, name)
        for name in Tensor.__slots__:
            _exchange(tensor, made, name)


def _exchange(one: object, other: object, name: str) -> None:
    value = getattr(one, name)
    setattr(one, name, getattr(other, name))
    setattr(other, name, value)
