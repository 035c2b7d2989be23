"""Checkpoints of distributed tensors, in the format of `torch.distributed.checkpoint`.

Each process writes its own part, and none of the data pass through the client. For that each tensor
becomes a DTensor: it is sharded as the caller says, and replicated along the other dimensions. The
format knows the whole tensors, so a checkpoint can be loaded on a mesh of another size, and torch's
own programs read it.

A state is a `state_dict`, or dicts of them. As torch does, names of nested dicts are joined with
dots. Values that are no distributed tensors are saved once.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils import _pytree as pytree

from monarch._tensors.mesh import DeviceMesh
from monarch._tensors.remote import remote
from monarch._tensors.tensor import Tensor
from monarch._tensors.torch_mesh import TorchMesh, torch_mesh

__all__ = ["load", "save"]

Placements = Mapping[str, Mapping[str, Placement]]
"""By the name of a tensor: how it is placed along dimensions of the mesh."""


def save(
    state: Mapping[str, Any], path: str | os.PathLike[str], placements: Placements | None = None
) -> None:
    """Write a checkpoint of `state` into the folder `path`; blocks until it is written.

    Args:
        state: for example ``module.state_dict()``. Its distributed tensors are on one mesh.
        path: a folder that all processes reach by this name.
        placements: the tensors that are sharded, with their whole names:
            ``{"layer.weight": {"gpus": Shard(0)}}``. All others are the same in each process.

    Raises ValueError for a state without distributed tensors and for unknown names, and
    `RemoteException` if a process cannot write.
    """
    plan = _Plan(state, placements or {})
    with plan.mesh.activate():
        _write.call(plan.values, *plan.arguments(path), *plan.tensors.values()).get()


def load(
    state: Mapping[str, Any], path: str | os.PathLike[str], placements: Placements | None = None
) -> dict[str, Any]:
    """Read a checkpoint into the distributed tensors of `state`, in place; blocks.

    The mesh may have another size than that of the checkpoint, and tensors other placements. Return
    `state` with the values of the checkpoint in the place of what is no distributed tensor.

    Args:
        state: the names to load, with tensors to load into.
        path: the folder.
        placements: those of the tensors of `state`, see `save`.

    Raises ValueError as `save` does, and `RemoteException` if a process cannot read the checkpoint,
    or that lacks a name. The tensors are lost then.
    """
    plan = _Plan(state, placements or {})
    tensors = plan.tensors.values()
    with plan.mesh.activate():
        _read(*plan.arguments(path), *tensors)
        # It depends on the tensors, so an error of any process is raised here.
        read = _read_values.call(plan.values, plan.layout, os.fspath(path), *tensors).get()
    return _with(state, "", read.values()[0])


class _Plan:
    """A state, taken apart: its tensors and its other values by their whole names."""

    def __init__(self, state: Mapping[str, Any], placements: Placements) -> None:
        self.tensors: dict[str, Tensor] = {}
        others: dict[str, Any] = {}
        for name, value in _flat(state, ""):
            if type(value) is Tensor:
                self.tensors[name] = value
            elif any(type(leaf) is Tensor for leaf in pytree.tree_leaves(value)):
                raise ValueError(
                    f"{name!r} is a {type(value).__name__} with distributed tensors; "
                    "a checkpoint has them in dicts only"
                )
            else:
                others[name] = value
        if not self.tensors:
            raise ValueError("the state has no distributed tensors; torch.save writes such a state")
        self.values = pickle.dumps(others)  # in messages they are no arguments, but one value
        self.mesh: DeviceMesh = next(iter(self.tensors.values())).mesh
        unknown = set(placements) - set(self.tensors)
        if unknown:
            raise ValueError(f"placements of {sorted(unknown)}, but the state has no such tensors")
        dims = {dim for each in placements.values() for dim in each} - set(self.mesh.names)
        if dims:
            raise ValueError(f"{self.mesh!r} does not have the dimensions {sorted(dims)}")
        layout = torch_mesh(self.mesh)
        self.layout = layout
        self.placements = tuple(
            tuple(placements.get(name, {}).get(dim, Replicate()) for dim in layout.names)
            for name in self.tensors
        )

    def arguments(self, path: str | os.PathLike[str]) -> tuple[Any, ...]:
        return self.layout, os.fspath(path), tuple(self.tensors), self.placements


def _flat(state: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in state.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found


def _with(state: Mapping[str, Any], prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with other values by their whole names."""
    return {
        key: _with(value, f"{prefix}{key}.", values)
        if isinstance(value, Mapping)
        else values.get(f"{prefix}{key}", value)
        for key, value in state.items()
    }


# -- in the processes -----------------------------------------------------------------------------


@remote(propagate="inspect")
def _write(
    values: bytes, layout: TorchMesh, path: str, names: Any, placements: Any, *tensors: torch.Tensor
) -> None:
    state = _distributed(layout, names, placements, tensors)
    group = layout.process_group()
    dcp.save({**pickle.loads(values), **state}, checkpoint_id=path, process_group=group)


def _fill(_layout: TorchMesh, _path: str, _names: Any, _placements: Any, *tensors: Any) -> None:
    """Propagate: all tensors are written."""
    for tensor in tensors:
        tensor.zero_()


@remote(propagate=_fill)
def _read(
    layout: TorchMesh, path: str, names: Any, placements: Any, *tensors: torch.Tensor
) -> None:
    state = _distributed(layout, names, placements, tensors)
    dcp.load(state, checkpoint_id=path, process_group=layout.process_group())


@remote
def _read_values(
    values: bytes, layout: TorchMesh, path: str, *_tensors: torch.Tensor
) -> dict[str, Any]:
    state: dict[str, Any] = pickle.loads(values)
    if state:
        dcp.load(state, checkpoint_id=path, process_group=layout.process_group())
    return state


def _distributed(
    layout: TorchMesh, names: Any, placements: Any, tensors: tuple[torch.Tensor, ...]
) -> dict[str, DTensor]:
    """Return the local tensors as DTensors, which share their data."""
    return {
        name: DTensor.from_local(
            tensor, layout.device_mesh(tensor.device.type), placement, run_check=False
        )
        for name, placement, tensor in zip(names, placements, tensors, strict=True)
    }
