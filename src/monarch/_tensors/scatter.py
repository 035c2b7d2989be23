"""`send`: ordinary tensors of the script, sent to the processes of a mesh, or a part to each.

The data go in a message to the workers, as those of another process do, and not in a batch of
commands: a batch is pickled once more, and goes to all processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.active import recording
from monarch._tensors.core.aliases import Aliases
from monarch._tensors.core.metadata import metadata_of
from monarch._tensors.core.special import RECEIVE, new_number
from monarch._tensors.dispatch import constant
from monarch._tensors.misplaced import refuse
from monarch._tensors.tensor import Tensor, new_tensor
from monarch._tensors.where import here
from monarch.actor import Point

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.stream import Stream

__all__ = ["send"]

_SMALL = 16 << 10  # bytes; a message of its own costs more


def send(
    tensor: torch.Tensor, mesh: DeviceMesh, stream: Stream, shard: Mapping[str, int]
) -> Tensor:
    """Return a distributed tensor with the data of an ordinary one; see `monarch.to_mesh`."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise refuse(
            "to_mesh",
            tensor,
            "REQUIRES_GRAD",
            "an ordinary tensor that requires a gradient gets none from the processes; use "
            "tensor.detach(), or move a module",
        )
    if tensor.is_meta:
        raise TypeError("to_mesh sends tensors with data, and this one has none (device 'meta')")
    if recording() is not None:
        raise NotImplementedError(
            "a compiled function cannot send a tensor of the script in each call: send it before, "
            "and pass it as an argument"
        )
    engine = mesh.client
    place = engine.place(mesh, stream)
    if tensor.layout is not torch.strided:
        if shard or tensor.layout is not torch.sparse_coo:
            raise TypeError(
                f"a tensor with the layout {tensor.layout} cannot be sent to a mesh: send a dense "
                "one, or without shard= a torch.sparse_coo one"
            )
        return constant(tensor, place)
    if not shard and (engine.is_simulated or tensor.nbytes <= _SMALL):
        with _disable_current_modes():
            return constant(tensor.contiguous(), place)
    with _disable_current_modes(), torch.no_grad():
        # Copies: the program may write to its tensor while the message waits to be sent.
        parts = [
            part.clone(memory_format=torch.contiguous_format)
            for part in _parts(tensor, mesh, shard)
        ]
        meta = metadata_of(parts[0])
    if engine.is_simulated:
        return constant(parts[0], place)
    number = new_number()
    ref = engine.new_ref()
    engine.emit(place, (RECEIVE, ref, number, (), 0, meta, engine.name), here())
    if len(parts) == 1 and mesh.is_whole:
        engine.workers.deliver.broadcast((number, None), parts[0])
    else:
        for rank, part in zip(mesh.processes, itertools.cycle(parts), strict=False):
            worker = engine.workers.slice(**Point(rank, engine.procs.extent))
            worker.deliver.broadcast((number, rank), part)
    return new_tensor(meta, place, ref, Aliases())


def _parts(tensor: torch.Tensor, mesh: DeviceMesh, shard: Mapping[str, int]) -> list[torch.Tensor]:
    """Return the part of each process of `mesh`, or one for all of them."""
    if not shard:
        return [tensor]
    sizes = mesh.sizes
    counts: dict[int, int] = {}  # parts along a dimension of the tensor
    for name, dim in shard.items():
        if name not in sizes:
            raise ValueError(f"shard names {name!r}, which is no dimension of {mesh!r}: {sizes}")
        if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"shard divides dimension {dim!r} along {name!r}, and the tensor has the shape "
                f"{list(tensor.shape)}"
            )
        at = dim % tensor.dim()
        counts[at] = counts.get(at, 1) * sizes[name]
    for dim, count in counts.items():
        if tensor.shape[dim] % count:
            raise ValueError(
                f"dimension {dim} of a tensor of shape {list(tensor.shape)} cannot be divided into "
                f"{count} equal parts: each process has tensors of one shape. Leave out the rest "
                "(drop_last=True of a DataLoader), or pad it"
            )
    parts: list[torch.Tensor] = []
    for point in itertools.product(*map(range, sizes.values())):
        at_name = dict(zip(sizes, point, strict=True))
        part = tensor
        for name, dim in shard.items():
            length = part.shape[dim] // sizes[name]
            part = part.narrow(dim, at_name[name] * length, length)
        parts.append(part)
    return parts
