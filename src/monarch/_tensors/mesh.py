"""`DeviceMesh`: processes in a mesh, as operations on distributed tensors see them.

Meshes of one engine with equal dimensions and ranks are one object: ``mesh.slice(gpus=0)`` twice
gives the same mesh, and their tensors can be used together.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch._spi import MeshTrait
from monarch._tensors import compiler, data, direct, initial, loader
from monarch._tensors.absent import Absent
from monarch._tensors.active import Guard, active, enter, leave
from monarch._tensors.core.cache import Cache
from monarch._tensors.core.metadata import Metadata
from monarch._tensors.core.reduction import Reduction
from monarch._tensors.core.special import COORDINATE
from monarch._tensors.engine import Engine
from monarch._tensors.gradient import context_history
from monarch._tensors.mode import push, see, stand, stand_aside, when_seen
from monarch._tensors.place import Place
from monarch._tensors.stream import Stream, get_active_stream, on_stream_change
from monarch._tensors.tensor import Tensor
from monarch._tensors.where import here
from monarch._tensors.worker.argument import MeshArgument
from monarch.actor import Shape
from monarch.actor import Slice as NDSlice

__all__ = [
    "DeviceMesh",
    "get_active_mesh",
    "mesh_of",
    "no_mesh",
    "on_mesh_change",
]

on_mesh_change: list[Callable[[Any, Any], None]] = []
"""Called with the old and the new mesh (or None) when another one becomes active."""

_REDUCTIONS = 1024  # distinct ones that a mesh keeps, twice
_SHOWN = 16  # ranks in the text of a mesh
_INT64 = Metadata((), (), 0, torch.int64, torch.device("cpu"))


class DeviceMesh(MeshTrait):
    """A mesh of processes that hold tensors.

    Use the one that `ProcMesh.activate` activates (`get_active_mesh`), or `Tensor.mesh`.

    Attributes:
        client: the engine that issues the operations.
        processes: the ranks, in the proc mesh.
        names: the dimensions.
        reductions: the work of reductions, which a batch of commands has once if it is one object.
    """

    define_remotely = Absent("a mesh is known to its processes at its first operation")
    delete_ref = Absent("processes keep no mesh that has to be released")

    def __init__(
        self,
        client: Engine,
        processes: NDSlice,
        names: tuple[str, ...],
        mesh_name: str = "default",
    ) -> None:
        self.client = client
        self.processes = processes
        self.names = tuple(names)
        self.mesh_name = mesh_name
        self.is_whole = list(processes) == list(range(len(client.procs)))
        self.reductions: Cache[Reduction] = Cache(_REDUCTIONS, lambda _: None)
        self._places: dict[Stream, Place] = {}

    # -- the mesh ---------------------------------------------------------------------------------

    @property
    def _ndslice(self) -> NDSlice:
        return self.processes

    @property
    def _labels(self) -> tuple[str, ...]:
        return self.names

    def _new_with_shape(self, shape: Shape) -> DeviceMesh:
        return mesh_of(self.client, shape.ndslice, tuple(shape.labels), self.mesh_name)

    def flatten(self, name: str) -> DeviceMesh:
        """Return this mesh with all dimensions replaced by one; ValueError unless it is dense."""
        return super().flatten(name)

    def __call__(self, **coordinates: int | slice) -> DeviceMesh:
        """Return a slice. Deprecated: use `slice`."""
        warnings.warn("mesh(dim=...) is deprecated; use mesh.slice(dim=...)", DeprecationWarning, 2)
        return self.slice(**coordinates)

    def __repr__(self) -> str:
        ranks = [str(rank) for rank in self.processes]
        if len(ranks) > _SHOWN:
            ranks[_SHOWN - 2 : -1] = ["..."]
        return f"<DeviceMesh({self.names}, [{', '.join(ranks)}])>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DeviceMesh cannot be pickled: it belongs to the program that issues its operations"
        )

    # -- activity ---------------------------------------------------------------------------------

    def activate(self) -> Guard:
        """Make this the active mesh, from this call on.

        Operations of torch in this task of asyncio, or this thread, factories among them, then run
        on all its processes. Tasks and callbacks that are made meanwhile inherit it, as do threads
        of `asyncio.to_thread`; other threads do not. Leaving a ``with`` block restores the mesh
        that was active before; without one, `deactivate` does.
        """
        return activate(self)

    def deactivate(self) -> None:
        """End the last activation of this mesh that still lasts."""
        for guard, name, value, _ in reversed(active().entries):
            if name == "mesh" and value is self:
                cast("Guard", guard).__exit__()
                return

    # -- tensors ----------------------------------------------------------------------------------

    def rank(self, dims: str | Sequence[str]) -> Tensor:
        """Return an int64 scalar: each process's coordinate along `dims`, combined row-major.

        Raises KeyError for an unknown dimension.
        """
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        for name in names:
            if name not in self.names:
                raise KeyError(f"{self!r} does not have dimension {name!r}")
        return self._coordinate(tuple(map(self.names.index, names)))

    @property
    def ranks(self) -> dict[str, Tensor]:
        """The tensor `rank` of each dimension, by its name."""
        return {name: self.rank(name) for name in self.names}

    def process_idx(self) -> Tensor:
        """Return an int64 scalar: each process's rank in the proc mesh."""
        return self._coordinate(None)

    def _coordinate(self, dims: tuple[int, ...] | None) -> Tensor:
        place = self.client.place(self, get_active_stream())
        tensor = self.client.tensor(_INT64, place)
        self.client.emit(place, (COORDINATE, tensor._ref, self.processes, dims), here())
        return tensor

    def process_group(self, dims: str | Sequence[str]) -> Any:
        """Return a handle that is a process group of torch in remote functions."""
        from monarch._tensors.process_group import RemoteProcessGroup

        return RemoteProcessGroup((dims,) if isinstance(dims, str) else tuple(dims), self)

    def to_tensor(self) -> torch.Tensor:
        """Return the ranks as a local int32 tensor in the shape of the mesh."""
        with no_mesh.activate():
            ranks = torch.tensor(list(self.processes), dtype=torch.int32)
            return ranks.reshape(list(self.processes.sizes))

    def to_table(self) -> str:
        """Return coordinates and ranks as text, a line each."""
        return self._in_columns("rank", self.processes)

    def _on_worker(self) -> MeshArgument:
        return MeshArgument(self.processes, self.names)

    def exit(self) -> None:
        """Wait for all work, end the engine, and raise the first error that no future has raised.

        Later operations on the engine's meshes raise RuntimeError.
        """
        self.client.exit()

    def stack(self, **_kwargs: Any) -> NoReturn:
        """Not available, as in the reference."""
        raise NotImplementedError("DeviceMesh.stack is not implemented")

    def rotate(self, **_kwargs: Any) -> NoReturn:
        """Not available, as in the reference."""
        raise NotImplementedError("DeviceMesh.rotate is not implemented")


