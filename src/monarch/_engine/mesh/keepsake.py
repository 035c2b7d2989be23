"""Keepsakes: how a script's meshes are found again by the next one.

With a grace period (`driver_grace`, or a job that asks for one) the host agent keeps the job when
the script ends, and lets in a successor (runtime.job_door). What the script's root spawned is told
to the agent as it is spawned: the handle, pickled, which the agent does not look into. It is
forgotten when it is stopped. So a script that is killed has left everything already. See
`reattachment` for the other half.

Not left are meshes that live in the script's own process, which end with it.
"""

from __future__ import annotations

import base64
import os
import sys
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings
from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.client import client_proc, current_proc, start_agent
from monarch._engine.wire.codec import decode

if TYPE_CHECKING:
    from monarch._engine.mesh.context import Instance

__all__ = [
    "end_job",
    "forget",
    "is_kept",
    "job_id",
    "keep_job",
    "keeps",
    "recall",
    "remember",
    "renounce",
]

_job = ""  # that this process drives, if it is kept


def job_id() -> str:
    """The name by which `reattach` finds the meshes of this script.

    Empty as long as they end with it: see the configuration key ``driver_grace``.
    """
    return _job


def keep_job(job: str, grace: float, secret_file: str | None = None) -> None:
    """Have the job outlive this script by `grace` seconds, under this name.

    If it is kept already only the period is changed. Raises RuntimeError if there is such a job,
    ValueError for an impossible name, SecretError without a usable secret.
    """
    global _job
    proc = client_proc()
    message: dict[str, Any] = {"op": "keep", "grace": grace}
    if _job:
        proc.tell_agent(message)
        return
    from monarch._engine.runtime.job_door import open_door  # few scripts are kept
    from monarch._engine.runtime.secret import find_secret, settings_of

    find_secret(secret_file)  # raises what is wrong with it here, and not in the agent
    start_agent()
    sock, path = open_door(job)
    message |= {
        "job": job,
        "reign": proc.reign,
        "secret": secret_file,
        "environ": settings_of(os.environ),
        "path": path,
        "pid": os.getpid(),
    }
    with sock:
        proc.tell_agent(message, [sock.fileno()])
    _job = job
    if proc.context is not None:
        root = proc.context.actor_instance
        for uid, mesh in list(root._meshes.items()):
            remember(root, uid, mesh)


def is_kept(job: str) -> bool:
    """Whether there is a job of this name: its driver lives, or what that left is kept."""
    from monarch._engine.runtime.job_door import answers  # few programs ask

    return answers(job)


def end_job(job: str, secret_file: str | None = None, timeout: float = 10.0) -> None:
    """End a kept job that has no driver; blocks until it has ended.

    Raises LookupError if there is none, RuntimeError if it has a driver or another secret,
    TimeoutError.
    """
    from monarch._engine.runtime.job_door import dismiss  # few programs do
    from monarch._engine.runtime.secret import find_secret

    dismiss(job, find_secret(secret_file), timeout)


def keep_if_asked() -> None:
    """`keep_job`, if the configuration says so and this is a script."""
    proc = client_proc()
    if _job or not settings.driver_grace or not proc.client or not drivers.current.jobs_outlive:
        return
    keep_job(settings.job_id or _new_name(), settings.driver_grace)


def taken_over(job: str) -> None:
    """This process drives a job that was kept."""
    global _job
    _job = job


def keeps() -> bool:
    """Whether there is anything that is to outlive this script."""
    proc = current_proc()
    return bool(_job) and proc is not None and bool(proc.kept)


def renounce() -> None:
    """Keep nothing: what there is ends with this script."""
    global _job
    if _job:
        _job = ""
        client_proc().tell_agent({"op": "keep", "grace": 0})


def remember(owner: Instance, uid: int, mesh: Any) -> None:
    """Leave this mesh to a successor, if it is the script's own and outlives it."""
    proc = client_proc()
    procs = mesh._proc_mesh
    if not _job or owner._cell is not None or procs._base == proc.uid:
        return
    stream = proc.encode(mesh, inline=True).stream
    assert stream is not None
    text = base64.b64encode(stream).decode()
    proc.kept.add(uid)
    proc.tell_agent({"op": "remember", "uid": uid, "keepsake": text})


def forget(uid: int) -> None:
    """A mesh is stopped, or gone as a whole."""
    proc = client_proc()
    if uid in proc.kept:
        proc.kept.discard(uid)
        proc.tell_agent({"op": "forget", "uid": uid})


def recall(keepsake: str) -> Any:
    """What was remembered."""
    return decode(base64.b64decode(keepsake))


def _new_name() -> str:
    script, _ = os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))
    plain = "".join(c for c in script if c.isascii() and c.isalnum())[:20] or "job"
    return f"{plain}-{drivers.current.chance(1 << 32):08x}"
