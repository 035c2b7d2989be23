"""What happened to an actor, told once and the same everywhere.

A `Failure` is a plain value: who, what, when, where, and, when an actor failed only because it did
not handle its child's failure, the child's. `event_text` describes one link of that chain (what
`str(MeshFailure)` shows), `report` walks to the root cause and shows that first. The texts keep the
short fragments that programs match on.

`MeshFailure` is what user code gets in `__supervise__` and `unhandled_fault_hook`.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

__all__ = ["FAILED", "STOPPED", "Failure", "MeshFailure", "UndeliverableMessageEnvelope"]

FAILED = "failed"
STOPPED = "stopped"


def _indent(text: str) -> str:
    return textwrap.indent(text, "  ")


class Failure:
    """The end of one actor.

    Args:
        actor: display chain, e.g. ``<root>.<__main__.Worker w{'gpus': 1/2}>``.
        kind: FAILED, or STOPPED (deliberate or clean; not a failure for its owner).
        error: what happened, in words; for exceptions with the traceback.
        mesh_name: the mesh's label and uid, ``<none>`` when it is not about a mesh.
        ranks: ranks of that mesh, as spawned.
        child: the failure of an owned mesh that was not handled.
        raised: with `child`: `__supervise__` raised `error` while handling it.
        where: host and pid, for people.
    """

    __slots__ = ("actor", "child", "error", "kind", "mesh_name", "raised", "ranks", "where")

    def __init__(
        self,
        actor: str,
        kind: str,
        error: str,
        mesh_name: str = "<none>",
        ranks: tuple[int, ...] = (),
        child: Failure | None = None,
        raised: bool = False,
        where: str = "",
    ) -> None:
        self.actor = actor
        self.kind = kind
        self.error = error
        self.mesh_name = mesh_name
        self.ranks = ranks
        self.child = child
        self.raised = raised
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure, (
            self.actor,
            self.kind,
            self.error,
            self.mesh_name,
            self.ranks,
            self.child,
            self.raised,
            self.where,
        )

    def to_bytes(self) -> bytes:
        """The wire form: JSON, so that nothing is unpickled by whoever reads it."""
        return json.dumps(self._fields()).encode()

    @staticmethod
    def from_bytes(data: bytes | bytearray) -> Failure:
        """The inverse of `to_bytes`. Raises ValueError for anything else."""
        try:
            return Failure._of(json.loads(data))
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a failure: {error}") from None

    def _fields(self) -> list[Any]:
        child = None if self.child is None else self.child._fields()
        own = (self.actor, self.kind, self.error, self.mesh_name, self.ranks)
        return [*own, child, self.raised, self.where]

    @staticmethod
    def _of(fields: Any) -> Failure:
        actor, kind, error, mesh_name, ranks, child, raised, where = fields
        known = None if child is None else Failure._of(child)
        if kind not in (FAILED, STOPPED) or not isinstance(error, str):
            raise ValueError("not a failure")
        ranks = tuple(int(rank) for rank in ranks)
        return Failure(str(actor), kind, error, str(mesh_name), ranks, known, bool(raised), where)

    def event_text(self) -> str:
        """This event, with its child's below it."""
        head = f"Supervision event: actor {self.actor}"
        if self.kind == STOPPED:
            return f"{head} has status:\n  stopped: {self.error}"
        if self.child is None:
            return f"{head} failed:\n{_indent(self._error_text())}"
        child = _indent(self.child.event_text())
        if self.raised:
            return (
                f"{head} failed:\n{_indent(self.error)}\n"
                f"This error occurred while handling a supervision event from its child. "
                f"The event was:\n{child}"
            )
        return (
            f"{head} failed because it did not handle a supervision event from its child. "
            f"The child's event was:\n{child}"
        )

    def report(self) -> str:
        """The root cause: what a person needs to read first."""
        if self.kind == STOPPED:
            return self.event_text()
        if self.child is None:
            return (
                f"The actor {self.actor} and all its descendants have failed:\n"
                f"{_indent(self._error_text())}"
            )
        if self.raised:
            return (
                f"The actor {self.actor} and all its descendants have failed:\n"
                f"{_indent(self.error)}\n"
                f"This error occurred while handling another failure:\n"
                f"{_indent(self.child.report())}"
            )
        if self.child.kind == STOPPED:
            return (
                f"The actor {self.actor} failed because it did not handle a supervision event "
                f"from its child. The event was:\n{_indent(self.child.event_text())}"
            )
        return self.child.report()

    def _error_text(self) -> str:
        return f"{self.error}\n(on {self.where})" if self.where else self.error


class MeshFailure:
    """A failure of a mesh that the receiver owns (see `Actor.__supervise__`).

    Not constructible by users and not an exception; send ``str(failure)`` if it must travel.
    """

    __slots__ = ("_failure",)

    def __init__(self, failure: Failure) -> None:
        if not isinstance(failure, Failure):
            raise TypeError("MeshFailure objects are made by the runtime, not by programs")
        self._failure = failure

    @property
    def mesh_name(self) -> str:
        """Label and uid of the mesh; ``<none>`` when the failure is not about a mesh."""
        return self._failure.mesh_name

    @property
    def crashed_ranks(self) -> list[int]:
        """Ranks in the mesh as spawned; empty if unknown."""
        return list(self._failure.ranks)

    @property
    def mesh(self) -> tuple[()]:
        """A placeholder kept for programs written against the reference."""
        return ()

    def report(self) -> str:
        """The root cause, with the user's traceback where there is one."""
        return self._failure.report()

    def __repr__(self) -> str:
        ranks = list(self._failure.ranks)
        return (
            f"MeshFailure(mesh_name={self.mesh_name}, crashed_ranks={ranks}, "
            f"event={self._failure.event_text()})"
        )

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'MeshFailure' object; send str(failure) instead")


class UndeliverableMessageEnvelope:
    """A message that could not be delivered, as `_handle_undeliverable_message` gets it."""

    __slots__ = ("_dest", "_error", "_sender")

    def __init__(self, sender: str, dest: str, error: str) -> None:
        self._sender = sender
        self._dest = dest
        self._error = error

    def sender(self) -> str:
        """Who sent it."""
        return self._sender

    def dest(self) -> str:
        """Whom it was for."""
        return self._dest

    def error_msg(self) -> str:
        """Why it could not be delivered."""
        return self._error

    def __repr__(self) -> str:
        return f"<undeliverable message from {self._sender} to {self._dest}: {self._error}>"


UndeliverableMessageEnvelope.__module__ = "monarch._rust_bindings.monarch_hyperactor.mailbox"
MeshFailure.__module__ = "monarch._rust_bindings.monarch_hyperactor.supervision"
