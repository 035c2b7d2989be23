"""`without_second_derivative`: gradients whose own gradients are refused.

The graph of what processes compute in a backward is not in the script. So a gradient that depends
on tensors which require one would look like a constant, and a second derivative would silently lack
a part. (`torch.autograd.function.once_differentiable` does not see the saved tensors.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["without_second_derivative"]


def without_second_derivative(name: str, gradients: Iterable[Any], sources: Iterable[Any]) -> Any:
    """Return the gradients that the backward of `name` has computed from `sources`.

    If the backward is recorded, and a source requires a gradient, the derivative of the gradients
    raises NotImplementedError.
    """
    if not torch.is_grad_enabled():
        return tuple(gradients)
    source = next((each for each in sources if each is not None and each.requires_grad), None)
    if source is None:
        return tuple(gradients)
    return tuple(
        _Gradient.apply(source, name, each) if isinstance(each, torch.Tensor) else each
        for each in gradients
    )


class _Gradient(torch.autograd.Function):  # type: ignore[misc]  # torch is optional
    @staticmethod
    def forward(ctx: Any, _source: Any, name: str, gradient: Any) -> Any:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"the backward of {ctx.name} runs in the processes of a mesh, so it has no derivative "
            "of its own: compute the second derivative in operations of the script"
        )
