"""Reductions: combine the tensors of processes along dimensions of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.active import active
from monarch._tensors.core.aliases import Aliases
from monarch._tensors.core.metadata import Metadata, interned
from monarch._tensors.core.reduction import REDUCTIONS, Reduction
from monarch._tensors.core.special import REDUCE
from monarch._tensors.misplaced import explain, refuse
from monarch._tensors.stream import get_active_stream
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.where import here

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh

__all__ = ["reduce", "reduce_", "reduce_one"]


def reduce(
    tensors: Any,
    dims: str | Sequence[str],
    reduction: str = "sum",
    scatter: bool = False,
    mesh: Any = None,
    _inplace: bool = False,
) -> Any:
    """Return `tensors` with each tensor combined over the processes along dimensions of its mesh.

    Does not block. "sum", "avg" and "stack" pass gradients on, as the collectives of
    `torch.distributed.nn` do: each process gets the gradient of the sum of all processes' losses.

    Args:
        tensors: a tensor, or a structure of lists, tuples and dicts with tensors.
        dims: names of dimensions of the mesh; () means all.
        reduction: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or "stack", which
            puts the tensors of the processes along one dimension into a new dimension 0.
        scatter: give each process its part of dimension 0 only; that must be as long as the
            dimension of the mesh.
        mesh: not supported; must be None.

    Raises KeyError for an unknown dimension, ValueError for an unknown reduction or dimensions that
    do not fit it, and TypeError for a tensor that requires a gradient (in place and for the other
    reductions), is not on the active stream, or does not fit `scatter`.
    """
    if type(tensors) is Tensor:
        return reduce_one(tensors, dims, reduction, scatter, mesh, _inplace, None)
    return pytree.tree_map(
        lambda leaf: (
            reduce_one(leaf, dims, reduction, scatter, mesh, _inplace, None)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        tensors,
    )


def reduce_(
    tensors: Any,
    dims: str | Sequence[str],
    reduction: str = "sum",
    scatter: bool = False,
    mesh: Any = None,
) -> Any:
    """Combine as `reduce` does, and write the results into the tensors, which are returned."""
    return reduce(tensors, dims, reduction, scatter, mesh, _inplace=True)


def reduce_one(
    tensor: torch.Tensor,
    dims: str | Sequence[str],
    kind: str,
    scatter: bool,
    mesh: Any,
    inplace: bool,
    out: Tensor | None,
) -> Tensor:
    """Return the reduction of one tensor; see `reduce`."""
    if mesh is not None:
        raise NotImplementedError("reduce(mesh=...) is not implemented; use to_mesh on the result")
    if kind not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {kind!r}")
    if type(tensor) is not Tensor:
        raise explain("reduce", (tensor,), {}, active().mesh, None)
    if isinstance(dims, int):
        raise TypeError(
            f"reduce needs names of dimensions of {tensor.mesh!r}, not {dims}: for a dimension of "
            "the local tensors use torch, as in tensor.sum(0)"
        )
    place = tensor._place
    owner = place.mesh
    given = (dims if isinstance(dims, str) else tuple(dims), kind, scatter, tensor._meta)
    spec = owner.reductions.get(given)
    if spec is None:
        spec = _spec(owner, *given)
        owner.reductions.put(given, spec)
    if inplace and out is not None:
        raise ValueError("reduce_ writes into its argument; out= is not possible")
    if inplace and scatter and kind != "stack":
        raise ValueError("reduce_ cannot scatter: the result is smaller than the argument")
    if inplace and kind == "stack" and not scatter:
        raise ValueError("reduce_ cannot stack: the result is larger than the argument")
    stream = get_active_stream()
    if place.stream is not stream:
        place = place.engine.place(owner, stream)
    targets = [tensor] if out is None else [tensor, out]
    for target in targets:
        if (
            type(target) is not Tensor
            or target._place is not place
            or not target._aliases.may_read()
        ):
            raise explain("reduce", targets, {}, active().mesh, place)
        if target.requires_grad and torch.is_grad_enabled():
            if kind in _DIFFERENTIABLE and not inplace and out is None:
                passed: Tensor = _Reduced.apply(tensor, dims, kind, scatter)
                return passed
            raise refuse(
                "reduce",
                target,
                "REQUIRES_GRAD",
                f"it requires a gradient, which passes through {', '.join(_DIFFERENTIABLE)} that "
                "make a new tensor; use torch.no_grad(), or grad_function for a gradient",
            )
    meta = spec.result
    written = tensor if inplace else out
    if written is not None:
        if written._meta.size != meta.size or written._meta.dtype is not meta.dtype:
            raise ValueError(
                f"Reduce expects the shape to be {torch.Size(meta.size)} and {meta.dtype}, but out "
                f"has {written.shape} and {written.dtype}"
            )
        if not written._aliases.writable:
            raise refuse(
                "reduce", written, "MUTATING_BORROW", "it would be mutated while it is borrowed"
            )
    engine = place.engine
    engine.rendezvous()
    ref = tensor._ref if inplace else engine.new_ref()
    if written is None:
        engine.emit(place, (REDUCE, ref, tensor._ref, 0, (), spec), here())
        return new_tensor(meta, place, ref, Aliases())
    written._aliases.forget()
    others = tuple(written._aliases.refs - {written._ref})
    engine.emit(place, (REDUCE, ref, tensor._ref, written._ref, others, spec), here())
    torch.autograd.graph.increment_version(written)
    return tensor if inplace else new_tensor(written._meta, place, ref, written._aliases)


_DIFFERENTIABLE = ("sum", "avg", "stack")


class _Reduced(torch.autograd.Function):  # type: ignore[misc]  # torch is optional
    """A reduction with a gradient, as the collectives of `torch.distributed.nn` have it.

    The loss is the sum of those of all processes. So what a process has given to the results of
    others comes back from all of them.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dims: Any, kind: str, scatter: bool) -> Tensor:
        """Combine the tensors of the processes."""
        ctx.reduced = dims, kind, scatter
        return reduce_one(tensor, dims, kind, scatter, None, False, None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the tensor of each process."""
        dims, kind, scatter = ctx.reduced
        if kind == "stack":  # one to all, or all to all
            given = reduce(gradient, dims, "stack" if scatter else "sum", scatter=True)
        elif scatter:
            given = reduce(gradient, dims, "stack")
            if kind == "avg":
                given = given / len(given)
        else:
            given = reduce(gradient, dims, kind)
        return given, None, None, None


def _spec(
    owner: DeviceMesh, dims: str | tuple[str, ...], kind: str, scatter: bool, meta: Metadata
) -> Reduction:
    """Return the work for a reduction; raise the errors of `reduce` about its arguments."""
    names = (dims,) if isinstance(dims, str) else dims or owner.names
    for name in names:
        if name not in owner.names:
            raise KeyError(f"dim {name} not found: {owner!r} has {owner.sizes}")
    if len(set(names)) != len(names):
        raise ValueError(f"repeated dimension in {names}")
    if len(names) > 1 and (kind == "stack" or scatter):
        what = "scatter" if scatter else "stack"
        raise ValueError(f"{what} is not valid for multiple dimensions: {names}")
    numbers = tuple(index for index, name in enumerate(owner.names) if name in names)
    result = _result(meta, owner.size(names), kind, scatter)
    return Reduction(owner.processes, numbers, names, kind, scatter, meta, result)


def _result(meta: Metadata, size: int, kind: str, scatter: bool) -> Metadata:
    """Return the metadata of a reduction over `size` processes."""
    shape = meta.size
    if scatter:
        if not shape or shape[0] != size:
            first = shape[0] if shape else "none"
            raise TypeError(
                f"When scattering, dimension 0 must be as long as that of the mesh, {size}; "
                f"it is {first}"
            )
        if kind != "stack":
            shape = shape[1:]
    elif kind == "stack":
        shape = (size, *shape)
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return interned(shape, tuple(reversed(strides)), 0, meta.dtype, meta.device, meta.layout)
