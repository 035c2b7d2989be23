"""Features: packages beside the engine, which the engine calls by name and works without.

A feature imports the engine through `monarch._spi`. In the other direction the engine calls a
*hook*, a function of the feature. The table below is all that the engine knows about features: it
has no import of one. A feature is loaded at its first hook, so a program pays only for the features
it uses. Without the package of a feature (``src/monarch/_sync``, for example) its hooks are absent:
`hook` raises, and `find` returns None, for the places where the engine continues without.

Rejected: features that register themselves when they are imported. Each process would have to
import all of them at its start, to find the installed ones.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HOOKS", "LATE", "TRACE", "find", "hook", "picture"]

LATE = "\0late"
"""A keyword argument that marks a call whose arguments have stand-ins for values to come."""

TRACE = "\0trace"
"""A keyword argument that a receiver of traffic has added, for the receiver at the other side."""

HOOKS = {
    "actor_address": "monarch._reference.identity:actor_address",
    "breakpoint": "monarch._debug.hook:stop_at",
    "capture_options": "monarch._output.process:capture_options",
    "capture_output": "monarch._output.captured:CapturedOutput",
    "check_proc_id": "monarch._reference.identity:check_proc_id",
    "census": "monarch._diagnosis.kernel:count",
    "export": "monarch._telemetry.otlp.switch:export",
    "inherit_mocks": "monarch._reference.mock:inherit",
    "inherited_mocks": "monarch._reference.mock:inherited",
    "logging_manager": "monarch._output.logging_option:LoggingManager",
    "job_keeper": "monarch._failover.keeper:JobKeeper",
    "keep_job": "monarch._failover.handles:keep_if_asked",
    "post_mortem": "monarch._debug.hook:post_mortem",
    "record": "monarch._observer.switch:record",
    "save_handle": "monarch._failover.handles:save",
    "search_deadlocks": "monarch._deadlock.watch:Watch",
    "mesh_html": "monarch._display.html:mesh_html",
    "open_door": "monarch._diagnosis.door:open_door",
    "hand_on": "monarch._children.door:hand_on",
    "join_parent": "monarch._children.membership:join",
    "open_to_children": "monarch._children.door:open_to_children",
    "pickle_script": "monarch._children.pickler:install",
    "python_task": "monarch._reference.python_task:PythonTask",
    "serve_output": "monarch._output.process:serve",
    "shield_successor": "monarch._restarts.epoch_barrier:EpochBarrier",
    "set_logging": "monarch._output.logging_option:set_logging",
    "end_output": "monarch._output.proc_streams:finish",
    "door debug": "monarch._debug.door:serve",
    "door profile": "monarch._traces.session:serve",
    "settle_limit": "monarch._debug.pauses:settle_limit",
    "stopped_at": "monarch._debug.pauses:stopped_at",
    "time_left": "monarch._debug.pauses:time_left",
    "service account": "monarch._diagnosis.account:on_request",
    "service debuggee": "monarch._debug.editor:on_request",
    "service debugger": "monarch._debug.service:on_request",
    "service profile": "monarch._traces.session:on_request",
    "service states": "monarch._output.process:on_states",
    "sync_workspace": "monarch._sync.workspace:sync",
    "late_arguments": "monarch._tensors.worker.late:arrived",
    "late_arguments_async": "monarch._tensors.worker.late:arriving",
    "rref": "monarch._tensors.actor_rref:rref",
    "tensor_mesh": "monarch._tensors.mesh_of_procs:spawn_tensor_engine",
}
"""The function or class of each hook: ``module:function``."""


def hook(name: str) -> Callable[..., Any]:
    """Return a hook. Raises ModuleNotFoundError if the feature is not installed."""
    module, _, function = HOOKS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def find(name: str) -> Callable[..., Any] | None:
    """Return a hook, or None if the package of the feature is not installed."""
    try:
        return hook(name)
    except ModuleNotFoundError as error:
        package = ".".join(HOOKS[name].split(".")[:2])
        if error.name != package:  # the feature is there, and lacks something itself
            raise
        return None


def picture(mesh: Any) -> str | None:
    """Return what a notebook shows of a mesh, as HTML; None without the feature."""
    draw = find("mesh_html")
    return None if draw is None else draw(mesh)
