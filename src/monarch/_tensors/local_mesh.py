"""Device meshes with their own processes: `python_local_mesh`, `world_mesh`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from monarch._tensors.mesh_of_procs import spawn_tensor_engine
from monarch.actor import HostMesh, this_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from monarch._tensors.mesh import DeviceMesh

__all__ = ["python_local_mesh", "world_mesh"]


def python_local_mesh(*, gpus: int | None = None, hosts: int = 1) -> DeviceMesh:
    """Return a device mesh of new processes on this host, with the dimensions host and gpu.

    `DeviceMesh.exit` ends the processes.

    Args:
        gpus: processes for each host; by default one for each GPU, or one without GPUs.
        hosts: the length of the dimension host; all are on this host.
    """
    count = max(1, torch.cuda.device_count()) if gpus is None else gpus
    return _spawned(this_host(), {"host": hosts, "gpu": count})


def world_mesh(
    ctx: HostMesh | None, hosts: Sequence[Any] | int, gpu_per_host: int, _processes: Any = None
) -> DeviceMesh:
    """Return a device mesh with the dimensions host and gpu; `DeviceMesh.exit` ends its processes.

    Args:
        ctx: the hosts; None for processes on this host only.
        hosts: the hosts, or their number.
        gpu_per_host: processes for each host.
        _processes: None.

    Raises TypeError for a context of the reference's old supervisor, and ValueError if `ctx` has
    another number of hosts.
    """
    count = hosts if isinstance(hosts, int) else len(hosts)
    if _processes is not None or not (ctx is None or isinstance(ctx, HostMesh)):
        raise TypeError(
            "world_mesh() takes a HostMesh, or None for this host: the supervisor of the reference "
            "is not here"
        )
    if ctx is None:
        return _spawned(this_host(), {"host": count, "gpu": gpu_per_host})
    if len(ctx) != count:
        raise ValueError(f"{ctx!r} has {len(ctx)} hosts, not {count}")
    return _spawned(ctx, {"gpu": gpu_per_host})


def _spawned(hosts: HostMesh, dims: dict[str, int]) -> DeviceMesh:
    procs = hosts.spawn_procs(dims)
    mesh = spawn_tensor_engine(procs)
    mesh.client.owns_procs = True
    others = [name for name in mesh.names if name not in ("host", "gpu")]
    if not others:
        return mesh
    if "host" in mesh.names or len(others) > 1:
        raise ValueError(f"{hosts!r} has more dimensions than one")
    return mesh.rename(**{others[0]: "host"})


# Programs import the function from a module of the same name, and get it as an attribute of the
# package: both are this function.
vars(world_mesh)["world_mesh"] = world_mesh
