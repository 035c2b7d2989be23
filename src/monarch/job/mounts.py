"""The mounts of a job: directories that appear on its hosts, or here, as long as the script runs.

A mount belongs to the script that called `JobTrait.state`, and ends with it. A second script that
uses the same hosts at the same time finds a mount of the same directory and uses that one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch.job.component import Component
from monarch.job.format import savable

if TYPE_CHECKING:
    from monarch.actor import HostMesh
    from monarch.job.state import JobState
    from monarch.job.trait import JobTrait

__all__ = ["GatherMountOption", "RemoteMountOption", "names_of", "remote_mount_option"]

_open: dict[tuple[str | None, Component, str], Any] = {}
"""The mounts of this script, by job, description and mesh."""


@savable
@dataclass(frozen=True)
class RemoteMountOption(Component):
    """A directory of the script's machine that the hosts see. See `JobTrait.remote_mount`."""

    several = True

    source: str
    path: str
    meshes: tuple[str, ...] | None
    python: str | None

    def connect(self, job: JobTrait, meshes: dict[str, HostMesh]) -> dict[str, HostMesh]:
        """Mount on all meshes; refresh the mounts that exist."""
        from monarch._mounts.remote_mount import remotemount

        for name in _names(self.meshes, meshes):
            key = (job.apply_id, self, name)
            if key in _open:
                _open[key].refresh()
                continue
            handle = remotemount(meshes[name], self.source, self.path)
            handle._shared = True
            _open[key] = handle.open()
        return meshes

    def state(self, job: JobTrait, state: JobState) -> None:
        """Have processes run the interpreter of the mount.

        Not before all mounts are there: a process of a mount that ran an interpreter of another one
        would keep that in use.
        """
        if self.python is not None:
            for name in _names(self.meshes, state._hosts):
                path = os.path.join(self.path, self.python)
                state._hosts[name] = state._hosts[name].with_python_executable(path)

    def end(self, job: JobTrait) -> None:
        """Unmount, also what is in use."""
        _end(job, self)


@savable
@dataclass(frozen=True)
class GatherMountOption(Component):
    """A directory of each host that appears here. See `JobTrait.gather_mount`."""

    several = True

    remote: str
    local: str
    meshes: tuple[str, ...] | None

    def connect(self, job: JobTrait, meshes: dict[str, HostMesh]) -> dict[str, HostMesh]:
        """Mount here, once for each mesh."""
        from monarch._mounts.gather import gather_mount

        names = _names(self.meshes, meshes)
        for name in names:
            key = (job.apply_id, self, name)
            if key not in _open:
                local = self.local if len(names) == 1 else os.path.join(self.local, name)
                _open[key] = gather_mount(meshes[name], self.remote, local)
        return meshes

    def end(self, job: JobTrait) -> None:
        """Unmount, also what is in use."""
        _end(job, self)


def remote_mount_option(
    source: str,
    mntpoint: str | None,
    meshes: Iterable[str] | None,
    python_exe: str | None,
) -> RemoteMountOption:
    """Check the arguments of `JobTrait.remote_mount`, and return the component."""
    folder = os.path.abspath(os.path.expanduser(os.fspath(source)))
    if not os.path.isdir(folder):
        raise ValueError(f"remote_mount: there is no directory {folder}")
    path = folder if mntpoint is None else os.fspath(mntpoint)
    if python_exe is not None:
        local = os.path.join(folder, python_exe)
        if not os.path.isfile(local):
            raise ValueError(
                f"remote_mount: there is no interpreter {local}: pass python_exe= with the path of "
                "one below the directory, or None to keep the interpreter of the hosts"
            )
        if "$SUBDIR" in path:
            raise ValueError(
                f"remote_mount: the interpreter has one path for all hosts, and {path} is another "
                "on each: pass python_exe=None, or a mntpoint without $SUBDIR"
            )
    return RemoteMountOption(folder, path, names_of(meshes), python_exe)


def names_of(meshes: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the names of meshes as a value that can be saved."""
    if isinstance(meshes, str):
        raise TypeError(f"meshes must be a list of names of meshes, not {meshes!r}")
    return None if meshes is None else tuple(meshes)


def _names(wanted: tuple[str, ...] | None, meshes: dict[str, HostMesh]) -> list[str]:
    unknown = sorted({*(wanted or ())} - {*meshes})
    if unknown:
        raise ValueError(
            f"a mount is declared for {', '.join(unknown)}: the meshes of this job are "
            f"{', '.join(sorted(meshes))}"
        )
    return [name for name in meshes if wanted is None or name in wanted]


def _end(job: JobTrait, component: Component) -> None:
    for key in [key for key in _open if key[:2] == (job.apply_id, component)]:
        _open.pop(key)._stop()
