"""`remote_autograd_function`: a function with its own backward, both computed by the processes.

The script keeps the graph: the wrapped class is an ordinary autograd function whose forward and
backward are remote functions. In the processes the program's class runs with a context that records
what it is given. Saved tensors become distributed tensors; other attributes travel to the script
and back.

The class sees in the processes what it would see in the script:

- A tensor there requires a gradient, and is a leaf of the graph, if that is so in the script. The
  call has both facts as arguments, since a worker's values have neither.
- A tensor or a process group that the forward was given comes back as the number of the argument,
  and an output that it saves as the number of the output. So the script saves its own objects:
  autograd notices when one is changed before the backward.
- A second derivative is refused, because the graph of what a process computes in a backward is not
  in the script.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from monarch._tensors.function import ResolvableFunction, resolvable_function
from monarch._tensors.remote import remote
from monarch._tensors.second_derivative import without_second_derivative

__all__ = [
    "RemoteAutogradFunction",
    "backward_remote_fn",
    "forward_remote_fn",
    "remote_autograd_function",
]


class RemoteAutogradFunction(torch.autograd.Function):  # type: ignore[misc]  # torch is optional
    """The base of the classes that `remote_autograd_function` makes."""


@dataclass(frozen=True)
class _Argument:
    """Stands for an object that came as an argument: its number among the leaves of all."""

    number: int


@dataclass(frozen=True)
class _Output:
    """Stands for an output that the forward saves."""

    number: int


_Facts = tuple[tuple[bool, bool], ...]
"""Of each tensor, in the order of the leaves: whether it requires a gradient, and is a leaf."""


class _Context:
    """The ``ctx`` of a forward or a backward in a process."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self._constant: list[Any] = []  # outputs without a gradient
        self._materialize = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *outputs: Any) -> None:
        self._constant = list(outputs)

    def mark_dirty(self, *_inputs: Any) -> None:
        raise NotImplementedError("a remote autograd function cannot change its arguments")

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize = value


_OWN = frozenset(vars(_Context(())))


def _forward(
    target: ResolvableFunction, needs_input_grad: tuple[bool, ...], facts: _Facts, *args: Any
) -> tuple[Any, list[Any], dict[str, Any], list[bool], bool]:
    """Run the forward in a process; return its result and what it has put into the context."""
    context = _Context(needs_input_grad)
    function: Any = target.resolve()
    args = _with_facts(args, facts)
    with torch.no_grad():
        if function.setup_context is torch.autograd.Function.setup_context:
            result = function.forward(context, *args)
        else:
            result = function.forward(*args)
            function.setup_context(context, args, result)
    outputs = result if isinstance(result, tuple) else (result,)
    constant = [any(output is other for other in context._constant) for output in outputs]
    given = {id(leaf): _Argument(n) for n, leaf in enumerate(tree_leaves(args)) if _is_kept(leaf)}
    made = {id(leaf): _Output(n) for n, leaf in enumerate(outputs) if _is_kept(leaf)}
    saved = [given.get(id(each)) or made.get(id(each), each) for each in context.saved_tensors]
    attributes = {name: value for name, value in vars(context).items() if name not in _OWN}
    attributes = tree_map(lambda leaf: given.get(id(leaf), leaf), attributes)
    return result, saved, attributes, constant, context._materialize


def _backward(
    target: ResolvableFunction,
    needs_input_grad: tuple[bool, ...],
    facts: _Facts,
    attributes: dict[str, Any],
    saved: list[Any],
    *grads: Any,
) -> tuple[Any, ...]:
    """Run the backward in a process; return one gradient, or None, for each argument."""
    context = _Context(needs_input_grad)
    attributes, saved = _with_facts((attributes, saved), facts)
    context.saved_tensors = tuple(saved)
    vars(context).update(attributes)
    with torch.no_grad():
        result = target.resolve().backward(context, *grads)  # type: ignore[attr-defined]
    return result if isinstance(result, tuple) else (result,)


def _is_kept(leaf: Any) -> bool:
    """Whether the script keeps an object itself, rather than what a process returns for it."""
    return isinstance(leaf, torch.Tensor | dist.ProcessGroup)


def _facts_of(tree: Any) -> _Facts:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return tuple((tensor.requires_grad, tensor.is_leaf) for tensor in tensors)


def _with_facts(tree: Any, facts: _Facts) -> Any:
    """Return `tree` with tensors for which the facts hold; they share the data."""
    rest = iter(facts)

    def with_facts(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        requires_grad, is_leaf = next(rest)
        if not requires_grad:
            return leaf
        leaf = leaf.detach().requires_grad_()
        with torch.enable_grad():
            return leaf if is_leaf else leaf.view_as(leaf)

    return tree_map(with_facts, tree)


forward_remote_fn = remote(_forward)
backward_remote_fn = remote(_backward)


def remote_autograd_function(
    target_class: type[torch.autograd.Function], name: str | None = None
) -> type[RemoteAutogradFunction]:
    """Return an autograd function that runs forward and backward of `target_class` remotely.

    Args:
        target_class: a `torch.autograd.Function`. It may save tensors and set attributes that can
            be pickled; it may not change its arguments. A second derivative of it is refused.
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
        result, saved, attributes, constant, materialize = forward_remote_fn(
            target, needs, _facts_of(args), *args
        )
        outputs = result if isinstance(result, tuple) else (result,)
        given = tree_leaves(args)

        def own(leaf: Any) -> Any:
            return given[leaf.number] if type(leaf) is _Argument else leaf

        ctx.mark_non_differentiable(
            *(output for output, is_constant in zip(outputs, constant, strict=True) if is_constant)
        )
        ctx.save_for_backward(
            *(outputs[each.number] if type(each) is _Output else own(each) for each in saved)
        )
        ctx.attributes = tree_map(own, attributes)
        ctx.set_materialize_grads(materialize)
        return result

    def backward(ctx: Any, *grads: Any) -> Any:
        needs = tuple(ctx.needs_input_grad)
        saved = list(ctx.saved_tensors)
        facts = _facts_of((ctx.attributes, saved))
        found = backward_remote_fn(target, needs, facts, ctx.attributes, saved, *grads)
        return without_second_derivative(target_class.__name__, found, (*grads, *saved))

    return type(
        name or f"Remote{target_class.__name__}",
        (RemoteAutogradFunction,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
