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

from monarch._engine.base.verdict import STOPPED, Verdict

__all__ = ["Failure", "MeshFailure", "UndeliverableMessageEnvelope"]


def _indent(text: str) -> str:
    return textwrap.indent(text, "  ")


class Failure:
    """The end of one actor.

    Args:
        actor: display chain, e.g. ``<root>.<__main__.Worker w{'gpus': 1/2}>``.
        verdict: what happened, where and when; for exceptions with the traceback.
        mesh_name: the mesh's label and uid, ``<none>`` when it is not about a mesh.
        ranks: ranks of that mesh, as spawned.
        child: the failure of an owned mesh that was not handled.
        raised: with `child`: `__supervise__` raised `error` while handling it.
    """

    __slots__ = ("actor", "child", "mesh_name", "raised", "ranks", "verdict")

    def __init__(
        self,
        actor: str,
        verdict: Verdict,
        mesh_name: str = "<none>",
        ranks: tuple[int, ...] = (),
        child: Failure | None = None,
        raised: bool = False,
    ) -> None:
        self.actor = actor
        self.verdict = verdict
        self.mesh_name = mesh_name
        self.ranks = ranks
        self.child = child
        self.raised = raised

    @property
    def kind(self) -> str:
        """FAILED, or STOPPED: deliberate or clean, and not a failure for its owner."""
        return self.verdict.kind

    @property
    def error(self) -> str:
        """What happened, in words."""
        return self.verdict.error

    def to_bytes(self) -> bytes:
        """The wire form: JSON, so that nothing is unpickled by whoever reads it."""
        return json.dumps(self._fields(), separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes | bytearray) -> Failure:
        """The inverse of `to_bytes`. Raises ValueError for anything else."""
        try:
            return Failure._of(json.loads(data))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a failure: {error}") from None

    def _fields(self) -> list[Any]:
        child = None if self.child is None else self.child._fields()
        who = [self.actor, self.mesh_name, self.ranks]
        return [*who, self.verdict.to_fields(), child, self.raised]

    @staticmethod
    def _of(fields: Any) -> Failure:
        actor, mesh_name, ranks, verdict, child, raised = fields
        return Failure(
            str(actor),
            Verdict.from_fields(verdict),
            str(mesh_name),
            tuple(int(rank) for rank in ranks),
            None if child is None else Failure._of(child),
            bool(raised),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure.from_bytes, (self.to_bytes(),)

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
        found = self.verdict
        text = found.error
        if found.tail:
            text += "\nlast output lines:\n" + _indent("\n".join(found.tail))
        if found.pid:
            text += f"\n(on host {found.host}, pid {found.pid})"
        return text


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
