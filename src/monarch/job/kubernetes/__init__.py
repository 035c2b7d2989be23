"""Hosts that are pods of a Kubernetes cluster: `KubernetesJob`.

    from monarch.job.kubernetes import ImageSpec, KubernetesJob

    job = KubernetesJob("ml")
    job.add_mesh("trainers", 2, image_spec=ImageSpec("registry.example.org/train:1"))
    procs = job.state().trainers.spawn_procs({"gpus": 8})

docs/jobs/kubernetes.md leads from nothing to a running job. The parts:

* pure: `specification` (the descriptions of meshes), `manifests` (the objects of a mesh), `pods`
  (from events of a watch to the pods that serve);
* outside: `kube_config` (which cluster), `cluster` (requests to its API), `waiting` (until all pods
  are ready), `port_forward` (a way into the cluster);
* `job`: the job itself.

All that passes is JSON, as the API has it: the classes of the client differ between its releases.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("kubernetes") is None:
    raise RuntimeError(
        "monarch.job.kubernetes needs the client of Kubernetes: pip install 'pymonarch[kubernetes]'"
    )

from monarch.job.kubernetes.job import KubernetesJob
from monarch.job.kubernetes.kube_config import KubeConfig
from monarch.job.kubernetes.specification import ImageSpec

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]
