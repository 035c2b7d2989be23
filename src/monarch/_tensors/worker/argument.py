"""Arguments of remote functions that become objects of their process there: meshes and groups."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["Dim", "GroupArgument", "MeshArgument", "WorkerMesh", "here", "is_on_worker", "members"]


class _Here(threading.local):
    stream: Any  # a StreamThread


here = _Here()
"""The stream whose thread runs."""


def is_on_worker() -> bool:
    """Whether this thread executes the commands of a client."""
    return hasattr(here, "stream")


def members(ranks: Any, dims: tuple[int, ...], rank: int) -> list[int]:
    """Return the ranks whose coordinates differ from those of `rank` in `dims` only, in order."""
    found: list[list[int]] = [list(ranks.coordinates(rank))]
    for dim in dims:
        found = [
            [*at[:dim], coordinate, *at[dim + 1 :]]
            for at in found
            for coordinate in range(ranks.sizes[dim])
        ]
    return [ranks.nditem(at) for at in found]


@dataclass(frozen=True)
class Dim:
    """One dimension of a mesh, seen from a process.

    Attributes:
        name: its name.
        rank: the coordinate of this process.
        size: its length.
        members: the ranks that differ from this process's in this dimension only.
    """

    name: str
    rank: int
    size: int
    members: list[int]


@dataclass(frozen=True)
class WorkerMesh:
    """A mesh, seen from a process: its dimensions by name, and all its ranks."""

    dims: dict[str, Dim]
    all_ranks: list[int]


@dataclass(frozen=True)
class MeshArgument:
    """Stands for a mesh among the arguments of a function."""

    ranks: Any
    names: tuple[str, ...]

    def resolve(self) -> WorkerMesh:
        """Return the mesh as this process sees it."""
        rank = here.stream.table.rank
        coordinates = self.ranks.coordinates(rank)
        dims = {}
        for index, name in enumerate(self.names):
            own = members(self.ranks, (index,), rank)
            dims[name] = Dim(name, coordinates[index], self.ranks.sizes[index], own)
        return WorkerMesh(dims, list(self.ranks))


@dataclass(frozen=True)
class GroupArgument:
    """Stands for a process group among the arguments of a function."""

    ranks: Any
    dims: tuple[int, ...]
    count: int

    def size(self) -> int:
        """Return the number of processes in the group."""
        return self.count

    def resolve(self) -> Any:
        """Return the process group of torch that this process is in."""
        stream = here.stream
        ranks = members(self.ranks, self.dims, stream.table.rank)
        return stream.table.collective.user_group(stream, ranks)
