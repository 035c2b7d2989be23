"""Actors on meshes of processes, in pure Python.

Programs import from the subpackages: `monarch.actor` (actors, meshes, endpoints) and
`monarch.config` (settings). A few names are reachable here as well, and each is loaded on first
use. Importing `monarch` itself loads only the table of old import paths (`monarch._compat`).
pytest, which finds a plugin in this package, imports it as usual: PYTEST_DONT_REWRITE.

>>> import monarch
>>> monarch.Extent(["hosts", "gpus"], [2, 4])
{hosts: 2, gpus: 4}
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from monarch import _compat

if TYPE_CHECKING:
    from monarch import actor, config
    from monarch._diagnosis.collect import diagnose
    from monarch._engine.shapes import Extent, Shape
    from monarch._engine.shapes import Slice as NDSlice
    from monarch.config import (
        clear_runtime_config,
        configure,
        configured,
        get_global_config,
        get_runtime_config,
    )

    # For type checkers. At run time `__getattr__` has the list, with the names of `_HOMES`.
    __all__ = [
        "Extent",
        "NDSlice",
        "Shape",
        "actor",
        "clear_runtime_config",
        "config",
        "configure",
        "configured",
        "diagnose",
        "get_global_config",
        "get_runtime_config",
    ]

_HOMES = {
    "Extent": "monarch._engine.shapes:Extent",
    "NDSlice": "monarch._engine.shapes:Slice",
    "Shape": "monarch._engine.shapes:Shape",
    "clear_runtime_config": "monarch.config:clear_runtime_config",
    "configure": "monarch.config:configure",
    "diagnose": "monarch._diagnosis.collect:diagnose",
    "configured": "monarch.config:configured",
    "get_global_config": "monarch.config:get_global_config",
    "get_runtime_config": "monarch.config:get_runtime_config",
    "Simulator": "monarch._tensors.simulator.interface:Simulator",
    "ActorFuture": "monarch.actor:Future",
    "Future": "monarch._reference.polled_future:Future",
    "OpaqueRef": "monarch._tensors.opaque_ref:OpaqueRef",
    "RemoteProcessGroup": "monarch._tensors.process_group:RemoteProcessGroup",
    "Selection": "monarch._reference.selection:Selection",
    "Stream": "monarch._tensors.stream:Stream",
    "Tensor": "monarch._tensors.tensor:Tensor",
    "coalescing": "monarch._tensors.coalescing:coalescing",
    "compile": "monarch._tensors.recording:compile",
    "call_on_shard_and_fetch": "monarch._tensors.remote:call_on_shard_and_fetch",
    "fetch_shard": "monarch._tensors.fetch:fetch_shard",
    "function_resolvers": "monarch._tensors.function:resolvers",
    "get_active_mesh": "monarch._tensors.mesh:get_active_mesh",
    "get_active_stream": "monarch._tensors.stream:get_active_stream",
    "grad_function": "monarch._tensors.grad_function:grad_function",
    "grad_generator": "monarch._tensors.gradient:grad_generator",
    "inspect": "monarch._tensors.fetch:inspect",
    "mast_reserve": "monarch._reference.notebook:reserve_torchx",
    "no_mesh": "monarch._tensors.mesh:no_mesh",
    "reduce": "monarch._tensors.reduction:reduce",
    "reduce_": "monarch._tensors.reduction:reduce_",
    "remote": "monarch._tensors.remote:remote",
    "set_meta": "monarch._tensors.simulator.engine:set_meta",
    "show": "monarch._tensors.fetch:show",
    "slice_mesh": "monarch._tensors.transfer:slice_mesh",
    "to_mesh": "monarch._tensors.transfer:to_mesh",
    "world_mesh": "monarch._tensors.local_mesh:world_mesh",
}

_MODULES = frozenset({"actor", "config", "builtins", "job", "rdma", "timer"})

if sys.platform == "win32":
    raise ImportError(
        "pymonarch does not run on Windows: it needs POSIX processes and sockets; use Linux, for "
        "example in WSL 2"
    )
if sys.platform in ("emscripten", "wasi"):
    raise ImportError(
        "pymonarch does not run in WebAssembly: it needs processes, threads and sockets of the "
        "operating system"
    )
if not getattr(sys, "_is_gil_enabled", lambda: True)():  # not in Python before 3.13
    raise ImportError(
        "pymonarch does not run on free-threaded Python without the interpreter lock, which its "
        "engine relies on; set PYTHON_GIL=1, or use the ordinary build of Python"
    )

_compat.install()


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        # Kept, so that the next use is that of an ordinary attribute.
        found = globals()[name] = _compat.resolve(home)
        return found
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"monarch.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("pymonarch")
    if name == "__all__":
        return _all()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_all()})


def _all() -> list[str]:
    """Return the names of ``from monarch import *``; those that need torch only where it is."""
    from importlib.util import find_spec

    has_torch = find_spec("torch") is not None
    served = {
        name
        for name, home in _HOMES.items()
        if (has_torch or not home.startswith("monarch._tensors.")) and name != "compile"
    }
    return sorted(served | {"actor", "builtins", "config", "timer"})
