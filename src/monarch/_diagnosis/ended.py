"""The ends of actors, as far as a process keeps them: failures with their causes, and stops.

At most `terminated_snapshot_retention` are in the account. Failures come first, the earliest of
them, since these are the ones that explain the others. The last failures of actors that a
supervisor has replaced are there, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from monarch._spi import FAILED, hook, settings

if TYPE_CHECKING:
    from monarch._spi import Failure, Proc, Verdict

__all__ = ["EndedAccount", "ExitAccount", "ended", "exits"]

_LONGEST = 16_384  # characters of a traceback


class EndedAccount(TypedDict):
    """An actor that has ended, by a failure or a stop; `replaced`: another one has its place.

    `root` is the display name of the actor whose failure was the first, `propagated` whether that
    is another one. `process`: the one with which the actor was lost, as the owner
    tells; 0: that of this account.
    """

    reference: str
    display: str
    name: str
    mesh: str
    uid: int
    rank: int
    kind: str
    error: str
    trace: str
    cause: str
    when: float
    root: str
    root_error: str
    propagated: bool
    replaced: bool
    process: int


class ExitAccount(TypedDict):
    """A process that has ended, as another one came to know it."""

    process: int
    kind: str
    error: str
    cause: str
    host: str
    pid: int
    when: float
    trace: str


def ended(proc: Proc) -> list[EndedAccount]:
    """Return the actors of this process that have ended. From any thread."""
    graves = list(proc.graves.items())
    failed = [item for item in graves if item[1].kind == FAILED]
    stopped = [item for item in graves if item[1].kind != FAILED]
    most = settings.terminated_snapshot_retention
    kept = failed[:most]
    kept += stopped[len(stopped) - min(len(stopped), most - len(kept)) :]
    former = [item for item in list(proc.replaced) if item[1].kind == FAILED][-most:]
    return [
        *(_ended(proc, uid, grave) for uid, grave in kept),
        *(_ended(proc, uid, grave, replaced=True) for uid, grave in former),
        *(
            _ended(proc, mesh.uid, loss, replaced=True, process=process)
            for mesh, _, process, loss in list(proc.losses)[-most:]
        ),
    ]


def _ended(
    proc: Proc, uid: int, grave: Failure, *, replaced: bool = False, process: int = 0
) -> EndedAccount:
    label = grave.mesh_name.rpartition("-")[0]
    root = grave.root
    return {
        "reference": str(
            hook("actor_address")(uid, label, process or proc.uid, "" if process else proc.label)
        ),
        "display": grave.actor,
        "name": label,
        "mesh": grave.mesh_name,
        "uid": uid,
        "rank": grave.ranks[0] if grave.ranks else 0,
        "kind": grave.kind,
        "error": grave.error,
        "trace": root.verdict.trace[-_LONGEST:],
        "cause": root.verdict.cause,
        "when": grave.verdict.when,
        "root": root.actor,
        "root_error": root.error,
        "propagated": root is not grave,
        "replaced": replaced,
        "process": process,
    }


def exits(proc: Proc) -> list[ExitAccount]:
    """Return the processes that failed, of those to which this one was connected."""
    verdicts = [item for item in list(proc.verdicts.items()) if item[1].kind == FAILED]
    return [
        _exit(uid, verdict) for uid, verdict in verdicts[: settings.terminated_snapshot_retention]
    ]


def _exit(uid: int, verdict: Verdict) -> ExitAccount:
    return {
        "process": uid,
        "kind": verdict.kind,
        "error": verdict.error,
        "cause": verdict.cause,
        "host": verdict.host,
        "pid": verdict.pid,
        "when": verdict.when,
        "trace": "\n".join([*verdict.tail, verdict.trace]).strip()[-_LONGEST:],
    }
