"""`data_parallel`: the gradients of a module are averaged over processes while a backward runs.

Parameters are in buckets, in the reverse of their order, which is about the order in which a
backward computes their gradients. As soon as all gradients of a bucket are there the processes
begin to combine them, all in one piece, and compute on. At the end of the backward they wait for
the results. That is the way of torch's DistributedDataParallel, whose sizes of buckets these are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from monarch._tensors.active import active
from monarch._tensors.core.reduction import Combination
from monarch._tensors.core.special import COMBINE, COMBINED, new_number
from monarch._tensors.misplaced import explain
from monarch._tensors.reduction import reduce
from monarch._tensors.tensor import Tensor
from monarch._tensors.where import here

if TYPE_CHECKING:
    from monarch._tensors.mesh import DeviceMesh
    from monarch._tensors.place import Place

__all__ = ["data_parallel"]

M = TypeVar("M", bound=torch.nn.Module)

_FIRST = 1 << 20  # bytes of the first bucket, which is small to begin early
_BUCKET = 25 << 20


def data_parallel(
    module: M, dims: str | Sequence[str], *, bucket_bytes: int = _BUCKET, equalize: bool = True
) -> M:
    """Let each backward average the gradients of `module` over processes; return the module.

    Each process computes with its own part of the batch. After ``loss.backward()`` the gradients
    are the same in all of them, so the optimizer keeps the weights the same. The processes combine
    gradients while they compute the rest of the backward.

    A parameter that a backward does not use keeps its gradient. Within ``with module.no_sync():`` a
    backward averages nothing, so gradients add up; the first one after the block averages the sums.

    Args:
        module: a module whose parameters are distributed tensors of one mesh.
        dims: the dimensions of that mesh over which the gradients are averaged; () means all.
        bucket_bytes: the size from which a piece of gradients is combined; for the first piece at
            most 1 MiB.
        equalize: give each process the parameters and buffers of the first one along `dims`, as
            they differ if a mesh was active when the module was made. False if they are the same.

    Raises KeyError for an unknown dimension, ValueError for a module without parameters that
    require a gradient and for one that is data parallel already, and TypeError for ordinary tensors
    and for parameters on several meshes.
    """
    parameters: list[Any] = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        raise ValueError("data_parallel needs a module with parameters that require a gradient")
    if "no_sync" in vars(module):
        raise ValueError("this module is data parallel already")
    for tensor in (*parameters, *module.buffers()):
        if type(tensor) is not Tensor:
            raise explain("data_parallel", (tensor,), {}, active().mesh, None)
    mesh: DeviceMesh = parameters[0].mesh
    if any(parameter.mesh is not mesh for parameter in parameters):
        raise TypeError("data_parallel needs parameters on one mesh; call it for each part")
    names = (dims,) if isinstance(dims, str) else tuple(dims) or mesh.names
    for name in names:
        if name not in mesh.names:
            raise KeyError(f"dim {name} not found: {mesh!r} has {mesh.sizes}")
    if equalize and mesh.size(names) > 1:
        _equalize(module, mesh, names)
    averages = _Averages(mesh, names, _buckets(parameters, bucket_bytes))
    vars(module)["no_sync"] = averages.no_sync
    for bucket in averages.buckets:
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(averages.hook(bucket))
    return module


def _equalize(module: torch.nn.Module, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    with mesh.activate(), torch.no_grad():
        is_first = mesh.rank(names) == 0
        tensors: list[Any] = [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            with tensor.stream.activate():
                own = torch.where(is_first, tensor, torch.zeros((), dtype=tensor.dtype))
                tensor.copy_(reduce(own, names))


class _Bucket:
    """Parameters whose gradients are combined in one piece."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []
        self.nbytes = 0
        self.ready: list[Any] = []  # those that have their gradient of this backward


def _buckets(parameters: Sequence[Any], limit: int) -> list[_Bucket]:
    """Return the parameters in buckets, each of one dtype and device."""
    made: list[_Bucket] = []
    filling: dict[Any, _Bucket] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter._meta.device
        bucket = filling.get(kind)
        if bucket is None:
            bucket = filling[kind] = _Bucket()
            made.append(bucket)
        bucket.parameters.append(parameter)
        bucket.nbytes += parameter._meta.nbytes()
        if bucket.nbytes >= (min(_FIRST, limit) if bucket is made[0] else limit):
            del filling[kind]
    return made


class _Averages:
    """The hooks of one module."""

    def __init__(self, mesh: DeviceMesh, names: tuple[str, ...], buckets: list[_Bucket]) -> None:
        self.buckets = buckets
        self._ranks = mesh.processes
        self._dims = tuple(index for index, name in enumerate(mesh.names) if name in names)
        self._names = names
        self._is_quiet = False
        self._is_running = False  # whether the end of a backward is awaited
        self._begun: list[tuple[Place, int, list[Tensor]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Averages:
        return self  # a copy of the module has no hooks, and must not copy the parameters twice

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Let backwards within the ``with`` block average nothing."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def hook(self, bucket: _Bucket) -> Callable[[Any], None]:
        """Return what torch calls when a parameter of `bucket` has its gradient."""

        def ready(parameter: Any) -> None:
            if self._is_quiet:
                return
            if not self._is_running:
                self._finish()  # what a backward that failed has left
                self._is_running = True
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._finish)
            bucket.ready.append(parameter)
            if len(bucket.ready) == len(bucket.parameters):
                self._begin(bucket)

        return ready

    def _begin(self, bucket: _Bucket) -> None:
        """Let the processes begin to combine the gradients that are there."""
        by_place: dict[Place, list[Tensor]] = {}
        for parameter in bucket.ready:
            gradient = parameter.grad
            by_place.setdefault(gradient._place, []).append(gradient)
        bucket.ready = []
        for place, gradients in by_place.items():
            spec = Combination(
                *(self._ranks, self._dims, self._names, True),
                tuple(gradient._meta for gradient in gradients),
            )
            number = new_number()
            place.engine.rendezvous()
            refs = tuple(gradient._ref for gradient in gradients)
            place.engine.emit(place, (COMBINE, number, refs, spec), here())
            self._begun.append((place, number, gradients))

    def _finish(self) -> None:
        """Let the processes wait for what has begun, at the end of a backward."""
        self._is_running = False
        for bucket in self.buckets:
            if bucket.ready:
                self._begin(bucket)
        begun, self._begun = self._begun, []
        for place, number, gradients in begun:
            refs = tuple(gradient._ref for gradient in gradients)
            others = {ref for gradient in gradients for ref in gradient._aliases.refs}
            command = (COMBINED, number, refs, tuple(others.difference(refs)))
            place.engine.emit(place, command, here())
            for gradient in gradients:
                gradient._aliases.forget()
                torch.autograd.graph.increment_version(cast("torch.Tensor", gradient))
