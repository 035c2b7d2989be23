"""Pickled handles of a script's meshes, left with the host agent for the next script.

With a grace period (`driver_grace`, or a job that asks for one) the host agent keeps the job when
the script ends, and admits a successor (`rendezvous`). When the script's root spawns a mesh, the
pickled handle is sent to the agent, which stores but never unpickles it. When the mesh is stopped,
the agent drops the handle. So even a script that is killed has saved all its handles. See
`reattachment` for the other half.

Meshes in the script's own process are not saved; they end with it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from monarch._spi import client_proc, decode, environment, settings, start_agent

if TYPE_CHECKING:
    from monarch._spi import Instance, Proc

__all__ = ["end_job", "is_kept", "keep_if_asked", "keep_job", "recall", "save"]


def keep_job(job: str, grace: float, secret_file: str | None = None) -> None:
    """Keep the job for `grace` seconds after this script ends, under the name `job`.

    If the job is kept already, only the period is changed. Raises RuntimeError if there is another
    job of that name, ValueError for an impossible name, SecretError without a usable secret.
    """
    proc = client_proc()
    message: dict[str, Any] = {"op": "keep", "grace": grace}
    if proc.job:
        proc.tell_agent(message)
        return
    from monarch._failover.rendezvous import open_door
    from monarch._spi import find_secret, settings_of

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
    proc.job = job
    if proc.context is not None:
        root = proc.context.actor_instance
        for uid, mesh in list(root._meshes.items()):
            save(proc, root, uid, mesh)


def is_kept(job: str) -> bool:
    """Whether there is a job of this name: its driver runs, or its meshes are kept."""
    from monarch._failover.rendezvous import answers

    return answers(job)


def end_job(job: str, secret_file: str | None = None, timeout: float = 10.0) -> None:
    """End a kept job that has no driver; blocks until the job has ended.

    Raises LookupError if there is no such job, RuntimeError if it has a driver or another secret,
    TimeoutError if it has not ended after `timeout` seconds.
    """
    from monarch._failover.rendezvous import dismiss
    from monarch._spi import find_secret

    dismiss(job, find_secret(secret_file), timeout)


def keep_if_asked(proc: Proc) -> None:
    """Keep the job of the client `proc` as the configuration asks, unless it is kept already."""
    if not proc.job and environment.current.jobs_outlive:
        keep_job(settings.job_id or _new_name(), settings.driver_grace)


def save(proc: Proc, owner: Instance, uid: int, mesh: Any) -> None:
    """Leave a mesh to a successor, if the script's root owns it and its processes outlive it."""
    if owner._cell is not None or mesh._proc_mesh._base == proc.uid:
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
    return f"{plain}-{environment.current.chance(1 << 32):08x}"