def mesh_of(
    engine: Engine, ranks: NDSlice, names: tuple[str, ...], mesh_name: str = "default"
) -> DeviceMesh:
    """Return the mesh of these ranks; the same object for equal ranks and names."""
    key = (ranks, names)
    with engine.lock:
        mesh = engine.meshes.get(key)
        if mesh is None:
            mesh = engine.meshes[key] = DeviceMesh(engine, ranks, names, mesh_name)
        return cast("DeviceMesh", mesh)


# -- what is active -------------------------------------------------------------------------------


def activate(mesh: DeviceMesh | None) -> Guard:
    """Make `mesh`, or no mesh, the active one; the guard restores what was active."""
    old: DeviceMesh | None = active().mesh
    beneath = contextlib.ExitStack()
    presence: object = None
    if mesh is not None and mesh.client.is_simulated:
        beneath.enter_context(mesh.client.beneath())
        presence = push()
    elif mesh is not None:
        presence = stand()
    elif old is not None and old.client.is_simulated:
        beneath.enter_context(_disable_current_modes())
    else:
        beneath.callback(stand_aside())
    guard = Guard()
    enter(guard, "mesh", mesh, presence)
    _changed(old)

    def end() -> None:
        before = active().mesh
        leave(guard)
        beneath.close()
        _changed(before)

    guard.end = end
    return guard


def _changed(old: DeviceMesh | None) -> None:
    see()
    for callback in on_mesh_change:
        callback(old, active().mesh)


def _note(number: int) -> None:
    """Let the backward of the operations from a number on run on what is active now."""
    mesh, stream = active().mesh, get_active_stream()
    context_history.note(lambda: _both(mesh, stream), number)


@contextlib.contextmanager
def _both(mesh: DeviceMesh | None, stream: Stream) -> Generator[None, None, None]:
    with activate(mesh), stream.activate():
        yield


when_seen.append(_note)
on_stream_change.append(lambda _old, _new: see())
direct.define()
data.define()
initial.define()
compiler.define()


class _NoMesh:
    """`no_mesh.activate()`: operations of torch are local within the ``with`` block."""

    def activate(self) -> Guard:
        """Deactivate the active mesh, from this call to the end of the ``with`` block."""
        return activate(None)


no_mesh = _NoMesh()
"""`no_mesh.activate()`: operations of torch are local within the ``with`` block."""
loader.define(no_mesh.activate)


def get_active_mesh() -> DeviceMesh:
    """Return the mesh that is active in this task or thread. Raises ValueError if none is."""
    mesh: DeviceMesh | None = active().mesh
    if mesh is None:
        raise ValueError("no device mesh is active: use `with mesh.activate():`")
    return mesh
