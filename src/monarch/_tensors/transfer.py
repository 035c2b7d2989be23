"""Copies of tensors from the processes of one mesh to those of another; modules move likewise."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.active import active
from monarch._tensors.core.aliases import Aliases
from monarch._tensors.core.metadata import interned
from monarch._tensors.core.special import RECEIVE, SEND, new_number
from monarch._tensors.dispatch import constant, copy_on_part
from monarch._tensors.mesh import DeviceMesh
from monarch._tensors.mesh_of_procs import spawn_tensor_engine
from monarch._tensors.misplaced import explain
from monarch._tensors.module import move
from monarch._tensors.reduction import reduce_one
from monarch._tensors.scatter import send
from monarch._tensors.stream import get_active_stream
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.where import here, program_level
from monarch.actor import ProcMesh

if TYPE_CHECKING:
    from monarch._tensors.stream import Stream

__all__ = ["MeshSliceTensor", "slice_mesh", "to_mesh"]


class MeshSliceTensor:
    """The part of a tensor on a slice of its mesh; `to_mesh` copies it.

    Attributes:
        tensor: the tensor on the whole mesh.
        slicing: the slice.
    """

    def __init__(self, tensor: Tensor, slicing: DeviceMesh) -> None:
        self.tensor = tensor
        self.slicing = slicing

    def __repr__(self) -> str:
        return f"<part on {self.slicing!r} of {self.tensor!r}>"

    def to_mesh(self, mesh: DeviceMesh | ProcMesh, stream: Stream | None = None) -> Tensor:
        """Copy the part to the processes of `mesh`; see `monarch.to_mesh`."""
        return _copy(self.tensor, self.slicing, mesh, stream)


def to_mesh(
    tensors: Any,
    mesh: DeviceMesh | ProcMesh,
    stream: Stream | None = None,
    *,
    shard: Mapping[str, int] | None = None,
) -> Any:
    """Return `tensors` with each tensor copied to the processes of `mesh` with equal coordinates.

    Does not block, and no data of a mesh pass through the client. A dimension of `mesh` that the
    tensor's mesh lacks gets copies. The result shares no storage with its source, even on the same
    process.

    An ordinary tensor of the script, such as a batch of a `DataLoader`, is sent to all processes of
    `mesh`, or with `shard` a part to each. It may be changed after the call.

    A `torch.nn.Module` is changed in place, as its own method ``to`` does: its parameters, buffers
    and gradients are moved. Ordinary tensors in it are sent to all processes of `mesh`. Make the
    optimizer after that, since the parameters are new objects.

    A module may be moved to a part of its mesh with other dimensions. Each process there keeps
    what it has.

    Args:
        tensors: a tensor, what `slice_mesh` returns, a module, or a structure with these; what is
            no tensor stays as it is.
        mesh: where to; of this or of another proc mesh.
        stream: the stream of the result; by default the tensor's own, and for ordinary tensors the
            active one.
        shard: for ordinary tensors, which dimension of the tensor is divided along which dimension
            of the mesh: with ``{"gpus": 0}`` each process along "gpus" gets its part of the rows.
            Along other dimensions of the mesh the parts are equal.

    A gradient comes back from all copies. A tensor of which `slice_mesh` has copied a part gets
    zeros in the other processes.

    Raises ValueError for meshes that do not fit, for a dimension that cannot be divided, and for a
    module with tensors that have no data (device "meta"); and TypeError for a tensor that may not
    be read, an ordinary tensor that requires a gradient, and `shard` with what cannot be divided.
    """
    return pytree.tree_map(
        lambda leaf: _copied(leaf, mesh, stream, shard or {}),
        tensors,
        is_leaf=lambda leaf: isinstance(leaf, MeshSliceTensor),
    )


def slice_mesh(tensors: Any, **coordinates: int | slice) -> Any:
    """Return `tensors` with each tensor as its part on a slice of its mesh, for `to_mesh`."""
    return pytree.tree_map(
        lambda leaf: (
            MeshSliceTensor(leaf, leaf.mesh.slice(**coordinates)) if type(leaf) is Tensor else leaf
        ),
        tensors,
    )


def _copied(
    leaf: Any, mesh: DeviceMesh | ProcMesh, stream: Stream | None, shard: Mapping[str, int]
) -> Any:
    if isinstance(leaf, torch.Tensor) and type(leaf) is not Tensor:
        return send(leaf, _mesh_of(mesh), stream or get_active_stream(), shard)
    if shard and isinstance(leaf, MeshSliceTensor | torch.Tensor | torch.nn.Module):
        raise TypeError(
            f"to_mesh(shard=...) divides ordinary tensors of the script, not {leaf!r}. What makes "
            "tensors while a mesh is active makes distributed ones: make the data before, or "
            "within `with no_mesh.activate():`"
        )
    if isinstance(leaf, MeshSliceTensor):
        return leaf.to_mesh(mesh, stream)
    if type(leaf) is Tensor:
        return _copy(leaf, leaf.mesh, mesh, stream)
    if isinstance(leaf, torch.nn.Module):
        with _disable_current_modes():  # local tensors are read, maybe while a mesh is active
            move(leaf, lambda tensor: _part(tensor, mesh, stream))
    return leaf


def _part(tensor: torch.Tensor, target: DeviceMesh | ProcMesh, stream: Stream | None) -> Tensor:
    """Return a tensor of a module on `target`."""
    if type(tensor) is Tensor:
        mesh = _mesh_of(target)
        source = mesh if _is_part(mesh, tensor.mesh) else tensor.mesh
        return _copy(tensor, source, mesh, stream)
    if tensor.is_meta:
        raise ValueError(
            "the module has tensors without data (device 'meta'): give it data first, for example "
            "with module.to_empty(device='cpu')"
        )
    mesh = _mesh_of(target)
    return constant(tensor, mesh.client.place(mesh, stream or get_active_stream()))


def _is_part(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether all processes of a mesh are processes of another one."""
    return mesh.client is other.client and set(mesh.processes) <= set(other.processes)


