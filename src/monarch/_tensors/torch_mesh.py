"""`TorchMesh`: a mesh as torch's own `DeviceMesh`, for its distributed tensors (DTensor).

A distributed tensor of this package is one local tensor in each process, and so is a DTensor. In a
process, ``DTensor.from_local(local, device_mesh, placements)`` makes one of the other, and
``to_local`` is the way back, both without a copy. Only the `DeviceMesh` of torch is missing, and
that needs a default process group of `torch.distributed`: it is made here, with the rendezvous of
the engine.

A process has one default group. So it can be in one such mesh only; its dimensions are parts of it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from monarch import _spi
from monarch._tensors.mesh import DeviceMesh
from monarch._tensors.mesh_of_procs import spawn_tensor_engine
from monarch._tensors.worker.store import RendezvousStore
from monarch.actor import ProcMesh

if TYPE_CHECKING:
    import torch.distributed.device_mesh as torch_device_mesh

__all__ = ["TorchMesh", "torch_mesh"]

_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class TorchMesh:
    """A mesh as an argument of remote functions and endpoints, which is torch's `DeviceMesh` there.

    `torch_mesh` makes it.

    Attributes:
        names: the dimensions.
        sizes: their lengths.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    _engine: str
    _keeper: int
    _processes: tuple[int, ...]
    _is_local: bool

    def device_mesh(self, device: str = "cpu") -> torch_device_mesh.DeviceMesh:
        """Return torch's mesh of the same processes and dimensions, in one of these processes.

        The first call in a process makes the default group of `torch.distributed`. It blocks until
        all processes of the mesh have called it. Later calls return the same object. Raises
        RuntimeError after the setting `tensor_collective_timeout`, and in a process that is not in
        the mesh or has another default group.

        Args:
            device: the kind of device of the local tensors, "cpu" or "cuda".
        """
        with _made.lock, _loopback() if self._is_local else contextlib.nullcontext():
            if _made.mesh is None and not dist.is_initialized():
                self._init()
            if _made.mesh != self:
                other = _made.mesh.names if _made.mesh is not None else "the program's own"
                raise RuntimeError(
                    f"this process is in another default group of torch.distributed ({other}), and "
                    f"cannot be in that of {self!r}, too. Use one mesh for all distributed tensors "
                    "of torch on these processes; a part of it is device_mesh[name]"
                )
            found = _made.device_meshes.get(device)
            if found is None:
                made = init_device_mesh(device, self.sizes, mesh_dim_names=self.names)
                found = _made.device_meshes[device] = made
            return found

    def _init(self) -> None:
        """Make the default group."""
        own = _spi.own_uid()
        if own not in self._processes:
            raise RuntimeError(f"this process is not in {self!r}")
        seconds = _spi.settings.tensor_collective_timeout
        _made.store = RendezvousStore(self._engine, self._keeper, seconds)
        prefix = "/".join(("default", *map(str, self._processes)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo",
            store=dist.PrefixStore(prefix, _made.store),
            rank=self._processes.index(own),
            world_size=len(self._processes),
            timeout=dt.timedelta(seconds=seconds),
        )
        _made.mesh = self

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name}: {size}" for name, size in zip(self.names, self.sizes, strict=True)
        )
        return f"<TorchMesh {{{sizes}}}>"


class _Made:
    """The mesh that this process has made, if any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mesh: TorchMesh | None = None
        self.store: Any = None  # torch calls its methods as long as it lives
        self.device_meshes: dict[str, Any] = {}


_made = _Made()


@contextlib.contextmanager
def _loopback() -> Generator[None, None, None]:
    """Let the groups of gloo that are made meanwhile use the loopback device.

    Unless the environment says otherwise. Without this gloo looks up the name of the host.
    """
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if _INTERFACE in os.environ or not names:
        yield
        return
    os.environ[_INTERFACE] = names[0]
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def torch_mesh(mesh: DeviceMesh | ProcMesh) -> TorchMesh:
    """Return a mesh as an argument that is torch's `DeviceMesh` in its processes; blocks.

    A mesh without dimensions, of one process, becomes one with the dimension "all".

    Args:
        mesh: the mesh.

    Raises NotImplementedError for a simulated mesh.
    """
    own = spawn_tensor_engine(mesh) if isinstance(mesh, ProcMesh) else mesh
    engine = own.client
    if engine.is_simulated:
        raise NotImplementedError("a simulated mesh has no processes that torch could connect")
    uids = engine.procs._uids()
    hosts = engine.procs._hosts
    return TorchMesh(
        own.names or ("all",),
        tuple(own.processes.sizes) or (1,),
        engine.name,
        engine.rendezvous(),
        tuple(uids[rank] for rank in own.processes),
        hosts is None or len(hosts) == 1,
    )
