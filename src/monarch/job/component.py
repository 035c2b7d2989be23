"""Components: parts of a job besides its hosts, such as mounts, telemetry and the admin server.

A component is a *description*: a frozen dataclass (or NamedTuple) that is marked with `savable`, so
it is saved with the job. Whatever it starts (processes, sockets) it keeps elsewhere, by the job's
`apply_id`. `JobTrait._add_component` adds one to a job.

Each call of `JobTrait.state` takes all components through three phases, each phase in the order of
`order`:

1. `before_connect`: the allocation exists, and no connection yet.
2. `connect`: the host meshes are connected, and may be replaced by others.
3. `state`: the `JobState` that the program will receive may be changed.

`JobTrait.kill` calls `end`, in the opposite order, before the hosts are released.

The components come from the job that the program describes, while the facts of the allocation come
from the saved job. So a program that changes its mounts uses the same hosts with the new mounts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from monarch.actor import HostMesh
    from monarch.job.state import JobState
    from monarch.job.trait import JobTrait

__all__ = ["ADMIN", "MOUNTS", "SNAPSHOTS", "TELEMETRY", "Component", "connected", "end_all"]

MOUNTS, TELEMETRY, ADMIN, SNAPSHOTS = 10, 20, 30, 40
"""The values of `Component.order`: lower ones first."""

_log = logging.getLogger("monarch.job")


class Component:
    """A part of a job besides its hosts. Each method does nothing unless it is overridden.

    `job` is the running job, possibly the saved one: it has the `apply_id` and the directory. An
    error in one of the first three phases is raised by `JobTrait.state`.
    """

    order: ClassVar[int] = MOUNTS
    several: ClassVar[bool] = False
    """Whether a job may have several components of this class."""

    def before_connect(self, job: JobTrait) -> None:
        """Prepare, before the hosts are connected."""

    def connect(self, job: JobTrait, meshes: dict[str, HostMesh]) -> dict[str, HostMesh]:
        """Return the host meshes to use instead of these, by name."""
        return meshes

    def state(self, job: JobTrait, state: JobState) -> None:
        """Add to the result of `JobTrait.state`."""

    def end(self, job: JobTrait) -> None:
        """Release everything, before the hosts end. Also called by a script that did not start it.

        An error is logged, and the job ends nevertheless.
        """


def connected(job: JobTrait, components: Iterable[Component]) -> JobState:
    """Connect to the hosts of `job`, and take the components through their phases."""
    ordered = sorted(components, key=lambda component: component.order)
    for component in ordered:
        component.before_connect(job)
    job._prepare_client_gateway()
    state = job._state()
    meshes = dict(state._hosts)
    for component in ordered:
        meshes = component.connect(job, meshes)
    state._hosts = meshes
    for component in ordered:
        component.state(job, state)
    return state


def end_all(job: JobTrait, components: Iterable[Component]) -> None:
    """End the components of a job that is about to be killed."""
    for component in sorted(components, key=lambda component: -component.order):
        try:
            component.end(job)
        except Exception:
            _log.exception("%s of a job did not end in good order", type(component).__name__)
