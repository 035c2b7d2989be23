"""`spawn_watched`: actors of a feature, whose ends the feature handles before their owner does.

The calls of a script raise the loss of such an actor, at the next use of the feature. So the loss
does not interrupt the script, as that of an actor of its own would. If no call raises it, it is
reported when the script ends (`Faults.hold`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.errors import SupervisionError
from monarch._engine.base.failure import Failure, MeshFailure
from monarch._engine.base.verdict import FAILED
from monarch._engine.mesh.call.context import Instance, context
from monarch._engine.mesh.meshes.actor_mesh import spawn_actors
from monarch._engine.mesh.results.faults import Faults
from monarch._engine.mesh.results.future import Future
from monarch._engine.runtime.agent.client import client_proc

if TYPE_CHECKING:
    from monarch._engine.mesh.meshes.proc_mesh import ProcMesh
    from monarch._engine.runtime.proc.ownership import OwnedMesh

__all__ = [
    "fail_at_exit",
    "loss_of",
    "raise_loss",
    "settle_failures",
    "spawn_watched",
    "was_raised",
]


def spawn_watched(
    procs: ProcMesh,
    name: str,
    cls: type,
    *args: Any,
    ended: Callable[[Failure], None],
    before_stop: Callable[[], None],
) -> tuple[Any, Callable[[], None]]:
    """Spawn actors; return their mesh, and a function that ends the calls of `before_stop`.

    Args:
        procs: where to spawn.
        name: the name of the actors.
        cls: their class.
        *args: the arguments of its constructor.
        ended: called, on any thread, with the end of each rank; it must not block.
        before_stop: called before the actors or their processes are stopped from here, while
            messages still reach them.

    Failures go to an actor that owns the mesh as well. Raises RuntimeError for a proc mesh that
    was stopped.
    """
    if procs._stopping is not None:
        raise RuntimeError("`ProcMesh` has already been stopped")
    owner = context().actor_instance
    mesh = spawn_actors(procs, name, cls, args, {}, failures=_Watch(owner, ended))
    mesh._before_stop = before_stop
    recipe = procs._recipe
    if recipe is None:  # another process spawned the processes
        return mesh, lambda: None
    recipe.before_stop.append(before_stop)
    return mesh, lambda: recipe.before_stop.remove(before_stop)


class _Watch:
    """The receiver of the ends of a watched mesh, in place of its owner."""

    def __init__(self, owner: Instance, ended: Callable[[Failure], None]) -> None:
        self._owner = owner
        self._ended = ended

    def child_ended(self, mesh: OwnedMesh, rank: int, failure: Failure) -> None:
        self._ended(failure)
        if self._owner._cell is not None or not client_proc().client:
            self._owner.child_ended(mesh, rank, failure)
        elif failure.kind == FAILED:
            Faults.current.hold(failure)

    def _disown(self, uid: int) -> None:
        self._owner._disown(uid)


def raise_loss(failure: Failure) -> None:
    """Raise the `SupervisionError` of a failure, which the script knows from then on."""
    Future._failed(SupervisionError.of(failure)).get()


def loss_of(error: Exception) -> Failure | None:
    """Return the failure because of which a call has raised `error`; None if there is none."""
    known = error.failure if isinstance(error, SupervisionError) else None
    return None if known is None else known._failure


def fail_at_exit() -> None:
    """Make the exit code of the script one of failure."""
    Faults.current.fail()


def was_raised(failure: MeshFailure) -> bool:
    """Whether a call of the script has raised this failure, or another of the same cause."""
    return Faults.current.was_given(failure._failure)


def settle_failures(timeout: float) -> None:
    """Wait until `unhandled_fault_hook` has returned for each failure that has arrived."""
    Faults.current.settle(timeout)
