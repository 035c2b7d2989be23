"""`RemoteProcessGroup`: a process group of torch, for functions that run on the processes."""

from __future__ import annotations

from typing import Any

from monarch._tensors.absent import Absent
from monarch._tensors.worker.argument import GroupArgument

__all__ = ["RemoteProcessGroup"]


class RemoteProcessGroup:
    """The processes along some dimensions of a mesh, as an argument of remote functions.

    There it is a `torch.distributed.ProcessGroup` that works with gloo on CPUs and NCCL on GPUs. It
    is made at its first use, which waits for all its processes.

    Args:
        dims: the names of the dimensions.
        device_mesh: the `DeviceMesh`.

    Raises KeyError for an unknown dimension.
    """

    delete_ref = Absent("use drop()")
    ensure_split_comm_remotely = Absent("a group is made at its first use")

    def __init__(self, dims: str | tuple[str, ...], device_mesh: Any) -> None:
        self.dims = (dims,) if isinstance(dims, str) else tuple(dims)
        self.device_mesh = device_mesh
        for name in self.dims:
            if name not in device_mesh.names:
                raise KeyError(f"{device_mesh!r} does not have dimension {name!r}")
        self.dropped = False

    def size(self) -> int:
        """Return the number of processes in each group."""
        size: int = self.device_mesh.size(self.dims)
        return size

    def drop(self) -> None:
        """Make it unusable for later calls."""
        self.dropped = True

    def _on_worker(self) -> GroupArgument:
        if self.dropped:
            raise RuntimeError(f"{self!r} was dropped")
        mesh = self.device_mesh
        mesh.client.rendezvous()
        dims = tuple(index for index, name in enumerate(mesh.names) if name in self.dims)
        return GroupArgument(mesh.processes, dims, self.size())

    def __repr__(self) -> str:
        return f"<process group over {', '.join(self.dims)} of {self.device_mesh!r}>"
