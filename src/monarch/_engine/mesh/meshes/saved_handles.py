"""Pickled handles of a script's meshes, left with the host agent for the next script.

With a grace period (`driver_grace`, or a job that asks for one) the host agent keeps the job when
the script ends, and admits a successor (runtime.failover.rendezvous). When the script's root spawns
a mesh, the pickled handle is sent to the agent, which stores but never unpickles it. When the mesh
is stopped, the agent drops the handle. So even a script that is killed has saved all its handles.
See `reattachment` for the other half.

Meshes in the script's own process are not saved; they end with it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings
from monarch._engine.runtime.agent.client import client_proc, current_proc, start_agent
from monarch._engine.runtime.io import environment as environments
from monarch._engine.wire.codec import decode

if TYPE_CHECKING:
    from monarch._engine.mesh.call.context import Instance

__all__ = [
    "end_job",
    "is_kept",
    "job_id",
    "keep_job",
    "keeps",
    "recall",
    "remember",
    "renounce",
]

_job = ""  # the job that this process drives; empty if it is not kept


def job_id() -> str:
    """Return the name by which `reattach` finds the meshes of this script.

    Empty if the meshes end with the script; see the configuration key ``driver_grace``.
    """
    return _job


def keep_job(job: str, grace: float, secret_file: str | None = None) -> None:
    """Keep the job for `grace` seconds after this script ends, under the name `job`.

    If the job is kept already, only the period is changed. Raises RuntimeError if there is another
    job of that name, ValueError for an impossible name, SecretError without a usable secret.
    """
    global _job
    proc = client_proc()
    message: dict[str, Any] = {"op": "keep", "grace": grace}
    if _job:
        proc.tell_agent(message)
        return
    from monarch._engine.runtime.admission.secret import find_secret, settings_of
    from monarch._engine.runtime.failover.rendezvous import open_door  # few scripts are kept

    find_secret(secret_file)  # raise errors of the secret here, and not in the agent
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
    """Whether there is a job of this name: its driver runs, or its meshes are kept."""
    from monarch._engine.runtime.failover.rendezvous import answers  # few programs ask

    return answers(job)


def end_job(job: str, secret_file: str | None = None, timeout: float = 10.0) -> None:
    """End a kept job that has no driver; blocks until the job has ended.

    Raises LookupError if there is no such job, RuntimeError if it has a driver or another secret,
    TimeoutError if it has not ended after `timeout` seconds.
    """
    from monarch._engine.runtime.admission.secret import find_secret
    from monarch._engine.runtime.failover.rendezvous import dismiss  # few programs do

    dismiss(job, find_secret(secret_file), timeout)


def keep_if_asked() -> None:
    """Call `keep_job` if the configuration asks for it and this process is a script."""
    proc = client_proc()
    if (
        _job
        or not settings.driver_grace
        or not proc.client
        or not environments.current.jobs_outlive
    ):
        return
    keep_job(settings.job_id or _new_name(), settings.driver_grace)


def taken_over(job: str) -> None:
    """Record that this process drives a job that was kept."""
    global _job
    _job = job


def keeps() -> bool:
    """Whether any mesh is to outlive this script."""
    proc = current_proc()
    return bool(_job) and proc is not None and bool(proc.kept)


def renounce() -> None:
    """Keep no meshes: all of them end with this script."""
    global _job
    if _job:
        _job = ""
        client_proc().tell_agent({"op": "keep", "grace": 0})


def remember(owner: Instance, uid: int, mesh: Any) -> None:
    """Leave a mesh to a successor, if the script's root owns it and its processes outlive it."""
    proc = client_proc()
    procs = mesh._proc_mesh
    if not _job or owner._cell is not None or procs._base == proc.uid:
        return
    stream = proc.encode(mesh, inline=True).stream
    assert stream is not None
    import base64  # few jobs outlive their script

    text = base64.b64encode(stream).decode()
    proc.kept.add(uid)
    proc.tell_agent({"op": "remember", "uid": uid, "keepsake": text})


def recall(keepsake: str) -> Any:
    """Return the mesh that a saved handle stands for."""
    import base64

    return decode(base64.b64decode(keepsake))


def _new_name() -> str:
    script, _ = os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))
    plain = "".join(c for c in script if c.isascii() and c.isalnum())[:20] or "job"
    return f"{plain}-{environments.current.chance(1 << 32):08x}"
