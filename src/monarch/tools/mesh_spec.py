"""Meshes of hosts as apps of torchx: `MeshSpec` describes a mesh, `ServerSpec` a submitted app.

A mesh is a role of the app: its name is that of the role, its hosts are the role's replicas. The
rest of the description is kept in the metadata of the app (`tag_as_metadata`), so it is found again
with the app.

>>> spec = mesh_spec_from_str("trainers:2:gpu.large")
>>> spec.name, spec.num_hosts, spec.host_type
('trainers', 2, 'gpu.large')
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

from monarch.tools.network import get_sockaddr

__all__ = [
    "AppState",
    "MeshSpec",
    "ServerSpec",
    "get_sockaddr",
    "mesh_spec_from_metadata",
    "mesh_spec_from_str",
    "tag_as_metadata",
]

_UNSET = "__UNSET__"
_TAG = "monarch/meshes/{mesh}/{field}"


class AppState(enum.IntEnum):
    """The state of an app. Members are equal to those of ``torchx.specs.AppState``."""

    UNSUBMITTED = 0
    SUBMITTED = 1
    PENDING = 2
    RUNNING = 3
    SUCCEEDED = 4
    FAILED = 5
    CANCELLED = 6
    UNKNOWN = 7


@dataclass
class MeshSpec:
    """A mesh of hosts of an app."""

    name: str
    num_hosts: int
    host_type: str = _UNSET
    gpus: int = -1
    """How many GPUs a host has; -1 if unknown."""
    transport: str = "tcp"
    port: int = 26600
    """The port where the worker of a host listens."""
    hostnames: list[str] = field(default_factory=list[str])
    """The hosts, once the app runs."""
    state: Any = AppState.UNSUBMITTED
    image: str = _UNSET

    def server_addrs(self, transport: str | None = None, port: int | None = None) -> list[str]:
        """Return the addresses of the workers, for `monarch.actor.attach_to_workers`.

        >>> MeshSpec("a", 1, hostnames=["node1"]).server_addrs()
        ['tcp://node1:26600']
        """
        scheme, number = transport or self.transport, port or self.port
        return [f"{scheme}://{host}:{number}" for host in self.hostnames]


@dataclass
class ServerSpec:
    """An app that was submitted, with its meshes."""

    name: str
    state: Any
    meshes: list[MeshSpec]
    scheduler: str
    namespace: str = ""
    ui_url: str | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def server_handle(self) -> str:
        """The handle of the app, for `monarch.tools.commands`."""
        return f"{self.scheduler}://{self.namespace}/{self.name}"

    @property
    def is_running(self) -> bool:
        """Whether the app runs."""
        return bool(self.state == AppState.RUNNING)

    def get_mesh_names(self) -> list[str]:
        """Return the names of all meshes."""
        return [mesh.name for mesh in self.meshes]

    def get_mesh_spec(self, mesh_name: str) -> MeshSpec:
        """Return the mesh of this name. Raises ValueError, with the names that there are."""
        for mesh in self.meshes:
            if mesh.name == mesh_name:
                return mesh
        names = ", ".join(self.get_mesh_names()) or "none"
        raise ValueError(f"{self.name} has no mesh {mesh_name!r}; there are: {names}")

    def host0(self, mesh_name: str) -> str:
        """Return the first host of a mesh. Raises ValueError while no host is known."""
        mesh = self.get_mesh_spec(mesh_name)
        if not mesh.hostnames:
            raise ValueError(f"{self.name} has no hosts for mesh {mesh_name!r} yet: {self.state}")
        return mesh.hostnames[0]

    def to_json(self) -> dict[str, Any]:
        """Return all of this as values of JSON."""
        return {
            "name": self.name,
            "server_handle": self.server_handle,
            "state": _state_name(self.state),
            "ui_url": self.ui_url,
            "metadata": dict(self.metadata),
            "meshes": {
                mesh.name: {**asdict(mesh), "state": _state_name(mesh.state)}
                for mesh in self.meshes
            },
        }


def _state_name(state: Any) -> str:
    return str(getattr(state, "name", state))


def mesh_spec_from_str(mesh_spec_str: str) -> MeshSpec:
    """Return the mesh of ``"name:num_hosts:host_type"``. Raises ValueError for another text."""
    parts = mesh_spec_str.split(":")
    if len(parts) != 3 or not parts[0] or not parts[1].isdecimal() or int(parts[1]) < 1:
        raise ValueError(f"expected 'name:num_hosts:host_type', not {mesh_spec_str!r}")
    return MeshSpec(parts[0], int(parts[1]), parts[2])


def tag_as_metadata(mesh_spec: MeshSpec, appdef: Any) -> None:
    """Write the description of a mesh into the metadata of an app (``torchx.specs.AppDef``)."""
    for key in ("host_type", "gpus", "transport", "port"):
        tag = _TAG.format(mesh=mesh_spec.name, field=key)
        appdef.metadata[tag] = str(getattr(mesh_spec, key))


def mesh_spec_from_metadata(appdef: Any, mesh_name: str) -> MeshSpec | None:
    """Return the mesh of an app, or None if the app has no role of this name."""
    for role in appdef.roles:
        if role.name == mesh_name:
            mesh = MeshSpec(mesh_name, role.num_replicas, image=role.image or _UNSET)
            for key in ("host_type", "gpus", "transport", "port"):
                text = appdef.metadata.get(_TAG.format(mesh=mesh_name, field=key))
                if text is not None:
                    setattr(mesh, key, type(getattr(mesh, key))(text))
            return mesh
    return None
