"""Descriptions of meshes of pods, and the rules for them. Pure.

A mesh is *provisioned* if it has a template for its pods: the job then creates and deletes them.
Otherwise the job *attaches* to pods that someone else keeps running.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from monarch.job.format import savable

__all__ = [
    "RANK_LABEL",
    "ImageSpec",
    "Mesh",
    "check_name",
    "check_variants",
    "labels_of",
    "selector_of",
]

RANK_LABEL = "apps.kubernetes.io/pod-index"
"""The label in which Kubernetes (1.28 and later) numbers the pods of a StatefulSet."""

_LONGEST = 63  # characters: the name is a label of DNS
_NAME = re.compile(r"[a-z][a-z0-9]*", re.ASCII)


@dataclass(frozen=True)
class ImageSpec:
    """A container image with pymonarch in it, and the resources of each pod.

    Args:
        image: the name of the image.
        resources: such as ``{"cpu": 4, "memory": "16Gi", "nvidia.com/gpu": 8}``, both requested and
            the limit.
        enable_fuse: run the container privileged, with ``/dev/fuse`` of the node.
        shared_memory_size: the size of ``/dev/shm``, such as ``"16Gi"``; None: that of the runtime,
            often 64 MiB.
    """

    image: str
    resources: dict[str, str | int] | None = None
    enable_fuse: bool = False
    shared_memory_size: str | None = None


ImageSpec.__module__ = "monarch.job.kubernetes"


@savable
class Mesh(NamedTuple):
    """A mesh of a job: a value of JSON, which is saved with the job."""

    name: str
    replicas: int
    selector: str
    """Of its pods, in the syntax of ``kubectl get --selector``."""
    rank_label: str
    port: int
    template: dict[str, Any] | None
    """The template of its pods; None: the job attaches to pods that exist."""
    labels: dict[str, str]
    annotations: dict[str, str]
    own_template: bool = False
    """Whether the user wrote the template, which is then used as it is."""

    @property
    def provisioned(self) -> bool:
        """Whether the job creates the pods."""
        return self.template is not None


def selector_of(name: str) -> str:
    """Return the selector of the pods of a mesh, unless the user names another."""
    return ",".join(f"{label}={value}" for label, value in labels_of(name).items())


def labels_of(name: str) -> dict[str, str]:
    """Return the labels that the pods of a mesh have."""
    return {"app.kubernetes.io/name": "monarch-worker", "monarch.pytorch.org/mesh-name": name}


def check_name(name: str) -> None:
    """Raise ValueError for a name that is none of a MonarchMesh."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a mesh must be a string, not {name!r}")
    if not name:
        raise ValueError("Empty mesh name is invalid.")
    wrong = ""
    if len(name) > _LONGEST:
        wrong = f"It has {len(name)} characters, and Kubernetes allows {_LONGEST}."
    elif not name[0].isascii() or not name[0].islower():
        wrong = "It must start with a lowercase letter (a-z)."
    elif not _NAME.fullmatch(name):
        wrong = "It must consist of lowercase letters and digits: Kubernetes names objects by it."
    if wrong:
        raise ValueError(f"Mesh name '{name}' is invalid. {wrong}")


def check_variants(given: Mapping[str, bool]) -> None:
    """Raise ValueError for arguments of ``add_mesh`` that exclude each other.

    `given` has for each argument whether the caller gave it.
    """
    provisioned = given["image_spec"] or given["pod_template"]
    if given["image_spec"] and given["pod_template"]:
        raise ValueError("give an image_spec or a pod_template: a mesh has one kind of pods")
    for name in ("label_selector", "pod_rank_label"):
        if provisioned and given[name]:
            raise ValueError(
                f"{name} is for pods that exist already; with an image_spec or a pod_template the "
                "job creates pods, and knows their labels"
            )
    for name in ("labels", "annotations"):
        if not provisioned and given[name]:
            raise ValueError(
                f"{name} are for objects that the job creates, and without an image_spec or a "
                "pod_template it creates none"
            )
