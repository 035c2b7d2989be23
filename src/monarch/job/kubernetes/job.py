"""`KubernetesJob`: each host is a pod of a Kubernetes cluster.

A mesh is either provisioned, then the job creates its objects and deletes them, or it is attached:
its pods are found by their labels (`specification`).

The objects are named by the mesh. So a script that is run again finds those of the first run, with
the file of the job or without. Such objects are changed to what the script describes (``PATCH``),
and keep their secret, which their pods have already. An object that is created by a start that
fails is deleted again; one that was there before stays.

`kill` deletes exactly the objects that the job has created or adopted: by their ``uid``, so objects
of the same name that were made since then are left alone.

Attributes are saved with the job, so they are values of JSON. A configuration in memory, and the
objects that this process has created, are kept beside the job (`_configs`, `_created`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import sys
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from monarch._spi import attach_hosts
from monarch.actor import attach
from monarch.job.folder import make_folder, remove_folder, secret_file, use_secret
from monarch.job.host_state import HostState
from monarch.job.kubernetes import manifests, port_forward
from monarch.job.kubernetes.answer import items, part, text
from monarch.job.kubernetes.cluster import Cluster, ClusterError
from monarch.job.kubernetes.kube_config import KubeConfig
from monarch.job.kubernetes.leftover import note_objects
from monarch.job.kubernetes.manifests import Kind
from monarch.job.kubernetes.pods import LEAVING, MeshPods, Pod
from monarch.job.kubernetes.specification import (
    RANK_LABEL,
    ImageSpec,
    Mesh,
    check_name,
    check_variants,
    selector_of,
)
from monarch.job.kubernetes.waiting import wait_for_pods
from monarch.job.pauses import pauses
from monarch.job.pod import PORT
from monarch.job.service_identity import (
    allocate_service_proc_ids,
    deserialize_service_proc_ids,
    serialize_service_proc_ids,
    service_proc_addrs,
)
from monarch.job.state import JobState, leave
from monarch.job.trait import JobTrait, changes
from monarch.job.users import part as part_from

if TYPE_CHECKING:
    from kubernetes.client import V1PodTemplateSpec

__all__ = ["KubernetesJob"]

_log = logging.getLogger("monarch.job")
_PREFIX = "monarch-kubernetes-job-"
_REPLACE_LIMIT = 300.0  # seconds for a new pod in the place of a lost one; `timeout`, if shorter
_END_LIMIT = 10.0  # seconds within which the cluster begins to delete pods without an owner
_LOOK = 5.0  # seconds within which the pods of a saved job have to be found ready
_KINDS = {
    kind.name: kind
    for kind in (
        manifests.MONARCH_MESH,
        manifests.STATEFUL_SET,
        manifests.SERVICE,
        manifests.SECRET,
    )
}

_configs: weakref.WeakKeyDictionary[KubernetesJob, KubeConfig] = weakref.WeakKeyDictionary()
_created: dict[str, list[tuple[str, str, str]]] = {}
"""The objects that this process has created, by ``apply_id``, until the job was connected."""


class KubernetesJob(JobTrait):
    """Hosts that are pods of a Kubernetes cluster.

    Args:
        namespace: the namespace of the pods.
        timeout: seconds for each mesh until its pods are ready; None: no limit.
        kubeconfig: the cluster and the user; None: those of the pod in which the program runs.
        attach_to: the address of a worker that is reached from here, such as
            ``tcp://gateway.example.org:26600``; the other workers are reached through that one.
        operator: whether the cluster has the operator for MonarchMesh objects. False: the job makes
            StatefulSets and services itself.
        secret: the name of a Secret object of the namespace, which holds the job's secret under the
            key ``secret``. None: a secret is made for pods that the job creates; pods that it
            attaches to have the secret that this client finds (docs/security.md).
        port_forward: whether to reach the pods through ``kubectl port-forward``. None: if there is
            a `kubeconfig` and no `attach_to`. False: addresses of pods can be dialed from here.

    See docs/jobs/kubernetes.md for all of it, from nothing to a running job. `apply` creates
    objects; `state` blocks until all pods are ready, with messages on stderr. Each failure raises
    RuntimeError with one line: the cause, and a remedy. Objects that a failed start has created are
    deleted. The pods outlive the script, until `kill`.

        job = KubernetesJob("ml", timeout=600)
        job.add_mesh("trainers", 2, image_spec=ImageSpec("registry.example.org/train:1"))
        procs = job.state().trainers.spawn_procs({"gpus": 8})
    """

    def __init__(
        self,
        namespace: str,
        timeout: int | None = None,
        kubeconfig: KubeConfig | None = None,
        attach_to: str | None = None,
        *,
        operator: bool = True,
        secret: str | None = None,
        port_forward: bool | None = None,
    ) -> None:
        super().__init__()
        if not namespace or not isinstance(namespace, str):
            raise ValueError(f"namespace must be the name of a namespace, not {namespace!r}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        kubeconfig = kubeconfig or KubeConfig()
        if port_forward and attach_to is not None:
            raise ValueError("port_forward and attach_to are two ways to the pods: give one")
        if port_forward is None:
            port_forward = kubeconfig.out_of_cluster and attach_to is None
        self._namespace = namespace
        self._timeout = timeout
        self._kubeconfig = None if kubeconfig.local is None else str(kubeconfig.local)
        self._in_memory = kubeconfig.remote is not None
        self._attach_to = attach_to
        self._operator = operator
        self._secret = secret
        self._forwards = port_forward
        self._python = tuple(sys.version_info[:2])
        self._meshes: dict[str, Mesh] = {}
        self._folder = ""
        self._objects: list[tuple[str, str, str]] = []  # kind, name, uid
        self._ids: dict[str, str] = {}  # the service ids of each mesh that has some
        self._addresses: list[str] = []  # as they were given to `attach_hosts`, for `leave`
        self._lives: list[str] = []  # of the pods at these addresses, see `Pod.life`
        self._replaced: dict[
            str, int
        ] = {}  # former address -> position; meshes know hosts by the first
        if self._in_memory:
            _configs[self] = kubeconfig

    def add_mesh(
        self,
        name: str,
        num_replicas: int,
        label_selector: str | None = None,
        pod_rank_label: str = RANK_LABEL,
        image_spec: ImageSpec | None = None,
        port: int = PORT,
        pod_template: V1PodTemplateSpec | dict[str, Any] | None = None,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
    ) -> None:
        """Add a mesh of pods to the description.

        Args:
            name: of the mesh, and of the objects that the job creates for it.
            num_replicas: how many pods.
            label_selector: selects pods that exist (default: those with the labels of the operator,
                for a mesh of this name).
            pod_rank_label: the label with the rank of a pod that exists.
            image_spec: create pods with a worker of this image.
            port: where the workers listen. A pod that sets ``MONARCH_PORT`` names its own.
            pod_template: create pods of this template, unchanged: a
                `kubernetes.client.V1PodTemplateSpec`, or its JSON as a dict.
            labels: of the created MonarchMesh or StatefulSet, such as those of Kueue.
            annotations: of the same object.

        Raises ValueError for a name that Kubernetes does not allow or that another mesh has, for an
        impossible number, and for arguments that exclude each other.
        """
        check_name(name)
        given = {
            "image_spec": image_spec is not None,
            "pod_template": pod_template is not None,
            "label_selector": label_selector is not None,
            "pod_rank_label": pod_rank_label != RANK_LABEL,
            "labels": labels is not None,
            "annotations": annotations is not None,
        }
        check_variants(given)
        if name in self._meshes:
            raise ValueError(f"there is a mesh {name!r} already")
        for what, number in (("num_replicas", num_replicas), ("port", port)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{what} must be a number, not {number!r}")
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, not {num_replicas}")
        if not 0 < port < 65536:
            raise ValueError(f"port must be between 1 and 65535, not {port}")
        template = None
        if image_spec is not None:
            key = self._secret or manifests.secret_name(name)
            template = manifests.template_of(image_spec, port, key)
        elif pod_template is not None:
            template = _as_json(pod_template)
        self._meshes[name] = Mesh(
            name=name,
            replicas=num_replicas,
            selector=selector_of(name) if label_selector is None else label_selector,
            rank_label=pod_rank_label,
            port=port,
            template=template,
            labels=dict(labels or {}),
            annotations=dict(annotations or {}),
            own_template=pod_template is not None,
        )

    @property
    def addresses(self) -> list[str]:
        """The addresses of the workers that `state` connected to last, mesh by mesh, by rank."""
        job = self._running_as()
        found = job._addresses if isinstance(job, KubernetesJob) else []
        return [address.rpartition("@")[2] for address in found]

    def can_run(self, spec: JobTrait) -> bool:
        """Whether `spec` describes the same job, and all pods are ready within five seconds."""
        if not isinstance(spec, KubernetesJob) or self._description() != spec._description():
            return False
        self._rebind_connection_inputs(spec)  # the pods are looked at now
        return self.active and not self._unready()

    def _differs(self, spec: JobTrait) -> str:
        if not isinstance(spec, KubernetesJob):
            return f"{type(self).__name__} -> {type(spec).__name__}"
        told: list[str] = []
        if self._namespace != spec._namespace:
            told.append(f"namespace: {self._namespace} -> {spec._namespace}")
        if self._python != spec._python:
            told.append("Python: {}.{} -> {}.{}".format(*self._python, *spec._python))
        sizes = {name: mesh.replicas for name, mesh in self._meshes.items()}
        told += changes("meshes", sizes, {name: m.replicas for name, m in spec._meshes.items()})
        if told:
            return "; ".join(told)
        if self._description() != spec._description():
            return "other options, or other templates of pods"
        return self._unready() or "it is not running"

    def _description(self) -> tuple[Any, ...]:
        """Return the values that are equal in two jobs if each can serve as the other."""
        options = (self._kubeconfig, self._in_memory, self._attach_to, self._operator, self._secret)
        return self._namespace, self._meshes, options, self._forwards, tuple(self._python)

    def _unready(self) -> str:
        """Return why not all pods are ready; empty if they are."""
        try:
            with self._cluster() as cluster:
                for mesh in self._meshes.values():
                    wait_for_pods(cluster, mesh, _LOOK)
        except RuntimeError as error:
            return str(error)
        return ""

    def _host_states(self) -> list[HostState]:
        states: list[HostState] = []
        with self._cluster() as cluster:
            for mesh in self._meshes.values():
                pods = _pods_of(mesh, cluster.list_pods(mesh.selector, _LOOK))
                serving = pods.serving
                for rank in range(mesh.replicas):
                    known = [serving[rank]] if rank in serving else pods.pods_of(rank)
                    named = known[-1].name if known else f"rank {rank} without a pod"
                    why = f" ({known[-1].obstacle})" if known and known[-1].obstacle else ""
                    shown = f"kubectl --namespace {self._namespace} logs " + (
                        named if known else f"--selector {mesh.selector}"
                    )
                    healthy = rank in serving
                    where = f"in the cluster: {shown}"
                    states.append(HostState(mesh.name, rank, named + why, healthy, "", where))
        return states

    def _rebind_connection_inputs(self, spec: JobTrait) -> None:
        if isinstance(spec, KubernetesJob) and spec in _configs:
            _configs[self] = _configs[spec]

    def _check_saved(self) -> None:
        super()._check_saved()
        if not all(isinstance(mesh, Mesh) for mesh in self._meshes.values()):
            raise ValueError("_meshes has other items than descriptions of meshes")
        for entry in self._objects:
            kind, name, uid = entry
            if kind not in _KINDS or type(name) is not str or type(uid) is not str:
                raise ValueError(f"_objects has {entry!r}, which is no object of a job")

    def _cleanup_log_context(self) -> dict[str, object]:
        return {"namespace": self._namespace, "meshes": ", ".join(self._meshes)}

    def _logs(self) -> list[tuple[str, str]]:
        look = f"kubectl --namespace {self._namespace} logs"
        return [
            (
                f"{mesh.name}_{rank}",
                f"[{look} {mesh.name}-{rank}]"
                if mesh.provisioned
                else f"[{look} --selector {mesh.selector}]",
            )
            for mesh in self._meshes.values()
            for rank in range(mesh.replicas)
        ]

    # -- for other scripts -----------------------------------------------------------------------

    def dump(self, filename: str) -> None:
        """Write the job to a file, as every `JobTrait`; a configuration in memory is left out."""
        super().dump(filename)
        self._saved_now()

    def dumps(self) -> bytes:
        """Return the job as bytes, as every `JobTrait`; a configuration in memory is left out."""
        data = super().dumps()
        self._saved_now()
        return data

    def _saved_now(self) -> None:
        job = self._running_as()
        if job._folder:
            port_forward.saved(job._folder)
        if isinstance(job, KubernetesJob) and job._in_memory:
            _log.warning(
                "the job is saved without its configuration of Kubernetes, which is in memory "
                "only: `monarch kill` cannot reach the cluster, a script that passes it can"
            )

    # -- starting --------------------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError(
                "KubernetesJob cannot run batch-mode scripts: run the client in a pod of its own"
            )
        if not self._meshes:
            raise ValueError("At least one mesh must be added using add_mesh()")
        if self._objects:
            raise RuntimeError("this job has created its objects already; kill() it first")
        provisioned = [mesh for mesh in self._meshes.values() if mesh.provisioned]
        if self._secret is None and 0 < len(provisioned) < len(self._meshes):
            raise ValueError(
                "some meshes are created and others attached to, and all pods of a job share one "
                "secret: name the Secret object of the pods with KubernetesJob(..., secret=...)"
            )
        made = _created[str(self._apply_id)] = []
        try:
            with self._cluster() as cluster:
                self._folder = make_folder(_PREFIX)
                if self._secret is None and provisioned:
                    self._share_secret(cluster, provisioned, made)
                for mesh in provisioned:
                    self._provision(cluster, mesh, made)
            if self._objects:
                self._note()
        except BaseException:
            self._undo()
            raise

    def _share_secret(
        self, cluster: Cluster, meshes: list[Mesh], made: list[tuple[str, str, str]]
    ) -> None:
        """Give all pods of the job one secret; pods that run already keep the one they have."""
        found = {
            mesh.name: cluster.read(manifests.SECRET, manifests.secret_name(mesh.name))
            for mesh in meshes
        }
        known = {name: manifests.content_of(each) for name, each in found.items() if each}
        contents = set(known.values())
        if None in contents:
            name = next(name for name, content in known.items() if content is None)
            raise RuntimeError(
                f"Secret {self._namespace}/{manifests.secret_name(name)} has no key 'secret', so "
                "it was not made for this mesh: delete it, or give the mesh another name"
            )
        if len(contents) > 1:
            raise RuntimeError(
                f"the meshes {', '.join(sorted(known))} belong to different jobs, since their "
                "secrets differ: kill those jobs, or give the meshes other names"
            )
        content = contents.pop() if contents else secrets.token_hex(32)
        _keep(self._folder, str(content))
        for mesh in meshes:
            name = manifests.secret_name(mesh.name)
            body = manifests.secret(name, self._namespace, mesh.name, str(content))
            self._own(cluster, manifests.SECRET, body, made)

    def _provision(self, cluster: Cluster, mesh: Mesh, made: list[tuple[str, str, str]]) -> None:
        if not mesh.own_template and mesh.template is not None:
            kind = manifests.MONARCH_MESH if self._operator else manifests.STATEFUL_SET
            found = cluster.read(kind, mesh.name)
            known = manifests.ids_of(found, mesh.replicas) if found is not None else None
            # The pods of an object that keeps its size go on running, so they keep their ids.
            ids = known or serialize_service_proc_ids(allocate_service_proc_ids(mesh.replicas))
            self._ids[mesh.name] = ids
            mesh = mesh._replace(template=manifests.with_ids(mesh.template, ids))
        for kind, body in manifests.objects_of(mesh, self._namespace, operator=self._operator):
            self._own(cluster, kind, body, made)

    def _own(
        self,
        cluster: Cluster,
        kind: Kind,
        body: dict[str, Any],
        made: list[tuple[str, str, str]],
    ) -> None:
        """Create an object; change one of this name that exists."""
        found = cluster.create(kind, body)
        created = found is not None
        if found is None:
            found = cluster.patch(kind, body)
        uid = text(part(found, "metadata"), "uid")
        entry = (kind.name, str(body["metadata"]["name"]), uid)
        self._objects.append(entry)
        if created:
            made.append(entry)

    def _undo(self) -> None:
        """Delete what a start that failed has created, and nothing else."""
        made = _created.pop(str(self._apply_id), [])
        self._objects = made
        try:
            self._release()
        except Exception as error:  # that of the start is raised next
            names = ", ".join(f"{kind} {name}" for kind, name, _ in made)
            _log.warning("could not delete what the start has created (%s): %s", names, error)
            if self._folder:
                self._note()

    def _note(self) -> None:
        """Note the objects of the job for ``monarch gc``, which can ask a cluster by a file."""
        if not self._in_memory:
            objects = [(_KINDS[kind], name, uid) for kind, name, uid in self._objects]
            note_objects(self._folder, self._namespace, self._kubeconfig, objects)

    # -- connecting ------------------------------------------------------------------------------

    def _state(self) -> JobState:
        try:
            state = self._connected()
        except BaseException:
            if str(self._apply_id) in _created:  # of this process, and never in use
                self._undo()
                if not self._attaches:
                    self.kill()  # nothing is left to kill; the job may be applied anew
            raise
        _created.pop(str(self._apply_id), None)
        return state

    def _connected(self) -> JobState:
        with self._cluster() as cluster:
            self._fetch_secret(cluster)
            pods = {
                name: wait_for_pods(cluster, mesh, self._timeout)
                for name, mesh in self._meshes.items()
            }
        self._enter(next(iter(pods.values()))[0])
        secret = secret_file(self._folder) if self._has_secret else None
        ids = {name: deserialize_service_proc_ids(ids) for name, ids in self._ids.items()}
        called = {
            name: service_proc_addrs([pod.address for pod in each], ids.get(name))
            for name, each in pods.items()
        }
        self._addresses = [address for each in called.values() for address in each]
        self._lives = [pod.life for each in pods.values() for pod in each]
        return JobState({name: attach_hosts(each, secret) for name, each in called.items()})

    def _replace_host(self, address: str) -> str:
        """Wait for the pod that Kubernetes makes in the place of a lost one.

        A pod that the job created, and that is still there as before, is deleted first: its
        StatefulSet then makes another one. This happens when a machine was lost, which Kubernetes
        notices late, and when a worker hangs.
        """
        known = [each.rpartition("@")[2] for each in self._addresses]
        plain = address.rpartition("@")[2]
        if plain not in known and plain not in self._replaced:
            raise ValueError(f"the job has no host at {address}; its hosts are {', '.join(known)}")
        place = known.index(plain) if plain in known else self._replaced[plain]
        places = [(mesh, r) for mesh in self._meshes.values() for r in range(mesh.replicas)]
        mesh, rank = places[place]
        lost = self._lives[place]
        limit = min(self._timeout or _REPLACE_LIMIT, _REPLACE_LIMIT)
        try:
            with self._cluster() as cluster:
                if mesh.provisioned:
                    _delete_lost(cluster, mesh, rank, lost)
                (pod,) = wait_for_pods(cluster, mesh, limit, lost=lost, rank=rank)
        except RuntimeError as error:
            raise RuntimeError(
                f"no new pod for rank {rank} of mesh {mesh.name!r}: {error}"
            ) from None
        if not self._addresses:
            raise RuntimeError("the job was killed while a lost host was replaced")
        ids = self._ids.get(mesh.name)
        own = None if ids is None else [deserialize_service_proc_ids(ids)[rank]]
        (new,) = service_proc_addrs([pod.address], own)
        self._replaced |= {self._addresses[place]: place, known[place]: place}
        self._addresses[place], self._lives[place] = new, pod.life
        return new

    @property
    def _has_secret(self) -> bool:
        """Whether the job has a secret that differs from that of this client."""
        return self._secret is not None or not self._attaches

    @property
    def _attaches(self) -> bool:
        """Whether all pods of the job are those of someone else."""
        return not any(mesh.provisioned for mesh in self._meshes.values())

    def _fetch_secret(self, cluster: Cluster) -> None:
        """Write the job's secret into its directory here, which may be of another machine."""
        if not os.path.isdir(self._folder):
            self._folder = make_folder(_PREFIX)
        if not self._has_secret:
            return
        name = self._secret or next(
            manifests.secret_name(mesh.name) for mesh in self._meshes.values() if mesh.provisioned
        )
        found = cluster.read(manifests.SECRET, name)
        if found is None:
            raise RuntimeError(
                f"there is no Secret {self._namespace}/{name}, which holds the job's secret: was "
                "the job killed, or is the name wrong?"
            )
        content = manifests.content_of(found)
        if content is None:
            raise RuntimeError(f"Secret {self._namespace}/{name} has no key 'secret'")
        _keep(self._folder, content)

    def _enter(self, first: Pod) -> None:
        """Reach the workers through one of them, if this client cannot dial all."""
        address = self._attach_to
        if self._forwards:
            if self._kubeconfig is None:
                raise RuntimeError(
                    "`kubectl port-forward` needs a kubeconfig file: KubeConfig.from_path(...), or "
                    "name a worker that can be reached from here with attach_to"
                )
            address = port_forward.start(
                self._folder, Path(self._kubeconfig), self._namespace, first.name, first.port
            )
        if address is None:
            return
        if self._has_secret:
            use_secret(self._folder)
        attach(address)

    @contextlib.contextmanager
    def _cluster(self) -> Generator[Cluster]:
        cluster = Cluster(self._namespace, self._config())
        try:
            yield cluster
        finally:
            cluster.close()

    def _config(self) -> KubeConfig:
        if not self._in_memory:
            return KubeConfig(None if self._kubeconfig is None else Path(self._kubeconfig))
        found = _configs.get(self)
        if found is None:
            raise RuntimeError(
                "the configuration of Kubernetes was in the memory of another process: use the job "
                "through a script that passes it, KubernetesJob(..., kubeconfig=...).state()"
            )
        return found

    # -- ending ----------------------------------------------------------------------------------

    def _kill(self) -> None:
        if self._addresses:
            leave([*self._replaced, *self._addresses])
            self._addresses, self._lives, self._replaced = [], [], {}
        _created.pop(str(self._apply_id), None)
        self._release()
        if self._attaches:
            raise NotImplementedError(
                "KubernetesJob currently does not support killing pods. It did not create those it "
                "attaches to: delete them where they were created, or detach by ending the script"
            )

    def _release(self) -> None:
        """Delete the objects of the job, and end what it has on this machine."""
        if self._folder:
            part_from(self._folder)
            port_forward.end(self._folder)
        if self._objects:
            with self._cluster() as cluster:
                deleted = [
                    cluster.delete(_KINDS[kind], name, uid)
                    for kind, name, uid in reversed(self._objects)
                ]
                if any(deleted):
                    try:
                        self._await_ends(cluster)
                    except ClusterError as error:  # the objects are deleted all the same
                        _log.info("whether pods end is not known: %s", error)
        self._objects = []
        self._ids = {}
        if self._folder:
            remove_folder(self._folder)
        self._folder = ""

    def _await_ends(self, cluster: Cluster) -> None:
        """Wait until the pods are being deleted too, which happens after their owner was.

        Otherwise the next job with a mesh of this name would find them, with another secret.
        """
        for mesh in self._meshes.values():
            if not mesh.provisioned:
                continue
            for waited in pauses():
                pods = _pods_of(mesh, cluster.list_pods(mesh.selector))
                known = [pod for rank in range(mesh.replicas) for pod in pods.pods_of(rank)]
                left = [pod.name for pod in known if pod.obstacle != LEAVING]
                if not left:
                    break
                if waited >= _END_LIMIT:
                    names = ", ".join(left)
                    _log.warning("%s was deleted, but not its pods: %s", mesh.name, names)
                    break


