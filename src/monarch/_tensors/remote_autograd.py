"""`remote_autograd_function`: a function with its own backward, both computed by the processes.

The script keeps the graph: the wrapped class is an ordinary autograd function whose forward and
backward are remote functions. In the processes the program's class runs with a context that records
what it is given. Saved tensors become distributed tensors; other attributes travel to the script
and back, with a note in the place of a process group, which is an argument of both calls.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from monarch._tensors.function import ResolvableFunction, resolvable_function
from monarch._tensors.remote import remote

__all__ = [
    "RemoteAutogradFunction",
    "backward_remote_fn",
    "forward_remote_fn",
    "remote_autograd_function",
]


class RemoteAutogradFunction(torch.autograd.Function):  # type: ignore[misc]  # torch is optional
    """The base of the classes that `remote_autograd_function` makes."""


@dataclass(frozen=True)
class _Group:
    """Stands for a process group in an attribute: the number of the argument that it came as."""

    argument: int


class _Context:
    """The ``ctx`` of a forward or a backward in a process."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self._constant: list[Any] = []  # outputs without a gradient

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *outputs: Any) -> None:
        self._constant = list(outputs)

    def mark_dirty(self, *_inputs: Any) -> None:
        raise NotImplementedError("a remote autograd function cannot change its arguments")

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: a gradient that is missing is None in any case."""


_OWN = frozenset(vars(_Context(())))


def _forward(
    target: ResolvableFunction, needs_input_grad: tuple[bool, ...], *args: Any
) -> tuple[Any, list[Any], dict[str, Any], list[bool]]:
    """Run the forward in a process; return its result and what it has put into the context."""
    context = _Context(needs_input_grad)
    with torch.no_grad():
        result = target.resolve().forward(context, *args)  # type: ignore[attr-defined]
    outputs = result if isinstance(result, tuple) else (result,)
    constant = [any(output is other for other in context._constant) for output in outputs]
    attributes = {
        name: _portable(value, args) for name, value in vars(context).items() if name not in _OWN
    }
    return result, list(context.saved_tensors), attributes, constant


def _backward(
    target: ResolvableFunction,
    needs_input_grad: tuple[bool, ...],
    attributes: dict[str, Any],
    saved: list[Any],
    *grads: Any,
) -> tuple[Any, ...]:
    """Run the backward in a process; return one gradient, or None, for each argument."""
    context = _Context(needs_input_grad)
    context.saved_tensors = tuple(saved)
    vars(context).update(attributes)
    with torch.no_grad():
        result = target.resolve().backward(context, *grads)  # type: ignore[attr-defined]
    return result if isinstance(result, tuple) else (result,)


def _portable(value: Any, args: tuple[Any, ...]) -> Any:
    if not isinstance(value, dist.ProcessGroup):
        return value
    return _Group(next(number for number, given in enumerate(args) if given is value))


forward_remote_fn = remote(_forward)
backward_remote_fn = remote(_backward)


def remote_autograd_function(
    target_class: type[torch.autograd.Function], name: str | None = None
) -> type[RemoteAutogradFunction]:
    """Return an autograd function that runs forward and backward of `target_class` remotely.

    Args:
        target_class: a `torch.autograd.Function` whose forward takes ``ctx`` first. It may save
            tensors and set attributes that can be pickled; it may not change its arguments.
        name: the name of the new class.

    A class that this function has made is returned as it is, with a warning. The first call for
    arguments of a kind shows what forward and backward return, see `monarch.remote`.
    """
    if issubclass(target_class, RemoteAutogradFunction):
        warnings.warn(f"{target_class!r} is a remote autograd function already", stacklevel=2)
        return target_class
    target = resolvable_function(target_class)

    def forward(ctx: Any, *args: Any) -> Any:
        needs = tuple(ctx.needs_input_grad)
        result, saved, attributes, constant = forward_remote_fn(target, needs, *args)
        outputs = result if isinstance(result, tuple) else (result,)
        ctx.mark_non_differentiable(
            *(output for output, is_constant in zip(outputs, constant, strict=True) if is_constant)
        )
        ctx.save_for_backward(*saved)
        ctx.attributes = {
            key: args[value.argument] if type(value) is _Group else value
            for key, value in attributes.items()
        }
        return result

    def backward(ctx: Any, *grads: Any) -> Any:
        needs = tuple(ctx.needs_input_grad)
        return backward_remote_fn(target, needs, ctx.attributes, list(ctx.saved_tensors), *grads)

    return type(
        name or f"Remote{target_class.__name__}",
        (RemoteAutogradFunction,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
