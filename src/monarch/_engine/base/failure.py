"""A failure as data, and its text, which is the same wherever it is shown.

A `Failure` is a plain value: the actor, what happened, when and where. If an actor failed only
because it did not handle its child's failure, the value also holds that failure. An exception, the
log and ``str(failure)`` show the same text, made here. It is made for a person with a terminal of
forty lines, who starts at the top:

1. the actor, and what happened, in one line: of the *root* failure, never of its consequences;
2. in parentheses the responsible party (user code, system, ...), rank, host, pid, and time;
3. the evidence: the user's traceback, of an exception or a crash, and the last lines that the
   process printed;
4. the consequences, folded.

::

    The actor <root>.<__main__.Trainer trainers{'gpus': 1/4}> and all its descendants have failed:
      the process this actor was running on failed: Killed(sig=9), SIGKILL
      (system: rank 1 of trainers-3zhPeU, host vm, pid 4711, 2026-05-01 12:00:00.123+02:00)
      last output lines:
        step 41
      as a consequence:
        logger-Hb1qHo rank 1

`report` is this text. `event_text` describes the links of a chain one after the other, outermost
first (``str(MeshFailure)`` shows it). Both keep the short fragments that programs match on: those
of the first lines, and of what happened.

User code gets a `MeshFailure`: in `__supervise__`, in `unhandled_fault_hook` and as the `failure`
of a `SupervisionError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from monarch._engine.base.verdict import FAILED, INTERNAL, STOPPED, Verdict

__all__ = ["PLEASE_REPORT", "Failure", "MeshFailure", "UndeliverableMessageEnvelope"]

PLEASE_REPORT = (
    "This is a bug in pymonarch, not in your program. Please report it: this text, the versions "
    "of pymonarch and Python, and what the program was doing."
)

_TAIL_HEAD, _TAIL_END = 4, 12  # lines shown of a long tail: first, last
_CONSEQUENCES = 8  # lines shown of the consequences
_RANGES = 6  # ranges shown of the ranks of one mesh


def _indent(text: str) -> str:
    import textwrap  # loaded late: only failures need it

    return textwrap.indent(text, "  ")


class Failure:
    """The end of one actor, as a failure or as a deliberate stop.

    Args:
        actor: display chain, e.g. ``<root>.<__main__.Worker w{'gpus': 1/2}>``.
        verdict: what happened, where and when.
        mesh_name: the mesh's label and uid, ``<none>`` when the failure is not about a mesh.
        ranks: ranks of that mesh, as spawned.
        child: the failure of an owned mesh that was not handled.
        raised: with `child`: `__supervise__` raised `error` while handling it.
        others: ranks, by mesh, that ended by the same event; the actor's own may be among them.
    """

    __slots__ = ("actor", "child", "mesh_name", "others", "raised", "ranks", "verdict")

    def __init__(
        self,
        actor: str,
        verdict: Verdict,
        mesh_name: str = "<none>",
        ranks: tuple[int, ...] = (),
        child: Failure | None = None,
        raised: bool = False,
        others: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.actor = actor
        self.verdict = verdict
        self.mesh_name = mesh_name
        self.ranks = ranks
        self.child = child
        self.raised = raised
        self.others: dict[str, tuple[int, ...]] = others or {}

    @property
    def kind(self) -> str:
        """FAILED, or STOPPED: a deliberate or clean end, which is not a failure for its owner."""
        return self.verdict.kind

    @property
    def error(self) -> str:
        """The description of what happened."""
        return self.verdict.error

    @property
    def root(self) -> Failure:
        """The failure that was not merely passed on.

        It is the first of the chain, or a later one whose supervisor raised; then its `child` is
        the failure that the supervisor was handling.
        """
        failure = self
        while failure.child is not None and not failure.raised:
            failure = failure.child
        return failure

    # -- on the wire -----------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return the wire form: JSON, so that a receiver does not unpickle anything."""
        return json.dumps(self._fields(), separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes | bytearray) -> Failure:
        """Return the inverse of `to_bytes`. Raises ValueError for anything else."""
        try:
            return Failure._of(json.loads(data))
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a failure: {error}") from None

    def _fields(self) -> list[Any]:
        child = None if self.child is None else self.child._fields()
        who = [self.actor, self.mesh_name, self.ranks]
        return [*who, self.verdict.to_fields(), child, self.raised, self.others]

    @staticmethod
    def _of(fields: Any) -> Failure:
        actor, mesh_name, ranks, verdict, child, raised, others = fields
        return Failure(
            str(actor),
            Verdict.from_fields(verdict),
            str(mesh_name),
            tuple(int(rank) for rank in ranks),
            None if child is None else Failure._of(child),
            bool(raised),
            {str(name): tuple(int(rank) for rank in found) for name, found in others.items()},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure.from_bytes, (self.to_bytes(),)

    # -- for people ------------------------------------------------------------------------------

    def report(self) -> str:
        """Return the text of the root cause, and of its consequences."""
        root = self.root
        if root.kind == STOPPED:
            return root.event_text()
        text = (
            f"The actor {root.actor} and all its descendants have failed:\n"
            f"{_indent(root.details())}"
        )
        consequences = self._consequences()
        if consequences:
            text += _indent(f"\nas a consequence:\n{_indent(consequences)}")
        if root.child is not None:
            text += (
                f"\nThis error occurred while handling another failure:\n"
                f"{_indent(root.child.report())}"
            )
        return text

    def event_text(self) -> str:
        """Return the text of this event, with its child's below it."""
        head = f"Supervision event: actor {self.actor}"
        if self.kind == STOPPED:
            return f"{head} has status:\n{_indent('stopped: ' + self.details())}"
        if self.child is None:
            return f"{head} failed:\n{_indent(self.details())}"
        child = _indent(self.child.event_text())
        if self.raised:
            return (
                f"{head} failed:\n{_indent(self.details())}\n"
                f"This error occurred while handling a supervision event from its child. "
                f"The event was:\n{child}"
            )
        return (
            f"{head} failed because it did not handle a supervision event from its child. "
            f"The child's event was:\n{child}"
        )

    def details(self) -> str:
        """Return the description, the place, and the evidence; a line for each of the first two."""
        found = self.verdict
        parts = [found.error, self.where(), found.trace, _folded(found.tail), found.advice]
        if self.kind == FAILED and found.cause == INTERNAL:
            parts.append(PLEASE_REPORT)
        return "\n".join(filter(None, parts))

    def where(self) -> str:
        """Return the responsible party, rank, host, pid and time in one line, as far as known."""
        found = self.verdict
        facts: list[str] = []
        if self.ranks:
            mesh = "" if self.mesh_name == "<none>" else f" of {self.mesh_name}"
            facts.append(_ranks(self.ranks) + mesh)
        if found.host:
            facts.append(f"host {found.host}")
        if found.pid:
            facts.append(f"pid {found.pid}")
        if found.when:
            facts.append(_time(found.when))
        if self.kind == STOPPED:
            return f"({', '.join(facts)})" if facts else ""
        return f"({': '.join(filter(None, [found.cause, ', '.join(facts)]))})"

    def _consequences(self) -> str:
        """Return one line for each mesh or actor that failed because the root did."""
        root = self.root
        lines: list[str] = []
        owners: list[str] = []
        link = self
        while link is not root:
            owners.append(f"{link.actor}, which did not handle it")
            assert link.child is not None
            link = link.child
        for name, found in root.others.items():
            ours = root.ranks if name == root.mesh_name else ()
            more = [rank for rank in found if rank not in ours]
            if more:
                lines.append(f"{name} {_ranks(more)}")
        lines += reversed(owners)
        if len(lines) > _CONSEQUENCES:
            lines[_CONSEQUENCES - 1 :] = [f"{len(lines) - _CONSEQUENCES + 1} more"]
        return "\n".join(lines)


def _folded(tail: tuple[str, ...]) -> str:
    if not tail:
        return ""
    lines = list(tail)
    left_out = len(lines) - _TAIL_HEAD - _TAIL_END
    if left_out > 1:
        lines[_TAIL_HEAD:-_TAIL_END] = [f"... {left_out} lines ..."]
    return "last output lines:\n" + _indent("\n".join(lines))


def _ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ``rank 3``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    if len(texts) > _RANGES:
        texts[_RANGES - 1 :] = ["..."]
    plural = "s" if len(runs) != 1 or runs[0][0] != runs[0][1] else ""
    return f"rank{plural} {', '.join(texts)}"


def _time(when: float) -> str:
    """Format a time in the local time zone, with its offset from UTC."""
    from datetime import datetime, timezone  # imported late: only failures need it

    moment = datetime.fromtimestamp(when, timezone.utc).astimezone()
    return moment.isoformat(sep=" ", timespec="milliseconds")


class MeshFailure:
    """A failure: of a mesh that the receiver owns (see `Actor.__supervise__`), or of a callee.

    Made by the runtime only, and not an exception. It can be sent to other processes. In a chain of
    failures, each the consequence of one that was not handled, it is the last; `child` is the one
    before, `root` the first cause. `str` shows the chain, `report` the root.

    >>> def hook(failure: MeshFailure) -> None:
    ...     root = failure.root
    ...     print(root.cause, root.crashed_ranks, root.host, root.pid, root.error)
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
        """An empty placeholder, kept for programs written for the reference."""
        return ()

    def report(self) -> str:
        """Return the text of the root cause, with the user's traceback if there is one."""
        return self._failure.report()

    # -- additions to the interface of the reference ---------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """The same as `crashed_ranks`."""
        return self._failure.ranks

    @property
    def actor(self) -> str:
        """The failed actor, as a chain of owners: ``<root>.<__main__.Worker w{'gpus': 1/2}>``."""
        return self._failure.actor

    @property
    def kind(self) -> str:
        """``failed``, or ``stopped`` if the actor ended deliberately or cleanly."""
        return self._failure.kind

    @property
    def cause(self) -> str:
        """The responsible party: ``user code``, ``system``, ``infrastructure`` or ``internal``.

        System: the process ended by an exit code or a signal. Infrastructure: an agent, a host or
        the network failed, or the process did not respond. Internal: a bug in this library.
        """
        return self._failure.verdict.cause

    @property
    def error(self) -> str:
        """A description; empty if the actor only failed to handle a child's failure."""
        return self._failure.error

    @property
    def traceback(self) -> str:
        """The user's traceback: of an exception, or of a crash by a signal such as SIGSEGV."""
        return self._failure.verdict.trace

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines that the process printed, if it died and its output was kept."""
        return self._failure.verdict.tail

    @property
    def host(self) -> str:
        """The host on which the actor ran; empty if unknown."""
        return self._failure.verdict.host

    @property
    def pid(self) -> int:
        """The process in which the actor ran; 0 if unknown."""
        return self._failure.verdict.pid

    @property
    def when(self) -> float:
        """The time in seconds since the epoch, by the clock of that host; 0 if unknown."""
        return self._failure.verdict.when

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """The ranks, by mesh name, that ended by the same event, as far as known at that time."""
        return dict(self._failure.others)

    @property
    def child(self) -> MeshFailure | None:
        """The unhandled failure of a mesh that the actor owned; None if it failed by itself."""
        child = self._failure.child
        return None if child is None else MeshFailure(child)

    @property
    def root(self) -> MeshFailure:
        """The failure that caused this one; this failure itself if no other caused it.

        An actor whose `__supervise__` raised counts as a root: then the root's `child` is the
        failure that it was handling.
        """
        return MeshFailure(self._failure.root)

    def __repr__(self) -> str:
        ranks = list(self._failure.ranks)
        return (
            f"MeshFailure(mesh_name={self.mesh_name}, crashed_ranks={ranks}, "
            f"event={self._failure.event_text()})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return MeshFailure, (self._failure,)


class UndeliverableMessageEnvelope:
    """A message that could not be delivered, passed to `_handle_undeliverable_message`."""

    __slots__ = ("_dest", "_error", "_sender")

    def __init__(self, sender: str, dest: str, error: str) -> None:
        self._sender = sender
        self._dest = dest
        self._error = error

    def sender(self) -> str:
        """Return the sender of the message."""
        return self._sender

    def dest(self) -> str:
        """Return the intended receiver of the message."""
        return self._dest

    def error_msg(self) -> str:
        """Return why the message could not be delivered."""
        return self._error

    def __repr__(self) -> str:
        return f"<undeliverable message from {self._sender} to {self._dest}: {self._error}>"


UndeliverableMessageEnvelope.__module__ = "monarch._rust_bindings.monarch_hyperactor.mailbox"
MeshFailure.__module__ = "monarch._rust_bindings.monarch_hyperactor.supervision"
