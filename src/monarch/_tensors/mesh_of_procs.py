"""`spawn_tensor_engine`: the device mesh of a proc mesh.

For actors under `patch_tensor_engine` it has no processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from monarch._spi import client_proc, replacements
from monarch._tensors.engine import engine_of
from monarch._tensors.mesh import DeviceMesh, mesh_of
from monarch.actor import ProcMesh, context
from monarch.actor import Slice as NDSlice

__all__ = ["spawn_tensor_engine"]

# By the process that uses them. Simulated processes share this one, and numbers of proc meshes
# recur in the next simulation.
_made: weakref.WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = weakref.WeakKeyDictionary()


def spawn_tensor_engine(proc_mesh: ProcMesh) -> DeviceMesh:
    """Return the device mesh of a proc mesh, and start its engine if none runs yet.

    In an actor under `patch_tensor_engine` it is that of the factory.
    """
    name = context().actor_instance.class_name if replacements else None
    if name in replacements:
        return _patched(replacements[name], proc_mesh)
    engine = engine_of(proc_mesh)
    if engine.procs is not proc_mesh and engine.covers(proc_mesh):
        ranks = proc_mesh._shape.ndslice
    else:
        ranks = NDSlice.new_row_major(list(proc_mesh.sizes.values()))
    return mesh_of(engine, ranks, tuple(proc_mesh.sizes))


def _patched(factory: Callable[[ProcMesh], DeviceMesh] | None, procs: ProcMesh) -> DeviceMesh:
    """Return the device mesh of a factory, or a simulated one, for `procs`; the same each time."""
    key = factory, procs._base, tuple(procs._shape.ndslice), tuple(procs.sizes)
    made = _made.setdefault(client_proc(), {})
    mesh = made.get(key)
    if mesh is None:
        if factory is None:
            from monarch._tensors.simulator.engine import mocked

            mesh = mocked(dict(procs.sizes))
        else:
            mesh = factory(procs)
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"the factory of patch_tensor_engine returned {mesh!r}, and has to return a "
                "DeviceMesh, such as monarch.Simulator(hosts, gpus).mesh"
            )
        made[key] = mesh
    return mesh
