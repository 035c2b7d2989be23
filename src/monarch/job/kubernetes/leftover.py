"""Whether the directory of a `KubernetesJob` is left over: its objects do not exist any longer.

The directory of a job that has created no objects is kept until the job is killed: the pods that it
is attached to are not its own, so their end says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from monarch.job.folder import note, noted
from monarch.job.kubernetes.answer import part, text
from monarch.job.kubernetes.cluster import Cluster
from monarch.job.kubernetes.kube_config import KubeConfig
from monarch.job.kubernetes.manifests import Kind
from monarch.job.kubernetes.port_forward import is_running

__all__ = ["is_left", "note_objects"]

_OBJECTS = "objects"


def note_objects(
    folder: str,
    namespace: str,
    kubeconfig: str | None,
    objects: Sequence[tuple[Kind, str, str]],
) -> None:
    """Keep where the objects of a job are: kind, name and uid of each."""
    listed = [[*kind, name, uid] for kind, name, uid in objects]
    told = {"namespace": namespace, "kubeconfig": kubeconfig, "objects": listed}
    note(folder, _OBJECTS, json.dumps(told))


def is_left(folder: str) -> bool:
    """Whether none of the objects exists. Raises RuntimeError if the cluster cannot be asked."""
    kept = noted(folder, _OBJECTS)
    if not kept or is_running(folder):
        return False
    told = json.loads(kept)
    path = told["kubeconfig"]
    cluster = Cluster(told["namespace"], KubeConfig(None if path is None else Path(path)))
    try:
        for *kind, name, uid in told["objects"]:
            found = cluster.read(Kind(*kind), name)
            if found is not None and text(part(found, "metadata"), "uid") == uid:
                return False
    finally:
        cluster.close()
    return True
