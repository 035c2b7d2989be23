"""The objects of a mesh in the cluster, as JSON. Pure.

With the operator there is one `monarch_mesh`, and the operator makes the rest of it. Without one
the job makes what the operator would make: a headless service and a StatefulSet. Either way the
pods have the same names and labels, so clients find them alike.

The job's secret is in a Secret object, and pods refer to it (``secretKeyRef``): a template holds
its name only.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, NamedTuple

from monarch._spi import FROM_ANY_PYTHON
from monarch.job.kubernetes.answer import items, part, text
from monarch.job.kubernetes.specification import RANK_LABEL, ImageSpec, Mesh, labels_of
from monarch.job.node import SECRET_VARIABLE
from monarch.job.pod import NAMES, PORT_VARIABLE
from monarch.job.service_identity import SERVICE_PROC_IDS_ENV, SERVICE_PROC_RANK_ENV

__all__ = [
    "MONARCH_MESH",
    "POD",
    "SECRET",
    "SERVICE",
    "STATEFUL_SET",
    "Kind",
    "content_of",
    "ids_of",
    "monarch_mesh",
    "objects_of",
    "secret",
    "secret_name",
    "service",
    "stateful_set",
    "template_of",
    "with_ids",
]

_BOOTSTRAP = FROM_ANY_PYTHON + "from monarch.job.pod_worker import main; main()"
_KEY = "secret"
_CONTAINER = "worker"


class Kind(NamedTuple):
    """A kind of objects, and where the API keeps them."""

    name: str
    version: str
    plural: str


MONARCH_MESH = Kind("MonarchMesh", "monarch.pytorch.org/v1alpha1", "monarchmeshes")
STATEFUL_SET = Kind("StatefulSet", "apps/v1", "statefulsets")
SERVICE = Kind("Service", "v1", "services")
SECRET = Kind("Secret", "v1", "secrets")
POD = Kind("Pod", "v1", "pods")


def objects_of(mesh: Mesh, namespace: str, *, operator: bool) -> list[tuple[Kind, dict[str, Any]]]:
    """Return the objects that make a provisioned mesh, without its secret, in their order."""
    if operator:
        return [(MONARCH_MESH, monarch_mesh(mesh, namespace))]
    return [(SERVICE, service(mesh, namespace)), (STATEFUL_SET, stateful_set(mesh, namespace))]


def template_of(spec: ImageSpec, port: int, secret: str) -> dict[str, Any]:
    """Return the template of pods that run a worker of this image, with the job's secret."""
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": spec.image,
        "command": ["python", "-u", "-c", _BOOTSTRAP],
        "ports": [{"containerPort": port, "name": "monarch"}],
        "env": [
            {"name": PORT_VARIABLE, "value": str(port)},
            {"name": "PYTHONSAFEPATH", "value": "1"},  # the image's directory is not searched first
            _field(NAMES[0], "metadata.namespace"),
            _field(NAMES[1], "metadata.name"),
            _field(SERVICE_PROC_RANK_ENV, f"metadata.labels['{RANK_LABEL}']"),
            {
                "name": SECRET_VARIABLE,
                "valueFrom": {"secretKeyRef": {"name": secret, "key": _KEY}},
            },
        ],
    }
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if spec.resources:
        amounts = {name: str(amount) for name, amount in spec.resources.items()}
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    if spec.enable_fuse:
        container["securityContext"] = {"privileged": True}
        mounts.append({"name": "fuse", "mountPath": "/dev/fuse"})
        volumes.append({"name": "fuse", "hostPath": {"path": "/dev/fuse", "type": "CharDevice"}})
    if spec.shared_memory_size is not None:
        memory = {"medium": "Memory", "sizeLimit": spec.shared_memory_size}
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - in a pod
        volumes.append({"name": "shm", "emptyDir": memory})
    if volumes:
        container["volumeMounts"] = mounts
    pod: dict[str, Any] = {"containers": [container]}
    if volumes:
        pod["volumes"] = volumes
    return {"spec": pod}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def monarch_mesh(mesh: Mesh, namespace: str) -> dict[str, Any]:
    """Return the MonarchMesh from which the operator makes service, StatefulSet and pods."""
    return {
        **_head(MONARCH_MESH, mesh.name, namespace, mesh.labels, mesh.annotations),
        "spec": {"replicas": mesh.replicas, "port": mesh.port, "podTemplate": mesh.template},
    }


def service(mesh: Mesh, namespace: str) -> dict[str, Any]:
    """Return the headless service, which gives each pod a name in DNS."""
    return {
        **_head(SERVICE, f"{mesh.name}-svc", namespace, labels_of(mesh.name)),
        "spec": {
            "clusterIP": "None",
            "selector": labels_of(mesh.name),
            "ports": [{"name": "monarch", "port": mesh.port}],
            "publishNotReadyAddresses": True,
        },
    }


def stateful_set(mesh: Mesh, namespace: str) -> dict[str, Any]:
    """Return the StatefulSet, which keeps ``<name>-0``, ``<name>-1`` and so on running."""
    template = dict(mesh.template or {})
    metadata = part(template, "metadata")
    metadata = {**metadata, "labels": {**part(metadata, "labels"), **labels_of(mesh.name)}}
    labels = {**labels_of(mesh.name), **mesh.labels}
    return {
        **_head(STATEFUL_SET, mesh.name, namespace, labels, mesh.annotations),
        "spec": {
            "replicas": mesh.replicas,
            "serviceName": f"{mesh.name}-svc",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels_of(mesh.name)},
            "template": {**template, "metadata": metadata},
        },
    }


def secret_name(mesh: str) -> str:
    """Return the name of the Secret object of a mesh, for templates that a user writes."""
    return f"{mesh}-secret"


def secret(name: str, namespace: str, mesh: str, content: str) -> dict[str, Any]:
    """Return the Secret object with the job's secret."""
    return {
        **_head(SECRET, name, namespace, labels_of(mesh)),
        "type": "Opaque",
        "data": {_KEY: base64.b64encode(content.encode()).decode()},
    }


def content_of(found: dict[str, Any]) -> str | None:
    """Return the job's secret from a Secret object; None if it has none."""
    try:
        content = base64.b64decode(text(part(found, "data"), _KEY), validate=True).decode().strip()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return content or None


def with_ids(template: dict[str, Any], ids: str) -> dict[str, Any]:
    """Return a template of `template_of` in which the workers have these service ids."""
    copied: dict[str, Any] = json.loads(json.dumps(template))
    copied["spec"]["containers"][0]["env"].append({"name": SERVICE_PROC_IDS_ENV, "value": ids})
    return copied


def ids_of(found: dict[str, Any], replicas: int) -> str | None:
    """Return the service ids of a mesh that exists; None if it has none or another size."""
    spec = part(found, "spec")
    if spec.get("replicas") != replicas:
        return None
    template = part(spec, "podTemplate") or part(spec, "template")
    for container in items(part(template, "spec"), "containers"):
        for variable in items(container, "env"):
            if text(variable, "name") == SERVICE_PROC_IDS_ENV:
                return text(variable, "value") or None
    return None


def _head(
    kind: Kind,
    name: str,
    namespace: str,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": namespace}
    if labels:
        metadata["labels"] = labels
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": kind.version, "kind": kind.name, "metadata": metadata}
