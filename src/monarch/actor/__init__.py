"""Actors on meshes of processes: the programming interface.

>>> from monarch.actor import Actor, current_rank, endpoint, this_host
>>> class Adder(Actor):
...     def __init__(self, base): self.base = base
...     @endpoint
...     def add(self, x): return self.base + x + current_rank()["gpus"]
>>> procs = this_host().spawn_procs({"gpus": 2})
>>> adders = procs.spawn("adders", Adder, 10)
>>> adders.add.call(1).get().values()
[11, 12]
>>> procs.stop().get()
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from monarch._engine.base.address import ChannelTransport
from monarch._engine.base.bootstrap_command import BootstrapCommand
from monarch._engine.base.errors import ActorError, DeadlockError, SupervisionError
from monarch._engine.base.failure import MeshFailure
from monarch._engine.mesh.call.context import (
    Context,
    context,
    current_actor_name,
    current_rank,
    current_size,
)
from monarch._engine.mesh.call.endpoint import (
    Endpoint,
    as_endpoint,
    concurrent_endpoint,
    endpoint,
    send,
)
from monarch._engine.mesh.call.port import Channel, Port, PortReceiver
from monarch._engine.mesh.meshes.actor import Actor, Restart
from monarch._engine.mesh.meshes.controller import get_or_spawn_controller
from monarch._engine.mesh.meshes.host_mesh import HostMesh, default_bootstrap_cmd, this_host
from monarch._engine.mesh.meshes.proc_mesh import ProcMesh, this_proc
from monarch._engine.mesh.results.future import Future, returns_future
from monarch._engine.mesh.results.value_mesh import ValueMesh
from monarch._engine.mesh.script.shutdown import job_id, shutdown_context
from monarch._engine.shapes import Extent, Point, Region, Shape, Slice

if TYPE_CHECKING:
    from monarch._debug import debug_controller
    from monarch._engine.mesh.call.accumulator import Accumulator
    from monarch._engine.mesh.script.attach import (
        attach,
        attach_to_workers,
        enable_transport,
        run_worker_loop_forever,
        run_worker_loop_until_shutdown,
        start_worker_loop_forever,
    )
    from monarch._failover.reattachment import Reattached, reattach
    from monarch._output import log_prefix as config
    from monarch._reference.identity import ProcId, Uid
    from monarch._restarts.supervisor import Restarted, Supervisor
    from monarch._telemetry import get_meter, span, traced

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
    "Context",
    "DeadlockError",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "Reattached",
    "Region",
    "Restart",
    "Restarted",
    "Shape",
    "Slice",
    "SupervisionError",
    "Supervisor",
    "Uid",
    "ValueMesh",
    "as_endpoint",
    "attach",
    "attach_to_workers",
    "concurrent_endpoint",
    "config",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "job_id",
    "reattach",
    "returns_future",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]

# Names that few programs use, and features above the engine; each is loaded on first use.
_FEATURES = {
    **dict.fromkeys(("ProcId", "Uid"), "monarch._reference.identity"),
    "debug_controller": "monarch._debug",
    "get_meter": "monarch._telemetry",
    "span": "monarch._telemetry",
    "traced": "monarch._telemetry",
    "Accumulator": "monarch._engine.mesh.call.accumulator",
    **dict.fromkeys(("Restarted", "Supervisor"), "monarch._restarts.supervisor"),
    **dict.fromkeys(("Reattached", "reattach"), "monarch._failover.reattachment"),
    **dict.fromkeys(
        (
            "attach",
            "attach_to_workers",
            "enable_transport",
            "run_worker_loop_forever",
            "run_worker_loop_until_shutdown",
            "start_worker_loop_forever",
        ),
        "monarch._engine.mesh.script.attach",
    ),
}

_MODULES = {"config": "monarch._output.log_prefix"}


def unhandled_fault_hook(failure: MeshFailure) -> None:  # noqa: ARG001 - for who replaces it
    """End the program with exit code 1: the default hook for failures that nothing handles.

    The hook is called when a failure reaches the root unhandled. Assign another function to this
    name to replace the hook. If the hook returns, the failure is dropped.
    """
    sys.exit(1)


def __getattr__(name: str) -> Any:
    if name in _FEATURES:
        value = getattr(importlib.import_module(_FEATURES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
