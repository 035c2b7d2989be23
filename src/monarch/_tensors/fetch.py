"""Fetching: values of distributed tensors, from one process to the client."""

from __future__ import annotations

import importlib
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch._tensors.active import active
from monarch._tensors.errors import RemoteException
from monarch._tensors.misplaced import place_of_call
from monarch._tensors.pickled import pickled
from monarch._tensors.stream import main
from monarch._tensors.tensor import Tensor
from monarch._tensors.where import frames_of, here
from monarch._tensors.worker.template import Lost, Raised, Reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from monarch._tensors.core.aliases import Stack
    from monarch._tensors.engine import Engine
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.place import Place
    from monarch._tensors.worker.stream import Report
    from monarch.actor import Future

__all__ = ["ask", "fetch_shard", "inspect", "rank_of", "request", "show"]

T = TypeVar("T")


def fetch_shard(obj: T, shard: dict[str, int] | None = None, **coordinates: int) -> Future[T]:
    """Return a future of `obj` with each distributed tensor replaced by one process's local tensor.

    Does not block. Tensors are detached and on the CPU; what is no tensor stays as it is.

    Args:
        obj: a tensor, or a structure of lists, tuples and dicts with tensors.
        shard: the coordinates of the process; without any, the first one.
        **coordinates: the same as keywords.

    Raises ValueError for a missing coordinate or one out of range, KeyError for an unknown
    dimension, and TypeError for tensors that are not on one mesh and the active stream. The future
    raises `RemoteException` if the value was not computed because of an error, on whatever process.
    """
    tensor: Any = obj
    if type(tensor) is Tensor:
        place = tensor._place
        if not tensor._aliases.usable or place.stream is not (active().stream or main):
            place = place_of_call("fetch_shard", (obj,), {}, [obj])
        rank = rank_of(place.mesh, shard, coordinates)
        return request(place, ("value", (rank,), tensor._ref), rank, (tensor._ref,))
    leaves = [leaf for leaf in pytree.tree_leaves(obj) if isinstance(leaf, torch.Tensor)]
    place = place_of_call("fetch_shard", leaves, {}, leaves)
    rank = rank_of(place.mesh, shard, coordinates)
    structure = pytree.tree_map(_reference, obj)
    refs = tuple(leaf._ref for leaf in leaves if type(leaf) is Tensor)
    return request(place, ("fetch", (rank,), pickled(structure)), rank, refs)


def inspect(obj: T, shard: dict[str, int] | None = None, **coordinates: int) -> T:
    """Return `obj` with the local tensors of one process; blocks. See `fetch_shard`."""
    return fetch_shard(obj, shard, **coordinates).get()


def show(obj: Any, shard: dict[str, int] | None = None, **coordinates: int) -> object:
    """Show the tensors of one process as pictures, with torchshow or else matplotlib.

    Raises ModuleNotFoundError if neither is installed.
    """
    value = inspect(obj, shard, **coordinates)
    with _disable_current_modes():  # the value is local, maybe while a mesh is active
        try:
            torchshow = importlib.import_module("torchshow")
        except ModuleNotFoundError:
            return _drawn(value)
        shown: object = torchshow.show(value)
        return shown


def _drawn(value: Any) -> object:
    import matplotlib.pyplot as plt

    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    figure, axes = plt.subplots(1, max(1, len(tensors)), squeeze=False)
    for axis, tensor in zip(axes[0], tensors, strict=False):
        picture = tensor.detach().float().squeeze()
        axis.set_title(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
        if picture.dim() <= 1:
            axis.plot(picture.reshape(-1).numpy())
        else:
            axis.imshow(picture.reshape(-1, picture.shape[-1]).numpy())
    plt.show()
    return figure


def rank_of(mesh: DeviceMesh, shard: dict[str, int] | None, coordinates: dict[str, int]) -> int:
    """Return the rank at the given coordinates; without any, the first."""
    given = {**(shard or {}), **coordinates}
    if not given:
        return mesh.processes.offset
    index = []
    sizes = mesh.sizes
    for name in mesh.names:
        if name not in given:
            raise ValueError(f"Missing key {name!r} in shard map: {mesh!r} has {sizes}")
        coordinate = given.pop(name)
        if not 0 <= coordinate < sizes[name]:
            raise ValueError(
                f"coordinate {name}={coordinate} is out of range: {mesh!r} has {sizes}"
            )
        index.append(coordinate)
    if given:
        raise KeyError(f"{mesh!r} does not have dimension {next(iter(given))!r}")
    return mesh.processes.nditem(index)


def _reference(leaf: Any) -> Any:
    return Reference(leaf._ref) if type(leaf) is Tensor else leaf


def request(place: Place, question: Any, rank: int, refs: tuple[int, ...]) -> Future[Any]:
    """Ask the processes, and return the future of the answer of `rank`.

    It raises `RemoteException` if one of `refs` is lost on any process.
    """
    return _asked(place, question, refs, rank)


def ask(place: Place, question: Any, refs: tuple[int, ...]) -> Future[Answers]:
    """Ask the processes about the values `refs`; return the future of their answers."""
    return _asked(place, question, refs, None)


def _asked(place: Place, question: Any, refs: tuple[int, ...], rank: int | None) -> Future[Any]:
    """Ask, and return the future of the answer of `rank`, or of all if that is None."""
    engine: Engine = place.engine
    where = here()
    ticket = engine.new_ref()

    def settle(reports: Iterator[Report]) -> Any:
        values = _decoded(reports)
        engine.settle(values)
        engine.check(ticket)
        answers = Answers(engine, values, where)
        return answers if rank is None else answers.of(rank)

    return engine.ask(place, question, refs, ticket, where, settle)


def _decoded(reports: Iterator[Report]) -> list[Report]:
    """Return the reports, whose tensors are local ones even if a mesh is active."""
    modes = []
    while torch._C._len_torch_dispatch_stack():
        modes.append(torch._C._pop_torch_dispatch_stack(None))
    try:
        return list(reports)
    finally:
        while modes:
            torch._C._push_on_torch_dispatch_stack(modes.pop())


class Answers:
    """The answers of the processes to a question."""

    def __init__(self, engine: Engine, reports: Sequence[Report], where: Stack) -> None:
        self._engine = engine
        self._reports = reports
        self._where = where

    def of(self, rank: int) -> Any:
        """Return the answer of a process. Raises `RemoteException` if it has none."""
        value = self._reports[rank][2]
        if type(value) is Lost:
            failure = self._engine.history.failures.get(value.seq)
            if failure is not None:
                raise self._engine.exception_of(failure)
            text = "the value was lost by an earlier failure"
            raise RemoteException(text, frames_of(self._where), rank)
        if type(value) is Raised:
            original = None
            if value.pickled is not None:
                original = pickle.loads(value.pickled)
            frames = frames_of(self._where)
            raise RemoteException(value.text, frames, rank, [rank], original)
        return value
