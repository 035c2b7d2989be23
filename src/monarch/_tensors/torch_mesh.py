"""`TorchMesh`: a mesh as torch's own `DeviceMesh`, for its distributed tensors (DTensor).

A distributed tensor of this package is one local tensor in each process, and so is a DTensor. In a
process, ``DTensor.from_local(local, device_mesh, placements)`` makes one of the other, and
``to_local`` is the way back, both without a copy. Only the `DeviceMesh` of torch is missing, and
that needs process groups of `torch.distributed`: the default one of all processes of the engine
(`worker/default_group.py`), and one for each dimension of the mesh.

A DTensor that a process returns has its `DeviceMesh` with it, which names process groups. Torch
looks for them where it is unpickled, and logs a warning for each that it does not find. The script
is in none of them, so nothing is looked for there: the DTensor can be read and printed, and torch
raises an error when it is to be communicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh as OfTorch

from monarch import _spi
from monarch._tensors.mesh import DeviceMesh
from monarch._tensors.mesh_of_procs import spawn_tensor_engine
from monarch._tensors.worker.default_group import default
from monarch.actor import ProcMesh

if TYPE_CHECKING:
    import torch.distributed as dist
    import torch.distributed.device_mesh as torch_device_mesh

__all__ = ["TorchMesh", "torch_mesh"]


@dataclass(frozen=True)
class TorchMesh:
    """A mesh as an argument of remote functions and endpoints, which is torch's `DeviceMesh` there.

    `torch_mesh` makes it.

    Attributes:
        names: the dimensions.
        sizes: their lengths.
        ranks: the processes, as ranks of the default process group.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    _engine: str

    def device_mesh(self, device: str = "cpu") -> torch_device_mesh.DeviceMesh:
        """Return torch's mesh of the same processes and dimensions, in one of these processes.

        The first call in a process makes the process groups of the dimensions. It blocks until the
        other processes of the mesh have called it. Later calls return the same object. Raises
        RuntimeError after the setting `tensor_collective_timeout`, and in a process that is not in
        the mesh.

        Args:
            device: the kind of device of the local tensors, "cpu" or "cuda".
        """
        with default.of(self._engine, self) as groups:
            found: torch_device_mesh.DeviceMesh | None = groups.made.get((self, device))
            if found is None:
                ranks = torch.tensor(self.ranks).reshape(self.sizes)
                own = self._index()
                place = torch.unravel_index(torch.tensor(own), self.sizes)
                lines = []
                for dim in range(len(self.sizes)):
                    line = [slice(None) if at == dim else i for at, i in enumerate(place)]
                    lines.append(groups.group(ranks[tuple(line)].tolist()))
                found = OfTorch.from_group(lines, device, ranks, mesh_dim_names=self.names)
                groups.made[self, device] = found
            return found

    def process_group(self) -> dist.ProcessGroup:
        """Return a process group of all processes of the mesh, in one of them.

        Blocks and raises as `device_mesh` does.
        """
        with default.of(self._engine, self) as groups:
            self._index()
            return groups.group(self.ranks)

    def _index(self) -> int:
        own = torch.distributed.get_rank()
        if own not in self.ranks:
            raise RuntimeError(f"this process is not in {self!r}")
        return self.ranks.index(own)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name}: {size}" for name, size in zip(self.names, self.sizes, strict=True)
        )
        return f"<TorchMesh {{{sizes}}}>"


def torch_mesh(mesh: DeviceMesh | ProcMesh) -> TorchMesh:
    """Return a mesh as an argument that is torch's `DeviceMesh` in its processes; blocks.

    A mesh without dimensions, of one process, becomes one with the dimension "all". The first call
    for processes, or for a part of them, makes all of them the default process group of
    `torch.distributed`.

    Args:
        mesh: the mesh.

    Raises NotImplementedError for a simulated mesh, and RuntimeError if a process has a default
    process group already, which the program or another engine has made.
    """
    own = spawn_tensor_engine(mesh) if isinstance(mesh, ProcMesh) else mesh
    engine = own.client
    if engine.is_simulated:
        raise NotImplementedError("a simulated mesh has no processes that torch could connect")
    engine.connect()
    return TorchMesh(
        own.names or ("all",),
        tuple(own.processes.sizes) or (1,),
        tuple(own.processes),
        engine.name,
    )


def _reduced(mesh: OfTorch) -> tuple[Any, ...]:
    return _received, (mesh.__reduce_ex__(2)[2],)


def _received(state: dict[str, Any]) -> OfTorch:
    """Return torch's mesh of a message. Its groups are looked for if this process has any."""
    made = OfTorch.__new__(OfTorch)
    if torch.distributed.is_initialized() and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:  # what torch would do, as if it found none
        vars(made).update(state, _pg_registry={})
    return made


_spi.register_reducer(OfTorch, _reduced)
