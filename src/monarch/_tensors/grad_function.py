"""Functions that bring their own backward: a closure instead of a class.

`torch.autograd.Function` wants a class with two static methods, and the tensors that they share in
`save_for_backward`. With `grad_function` the backward is a function inside the forward function,
and the tensors that they share are the ones that the inner function uses:

- These tensors are in the cells of the closure, alone or inside tuples, lists and dicts. They are
  taken out and saved with `save_for_backward`, so autograd notices when one is changed in place,
  releases them after the backward pass, and keeps no cycle of references alive.
- The backward that runs later is a copy of the inner function whose cells are filled again. Cells
  without tensors are shared with the original, so an inner function may count in a `nonlocal`.
- A `backward` that is no plain function is called as it is, and holds its tensors itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

__all__ = ["GradFunction", "grad_function"]


class _Call(NamedTuple):
    """The state that forward and backward of one call share, besides tensors."""

    function: Callable[..., tuple[Any, Callable[..., Any]]]
    arguments: list[Any]  # the tree of each argument
    result: list[Any]  # will have the tree of the result


def grad_function(
    fn: Callable[..., tuple[Any, Callable[..., Any]]],
) -> Callable[..., Any]:
    """Return a function that computes the result of `fn` and has its backward.

    `fn(*args)` returns `(result, backward)`, and `backward(*gradients)`, with one gradient
    for each tensor of the result, returns the gradients of the arguments: a tuple, or the gradient
    itself if there is one argument. None is a gradient of zero. Arguments and result may be trees
    of tensors (tuples, lists, dicts); the gradient of a tree is a tree of the same shape, or None.

    Operations of `fn` are not recorded by autograd. Tensors that `backward` uses from around
    it are saved as those of `torch.autograd.Function` are.

    >>> import torch
    >>> @grad_function
    ... def cube(x):
    ...     square = x * x
    ...     def backward(gradient):
    ...         return 3 * square * gradient
    ...     return square * x, backward
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> cube(x).sum().backward()
    >>> x.grad
    tensor([ 3., 12.])
    """

    @functools.wraps(fn)
    def apply(*args: Any) -> Any:
        flat = [pytree.tree_flatten(arg) for arg in args]
        call = _Call(fn, [tree for _, tree in flat], [])
        results = GradFunction.apply(call, *(leaf for leaves, _ in flat for leaf in leaves))
        return pytree.tree_unflatten(list(results), call.result[0])

    return apply


class GradFunction(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The node of a `grad_function` in the graph of autograd."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *leaves: Any) -> tuple[Any, ...]:
        """Call the function; save the tensors of its backward."""
        left = iter(leaves)
        arguments = [
            pytree.tree_unflatten([next(left) for _ in range(tree.num_leaves)], tree)
            for tree in call.arguments
        ]
        returned: Any = call.function(*arguments)
        if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
            raise TypeError(
                f"{_name(call.function)} is a grad_function: it has to return (result, backward), "
                f"and returned {type(returned).__name__}"
            )
        result, backward = returned
        results, tree = pytree.tree_flatten(result)
        call.result.append(tree)
        ctx.call = call
        ctx.backward, saved = _without_tensors(backward)
        ctx.save_for_backward(*saved)
        ctx.is_tensor = [isinstance(each, torch.Tensor) for each in results]
        ctx.set_materialize_grads(True)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Call the backward; return one gradient for each leaf of the arguments."""
        call: _Call = ctx.call
        given = [each for each, tensor in zip(gradients, ctx.is_tensor, strict=True) if tensor]
        returned = ctx.backward(ctx.saved_tensors)(*given)
        trees = call.arguments
        alone = len(trees) == 1 and pytree.tree_flatten(returned)[1] == trees[0]
        if alone or not isinstance(returned, tuple):
            returned = (returned,)
        if len(returned) != len(trees):
            raise RuntimeError(
                f"the backward of {_name(call.function)} returned {len(returned)} gradients for "
                f"{len(trees)} arguments"
            )
        flat: list[Any] = [None]  # the first argument of forward is the call
        for place, (each, tree) in enumerate(zip(returned, trees, strict=True)):
            leaves, shape = pytree.tree_flatten(each)
            if each is None:
                leaves = [None] * tree.num_leaves
            elif shape != tree:
                raise RuntimeError(
                    f"the backward of {_name(call.function)} returned a gradient for argument "
                    f"{place} that has another structure than the argument"
                )
            flat.extend(leaves)
        return tuple(flat)


def _without_tensors(function: Any) -> tuple[Callable[[Any], Callable[..., Any]], list[Any]]:
    """Return what makes the function again from its tensors, and the tensors of its closure."""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return lambda _: function, []
    saved: list[Any] = []
    cells: list[Any] = []  # each a cell, or what makes one from the saved tensors
    for cell in function.__closure__:
        try:
            leaves, tree = pytree.tree_flatten(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            leaves, tree = [], None
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not places:
            cells.append(cell)
            continue
        cells.append(functools.partial(_refilled, leaves, tree, places, len(saved)))
        saved.extend(leaves[place] for place in places)
        for place in places:
            leaves[place] = None
    code, names, name = function.__code__, function.__globals__, function.__name__
    defaults, keywords = function.__defaults__, function.__kwdefaults__

    def again(tensors: Any) -> Callable[..., Any]:
        closure = tuple(
            cell if isinstance(cell, types.CellType) else cell(tensors) for cell in cells
        )
        copy = types.FunctionType(code, names, name, defaults, closure)
        copy.__kwdefaults__ = keywords
        return copy

    return again, saved


def _refilled(
    leaves: list[Any], tree: Any, places: list[int], start: int, tensors: Any
) -> types.CellType:
    """Return a cell with the tree of leaves, with tensors from number `start` on in the places."""
    filled = list(leaves)
    for number, place in enumerate(places, start):
        filled[place] = tensors[number]
    return types.CellType(pytree.tree_unflatten(filled, tree))


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))
