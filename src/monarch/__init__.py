"""Actors on meshes of processes, in pure Python.

Programs import from the subpackages: `monarch.actor` (actors, meshes, endpoints) and
`monarch.config` (settings). A few names are reachable here as well, and each is loaded on first
use. Importing `monarch` itself loads only the table of old import paths (`monarch._compat`).

>>> import monarch
>>> monarch.Extent(["hosts", "gpus"], [2, 4])
{hosts: 2, gpus: 4}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch import _compat

if TYPE_CHECKING:
    from monarch import actor, config
    from monarch._engine.shapes import Extent, Shape
    from monarch._engine.shapes import Slice as NDSlice
    from monarch.config import (
        clear_runtime_config,
        configure,
        configured,
        get_global_config,
        get_runtime_config,
    )

__all__ = [
    "Extent",
    "NDSlice",
    "Shape",
    "actor",
    "clear_runtime_config",
    "config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
]

_HOMES = {
    "Extent": "monarch._engine.shapes:Extent",
    "NDSlice": "monarch._engine.shapes:Slice",
    "Shape": "monarch._engine.shapes:Shape",
    "clear_runtime_config": "monarch.config:clear_runtime_config",
    "configure": "monarch.config:configure",
    "configured": "monarch.config:configured",
    "get_global_config": "monarch.config:get_global_config",
    "get_runtime_config": "monarch.config:get_runtime_config",
    "OpaqueRef": "monarch._tensors.opaque_ref:OpaqueRef",
    "RemoteProcessGroup": "monarch._tensors.process_group:RemoteProcessGroup",
    "Stream": "monarch._tensors.stream:Stream",
    "Tensor": "monarch._tensors.tensor:Tensor",
    "coalescing": "monarch._tensors.coalescing:coalescing",
    "call_on_shard_and_fetch": "monarch._tensors.remote:call_on_shard_and_fetch",
    "fetch_shard": "monarch._tensors.fetch:fetch_shard",
    "function_resolvers": "monarch._tensors.function:resolvers",
    "get_active_mesh": "monarch._tensors.mesh:get_active_mesh",
    "get_active_stream": "monarch._tensors.stream:get_active_stream",
    "grad_function": "monarch._tensors.grad_function:grad_function",
    "grad_generator": "monarch._tensors.gradient:grad_generator",
    "inspect": "monarch._tensors.fetch:inspect",
    "no_mesh": "monarch._tensors.mesh:no_mesh",
    "reduce": "monarch._tensors.reduction:reduce",
    "reduce_": "monarch._tensors.reduction:reduce_",
    "remote": "monarch._tensors.remote:remote",
    "show": "monarch._tensors.fetch:show",
    "slice_mesh": "monarch._tensors.transfer:slice_mesh",
    "to_mesh": "monarch._tensors.transfer:to_mesh",
}

# Names of distributed tensors that this release lacks. `monarch.Future` is one of them, and not
# `monarch.actor.Future`.
_TENSOR_ENGINE = frozenset(
    """
    ActorFuture Future Selection Simulator mast_reserve set_meta
    world_mesh
    """.split()
)

_compat.install()


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        return _compat.resolve(home)
    if name in {"actor", "config", "builtins", "job", "rdma", "timer"}:
        import importlib

        return importlib.import_module(f"monarch.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("pymonarch")
    if name in _TENSOR_ENGINE:
        hint = " (the future of an endpoint call is monarch.actor.Future)" * (name == "Future")
        # ImportError, so that `from monarch import Tensor` shows this text.
        raise ImportError(
            f"monarch.{name} belongs to a part of the tensor engine that this release lacks{hint}",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