def _copy(
    tensor: Tensor, source: DeviceMesh, target: DeviceMesh | ProcMesh, stream: Stream | None
) -> Tensor:
    mesh = _mesh_of(target)
    if not tensor._aliases.may_read():
        raise explain("to_mesh", (tensor,), {}, active().mesh, tensor._place)
    if tensor.requires_grad and torch.is_grad_enabled():
        passed: Tensor = _Moved.apply(tensor, source, mesh, stream)
        return passed
    pairs = tuple(_pairs(source, mesh))
    meta = tensor._meta
    size = meta.size
    dense = [math.prod(size[index + 1 :]) for index in range(len(size))]
    result = interned(size, tuple(dense), 0, meta.dtype, meta.device, meta.layout)
    here_place = tensor._place
    there = mesh.client.place(mesh, stream or tensor.stream)
    number = new_number()
    where = here()
    sender, receiver = here_place.engine, there.engine
    sender.emit(here_place, (SEND, tensor._ref, number, pairs, sender.peer(receiver)), where)
    ref = receiver.new_ref()
    known = tensor._ref if sender is receiver else 0
    receiver.emit(there, (RECEIVE, ref, number, pairs, known, result, sender.name), where)
    return new_tensor(result, there, ref, Aliases())


class _Moved(torch.autograd.Function):  # type: ignore[misc]  # torch is optional
    """A copy to another mesh with a gradient: that of each copy comes back, and they add up.

    Processes whose part was not copied get zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, source: DeviceMesh, target: DeviceMesh, stream: Stream | None
    ) -> Tensor:
        """Copy the data."""
        ctx.source, ctx.whole, ctx.stream = source, tensor.mesh, tensor.stream
        return _copy(tensor, source, target, stream)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the tensor on its whole mesh."""
        mesh = gradient.mesh
        several = tuple(name for name in mesh.names if name not in ctx.source.names)
        if several:
            with gradient.stream.activate():
                gradient = reduce_one(gradient, several, "sum", False, None, False, None)
            mesh = mesh.slice(**dict.fromkeys(several, 0))
        back = _copy(gradient, mesh, ctx.source, ctx.stream)
        if ctx.source is not ctx.whole:
            with ctx.whole.activate(), ctx.stream.activate():
                whole: Any = torch.zeros(back.shape, dtype=back.dtype, device=back.device)
            copy_on_part(whole, back)
            back = whole
        return back, None, None, None


def _mesh_of(target: Any) -> DeviceMesh:
    """Return the device mesh that a copy goes to; raises TypeError for what is no mesh."""
    if isinstance(target, ProcMesh):
        return spawn_tensor_engine(target)
    if not isinstance(target, DeviceMesh):
        raise TypeError(f"to_mesh needs a DeviceMesh or a ProcMesh, not {target!r}")
    return target


def _pairs(source: DeviceMesh, target: DeviceMesh) -> list[tuple[int, int]]:
    """Return which rank of `source` sends to which of `target`."""
    missing = set(source.names) - set(target.names)
    if missing:
        raise ValueError(
            f"destination mesh does not have dimensions {missing}: it has {target.sizes}"
        )
    for name, length in source.sizes.items():
        if target.sizes[name] != length:
            raise ValueError(
                f"dimension {name} has a different length: {length} in the source, "
                f"{target.sizes[name]} in the destination"
            )
    if len(target) > len(source):
        warnings.warn(
            "to_mesh copies to several processes each; that is inefficient for large tensors",
            UserWarning,
            stacklevel=program_level(),
        )
    pairs = []
    ranges = [range(length) for length in target.processes.sizes]
    for rank, point in zip(target.processes, itertools.product(*ranges), strict=True):
        at = dict(zip(target.names, point, strict=True))
        pairs.append((source.processes.nditem([at[name] for name in source.names]), rank))
    return pairs
