"""The processes that take part in a mount: how they are spawned, called, named and stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch._spi import spawn_watched
from monarch.actor import ActorError, SupervisionError, current_rank

if TYPE_CHECKING:
    from monarch.actor import ProcMesh

__all__ = ["each", "key_of", "stop", "subdirectory", "watched"]

_EXPECTED = (RuntimeError, ValueError)


def watched(procs: ProcMesh, cls: type, *args: Any) -> Any:
    """Spawn an actor on each process.

    The loss of one does not end the script, since it is the business of the meshes that work there.
    The next call of the mount raises it, or it is reported when the script ends.
    """
    mesh, _ = spawn_watched(
        procs, "mount", cls, *args, ended=lambda _: None, before_stop=lambda: None
    )
    return mesh


def each(method: Any, *args: Any, lost: bool = True) -> list[Any]:
    """Call an endpoint on all hosts; return the answers.

    Raises the first error of the mount as it is, in one line. Without `lost`, a host that was lost
    is no error.
    """
    outcomes: list[Any] = method.options(on_failure="partial").call(*args).get().values()
    for outcome in outcomes:
        if isinstance(outcome, ActorError) and type(outcome.exception) in _EXPECTED:
            raise type(outcome.exception)(f"{outcome.exception} (on {outcome.host})") from None
        if isinstance(outcome, Exception) and (lost or not isinstance(outcome, SupervisionError)):
            raise outcome
    return outcomes


def stop(procs: list[Any]) -> None:
    """Stop processes, and wait until they have stopped; empty the list."""
    stopping = [mesh.stop() for mesh in procs]
    procs.clear()
    for one in stopping:
        one.get()


def key_of() -> str:
    """Return the coordinates of this process as a name: ``hosts_0``; empty without dimensions."""
    point = current_rank()
    return "_".join(f"{label}_{point[label]}" for label in point.extent.labels)


def subdirectory(path: str) -> str:
    """Return a path with ``$SUBDIR`` replaced by the coordinates of this process."""
    return path.replace("$SUBDIR", key_of())
