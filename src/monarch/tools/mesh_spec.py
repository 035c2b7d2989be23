"""Meshes of hosts as apps of torchx: `MeshSpec` describes a mesh, `ServerSpec` a submitted app.

A mesh is a role of the app: its name is that of the role, its hosts are the role's replicas. The
rest of the description is kept in the metadata of the app (`tag_as_metadata`) and, if it is not the
usual one, the port in the role's map of ports. So it is found again with the app.

>>> spec = mesh_spec_from_str("trainers:2:gpu.large")
>>> spec.name, spec.num_hosts, spec.host_type
('trainers', 2, 'gpu.large')
"""

from __future__ import annotations

import enum
import importlib.util
from dataclasses import dataclass, field
from typing import Any

from monarch.tools.launcher import torchx
from monarch.tools.network import get_sockaddr

__all__ = [
    "AppState",
    "MeshSpec",
    "MeshSpecError",
    "ServerSpec",
    "get_sockaddr",
    "mesh_spec_from_metadata",
    "mesh_spec_from_str",
    "tag_as_metadata",
]

_UNSET = "__UNSET__"
_TAG = "monarch/meshes/{mesh}/{field}"
_TAGGED = ("host_type", "gpus", "transport")
_PORT = 26600
_PORT_NAME = "monarch"  # in the map of ports of a role


class MeshSpecError(ValueError, AssertionError):
    """Text that describes no mesh.

    It is a ``ValueError`` by nature, and also an ``AssertionError`` because programs written for
    the reference expect that type from ``mesh_spec_from_str``.
    """


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
    port: int = _PORT
    """The port where the worker of a host listens."""
    hostnames: list[str] = field(default_factory=list[str])
    """The hosts, once the app runs."""
    state: Any = AppState.UNSUBMITTED
    image: str = _UNSET

    def server_addrs(self, transport: str | None = None, port: int | None = None) -> list[str]:
        """Return the addresses of the workers, for `monarch.actor.attach_to_workers`.

        Blocks while names are resolved: addresses of TCP have the IP address of the host, those of
        TLS its name.

        Args:
            transport: ``"tcp"`` or ``"metatls"``; by default that of the mesh.
            port: by default that of the mesh.

        Raises ValueError for another transport, and RuntimeError for a host without an address.

        >>> mesh = MeshSpec("a", 1, hostnames=["127.0.0.1"])
        >>> mesh.server_addrs(), mesh.server_addrs("metatls", port=4444)
        (['tcp!127.0.0.1:26600'], ['metatls!127.0.0.1:4444'])
        """
        scheme, number = transport or self.transport, port or self.port
        if scheme == "tcp":
            return [f"tcp!{get_sockaddr(host, number)}" for host in self.hostnames]
        if scheme == "metatls":
            return [f"metatls!{host}:{number}" for host in self.hostnames]
        raise ValueError(f"Unsupported transport: {scheme}; workers of a mesh have tcp or metatls")


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
        """Return the first host of a mesh.

        Raises ValueError for an unknown mesh, and RuntimeError unless the app runs and the mesh has
        hosts; its text says what to do.
        """
        mesh = self.get_mesh_spec(mesh_name)
        if not self.is_running:
            state = f"{self.server_handle} is {_state_name(self.state)}"
            raise RuntimeError(f"{state}{_REMEDIES.get(self.state, ', and has no hosts')}")
        if not mesh.hostnames:
            raise RuntimeError(f"{self.server_handle} does not have any hosts for {mesh_name!r}")
        return mesh.hostnames[0]

    def to_json(self) -> dict[str, Any]:
        """Return the state and the meshes as values of JSON; ``ui_url`` only if there is one."""
        found = {
            "name": self.name,
            "server_handle": self.server_handle,
            "state": _state_name(self.state),
            "meshes": {
                mesh.name: {
                    "host_type": mesh.host_type,
                    "hosts": mesh.num_hosts,
                    "gpus": mesh.gpus,
                    "hostnames": mesh.hostnames,
                }
                for mesh in self.meshes
            },
        }
        return found if self.ui_url is None else {**found, "ui_url": self.ui_url}


_WAIT = ": wait for it with monarch.tools.commands.server_ready()"
_ANEW = ": start another one with monarch.tools.commands.get_or_create()"
_REMEDIES = {
    **dict.fromkeys((AppState.SUBMITTED, AppState.PENDING), _WAIT),
    **dict.fromkeys((AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED), _ANEW),
}


def _state_name(state: Any) -> str:
    return str(getattr(state, "name", state))


def mesh_spec_from_str(mesh_spec_str: str) -> MeshSpec:
    """Return the mesh of ``"name:num_hosts:host_type"``.

    The host type is a named resource of torchx, which knows its GPUs; they are unknown (-1) where
    torchx is not installed. Raises `MeshSpecError`, a ValueError, for another text, and KeyError
    for a host type that torchx does not know.
    """
    parts = mesh_spec_str.split(":")
    if len(parts) != 3 or not parts[0] or not parts[1].isdecimal() or int(parts[1]) < 1:
        raise MeshSpecError(f"expected 'name:num_hosts:host_type', not {mesh_spec_str!r}")
    name, hosts, host_type = parts
    gpus = -1
    if importlib.util.find_spec("torchx") is not None:
        gpus = torchx("specs").resource(h=host_type).gpu
    return MeshSpec(name, int(hosts), host_type, gpus)


def tag_as_metadata(mesh_spec: MeshSpec, appdef: Any) -> None:
    """Write the description of a mesh into the metadata of an app (``torchx.specs.AppDef``).

    A port that is not the usual one goes into the ``port_map`` of the role, if the app has it yet.
    """
    for key in _TAGGED:
        tag = _TAG.format(mesh=mesh_spec.name, field=key)
        appdef.metadata[tag] = str(getattr(mesh_spec, key))
    if mesh_spec.port != _PORT:
        for role in appdef.roles:
            if role.name == mesh_spec.name:
                role.port_map[_PORT_NAME] = mesh_spec.port


def mesh_spec_from_metadata(appdef: Any, mesh_name: str) -> MeshSpec | None:
    """Return the mesh of an app, or None if the app has no role of this name."""
    for role in appdef.roles:
        if role.name == mesh_name:
            mesh = MeshSpec(mesh_name, role.num_replicas, image=role.image or _UNSET)
            mesh.port = role.port_map.get(_PORT_NAME, _PORT)
            for key in _TAGGED:
                text = appdef.metadata.get(_TAG.format(mesh=mesh_name, field=key))
                if text is not None:
                    setattr(mesh, key, type(getattr(mesh, key))(text))
            return mesh
    return None
