"""The addresses of actors: the column ``actors.full_name``, and attributes of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from monarch._spi import ActorMesh, Proc, hook, normalize_label

__all__ = ["of_mesh", "of_proc"]


@lru_cache(maxsize=65536)
def _address(actor: int, label: str, proc: int, proc_label: str) -> str:
    return str(hook("actor_address")(actor, label, proc, proc_label))


def of_proc(proc: Proc, actor: int) -> str:
    """Return the address of an actor of this process by its uid; 0: of the process's own instance.

    Empty if the actor ended too long ago.
    """
    if not actor:
        return _address(0, "client", proc.uid, proc.label)
    cell = proc.cells.get(actor)
    if cell is not None:
        name = cell.identity.label
    else:
        grave = proc.graves.get(actor)
        name = "" if grave is None else grave.mesh_name
    return _address(actor, name.rpartition("-")[0], proc.uid, proc.label) if name else ""


def of_mesh(proc: Proc, mesh: ActorMesh) -> Iterator[tuple[int, int, str]]:
    """Yield of each actor of a mesh: its rank in the mesh as spawned, its process, its address."""
    procs, shape = mesh._proc_mesh, mesh._shape
    uids, label = procs._uids(), normalize_label(mesh._mesh_name)
    for rank, proc_label in zip(shape.ndslice, procs._proc_labels(shape), strict=True):
        uid = proc.newest(uids[rank])
        yield rank, uid, _address(mesh._uid, label, uid, proc_label)