KubernetesJob.__module__ = "monarch.job.kubernetes"


def _pods_of(mesh: Mesh, listed: tuple[list[dict[str, Any]], str]) -> MeshPods:
    """Return the pods of a mesh that the API has listed."""
    pods = MeshPods(mesh.replicas, mesh.rank_label, mesh.port)
    pods.listed(*listed)
    return pods


def _delete_lost(cluster: Cluster, mesh: Mesh, rank: int, lost: str) -> None:
    """Delete the pod of a rank if it is the one that was lost, and nothing has ended it yet."""
    for pod in _pods_of(mesh, cluster.list_pods(mesh.selector)).pods_of(rank):
        if pod.life == lost and pod.obstacle != LEAVING:
            cluster.delete(manifests.POD, pod.name, pod.uid)


def _as_json(template: Any) -> dict[str, Any]:
    client: Any = importlib.import_module("kubernetes.client")
    made: Any = client.ApiClient(client.Configuration()).sanitize_for_serialization(template)
    found = cast("dict[str, Any]", made) if isinstance(made, dict) else {}
    if not items(part(found, "spec"), "containers"):
        raise ValueError(
            "pod_template must be a kubernetes.client.V1PodTemplateSpec with containers, or its "
            f"JSON as a dict, not {type(template).__name__}"
        )
    return found


def _keep(folder: str, content: str) -> None:
    """Write the job's secret into its directory."""
    draft = secret_file(folder) + ".new"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "w") as file:
        file.write(content + "\n")
    os.replace(draft, secret_file(folder))
