"""The schedulers of `serve`: from the name of one, and its options, to a job with the hosts.

The names are those of torchx, and so are its options where a job here has the same one. All other
options are those of the job's class, by the names of its arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from monarch.job.slurm.job import SlurmJob
from monarch.job.trait import JobTrait

__all__ = ["LOCAL", "MESH", "check", "job_of"]

MESH = "workers"
"""The name of the mesh of hosts."""

LOCAL = "local_cwd"
"""The scheduler whose only host is this machine."""


def check(scheduler: str) -> None:
    """Raise ValueError for a scheduler that is not supported."""
    if scheduler != LOCAL and scheduler not in _MAKERS:
        known = ", ".join(map(repr, (LOCAL, *_MAKERS)))
        raise ValueError(
            f"the scheduler {scheduler!r} is not supported here; there are {known}. On the hosts "
            "of any other job, `monarch run --mesh NAME` runs the same command"
        )


def job_of(scheduler: str, options: Mapping[str, Any], role: Mapping[str, Any]) -> JobTrait | None:
    """Return a job with a mesh of `MESH` for a role; None for this machine.

    Raises ValueError for an unknown scheduler or option, and what the class of the job raises.
    """
    check(scheduler)
    if scheduler == LOCAL:
        if options:
            raise ValueError(f"scheduler_cfg: {LOCAL} has no option {', '.join(options)}")
        return None
    return _MAKERS[scheduler](scheduler, dict(options), role)


def _slurm(scheduler: str, options: dict[str, Any], role: Mapping[str, Any]) -> JobTrait:
    if "time" in options:  # as torchx calls it
        options["time_limit"] = options.pop("time")
    wanted: Mapping[str, int] = role.get("resource") or {}
    amounts = {
        "gpus_per_node": wanted.get("gpu"),
        "cpus_per_task": wanted.get("cpu"),
        "mem": f"{wanted['memMB']}M" if wanted.get("memMB") else None,
    }
    for name, amount in amounts.items():
        if amount:
            options.setdefault(name, amount)
    _check_options(scheduler, SlurmJob, options, without=frozenset({"meshes"}))
    return SlurmJob({MESH: _count(role)}, **options)


def _kubernetes(scheduler: str, options: dict[str, Any], role: Mapping[str, Any]) -> JobTrait:
    from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob

    image = options.pop("image", None) or role.get("image")
    if not image:
        raise ValueError(
            "the role names no image, and pods need one: scheduler_cfg={'image': ...}, or the "
            "image of an AppDef's role"
        )
    wanted: Mapping[str, int] = role.get("resource") or {}
    resources: dict[str, Any] = {}
    if wanted.get("cpu"):
        resources["cpu"] = wanted["cpu"]
    if wanted.get("memMB"):
        resources["memory"] = f"{wanted['memMB']}M"
    if wanted.get("gpu"):
        resources["nvidia.com/gpu"] = wanted["gpu"]
    if isinstance(options.get("kubeconfig"), str):
        options["kubeconfig"] = KubeConfig.from_path(options["kubeconfig"])
    _check_options(scheduler, KubernetesJob, options, more=frozenset({"image"}))
    job = KubernetesJob(options.pop("namespace", "default"), **options)
    job.add_mesh(MESH, _count(role), image_spec=ImageSpec(str(image), resources or None))
    return job


_MAKERS: dict[str, Callable[[str, dict[str, Any], Mapping[str, Any]], JobTrait]] = {
    "slurm": _slurm,
    "k8s": _kubernetes,
    "kubernetes": _kubernetes,
}


def _count(role: Mapping[str, Any]) -> int:
    return int(role.get("num_replicas") or 1)


def _check_options(
    scheduler: str,
    cls: type,
    options: Mapping[str, Any],
    without: frozenset[str] = frozenset(),
    more: frozenset[str] = frozenset(),
) -> None:
    known = (set(inspect.signature(cls).parameters) - without) | more
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"scheduler_cfg: {scheduler} has no option {', '.join(unknown)}; there are "
            f"{', '.join(sorted(known))}"
        )
