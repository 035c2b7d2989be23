"""From lists and events of pods to the pods that serve as the hosts of a mesh. Pure.

A `MeshPods` gets what the API says: first a list of all pods (`listed`), then the events of a watch
from that list on (`event`), and a new list whenever the watch was interrupted. After each input it
knows which ranks are served.

A pod serves its rank if it is ready, has an address, and is not being deleted. If two pods of a
rank serve, as may happen while one replaces the other, the younger counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from monarch.job.kubernetes.answer import items, part, text
from monarch.job.pod import PORT_VARIABLE

__all__ = ["LEAVING", "MeshPods", "Pod", "read_pod"]


LEAVING = "it is being deleted"
"""The obstacle of a pod that ends."""


class Pod(NamedTuple):
    """A pod, as far as a job is concerned."""

    name: str
    uid: str
    rank: int | None
    """None without a label, or with one that is no number."""
    ip: str
    port: int
    serves: bool
    born: str
    """The time of its creation, in a form that sorts."""
    obstacle: str
    """Why it does not serve, in the words of Kubernetes; may be empty."""
    restarts: int = 0
    """How often its containers were started again."""

    @property
    def life(self) -> str:
        """A text that is another one for a pod that was created anew or whose containers were."""
        return f"{self.uid}/{self.restarts}"

    @property
    def address(self) -> str:
        """The address of the worker in the pod."""
        return f"tcp://{f'[{self.ip}]' if ':' in self.ip else self.ip}:{self.port}"


def read_pod(found: Mapping[str, Any], rank_label: str, port: int) -> Pod:
    """Return a `Pod` for a pod of the API; `port` is for pods that name none."""
    metadata, status = part(found, "metadata"), part(found, "status")
    rank = text(part(metadata, "labels"), rank_label)
    ip = text(status, "podIP")
    ready = any(
        (text(condition, "type"), text(condition, "status")) == ("Ready", "True")
        for condition in items(status, "conditions")
    )
    leaving = metadata.get("deletionTimestamp") is not None
    return Pod(
        name=text(metadata, "name"),
        uid=text(metadata, "uid"),
        rank=int(rank) if rank.isascii() and rank.isdecimal() else None,
        ip=ip,
        port=_port_of(found, port),
        serves=ready and bool(ip) and not leaving,
        born=text(metadata, "creationTimestamp"),
        obstacle=LEAVING if leaving else "" if ready else _obstacle(status),
        restarts=sum(int(c.get("restartCount") or 0) for c in items(status, "containerStatuses")),
    )


def _port_of(found: Mapping[str, Any], otherwise: int) -> int:
    for container in items(part(found, "spec"), "containers"):
        for variable in items(container, "env"):
            value = text(variable, "value")
            if text(variable, "name") == PORT_VARIABLE and value.isascii() and value.isdecimal():
                return int(value)
    return otherwise


def _obstacle(status: Mapping[str, Any]) -> str:
    """Return why a pod is not ready: the state of a container, or the words of the scheduler."""
    for container in items(status, "initContainerStatuses") + items(status, "containerStatuses"):
        for now in ("waiting", "terminated"):
            state = part(part(container, "state"), now)
            if text(state, "reason"):
                code = text(state, "exitCode")
                said = text(state, "message") or (f"exit status {code}" if code else "")
                return _sentence(text(state, "reason"), said)
    for condition in items(status, "conditions"):
        kind, now = text(condition, "type"), text(condition, "status")
        if (kind, now) == ("PodScheduled", "False"):
            return _sentence(text(condition, "reason"), text(condition, "message"))
    return text(status, "reason") or text(status, "phase") or "not ready"


def _sentence(reason: str, message: str) -> str:
    return " ".join(": ".join(filter(None, (reason, message))).split())


class MeshPods:
    """The pods of a mesh, as known from lists and events.

    `lost` is the life of a pod that no longer counts, see `Pod.life`. With `rank`, only that one
    has to be served.
    """

    def __init__(
        self, replicas: int, rank_label: str, port: int, *, lost: str = "", rank: int | None = None
    ) -> None:
        self.replicas = replicas
        self._lost = lost
        self._ranks = range(replicas) if rank is None else [rank]
        self.version = ""
        """The version of the list from which a watch goes on; empty: a new list is needed."""
        self._rank_label = rank_label
        self._port = port
        self._pods: dict[str, Pod] = {}  # by name
        self._strange: dict[str, str] = {}  # pods that cannot be used, and why
        self._reported: set[str] = set()

    def listed(self, pods: Iterable[Mapping[str, Any]], version: str) -> None:
        """Take a list of all pods, which replaces all that was known."""
        self._pods.clear()
        self._strange.clear()
        self.version = version
        for found in pods:
            self._take(found)

    def event(self, kind: str, found: Mapping[str, Any]) -> None:
        """Take an event of a watch; `found` is a pod, or the Status of an ERROR.

        After an error, such as a version that expired, `version` is empty: list again.
        """
        if kind == "ERROR":
            # The version is too old (410): the API no longer knows the events since then. Other
            # errors end the watch as well, and a new list shows whether the API works.
            self.version = ""
            return
        metadata = part(found, "metadata")
        self.version = text(metadata, "resourceVersion") or self.version
        if kind == "DELETED":
            self._pods.pop(text(metadata, "name"), None)
            self._strange.pop(text(metadata, "name"), None)
        elif kind in ("ADDED", "MODIFIED"):
            self._take(found)

    def _take(self, found: Mapping[str, Any]) -> None:
        pod = read_pod(found, self._rank_label, self._port)
        self._pods[pod.name] = pod
        self._strange.pop(pod.name, None)
        if pod.rank is None:
            self._strange[pod.name] = (
                f"pod {pod.name} has no number in its label {self._rank_label}"
            )
        elif pod.rank >= self.replicas:
            self._strange[pod.name] = (
                f"pod {pod.name} has rank {pod.rank}, and the mesh {self.replicas} hosts"
            )

    @property
    def serving(self) -> dict[int, Pod]:
        """The pod of each rank that is served."""
        best: dict[int, Pod] = {}
        for pod in sorted(self._pods.values(), key=lambda pod: (pod.born, pod.name)):
            if pod.serves and pod.rank in self._ranks and pod.life != self._lost:
                best[pod.rank or 0] = pod
        return dict(sorted(best.items()))

    @property
    def missing(self) -> list[int]:
        """The ranks that no pod serves."""
        serving = self.serving
        return [rank for rank in self._ranks if rank not in serving]

    def pods_of(self, rank: int) -> list[Pod]:
        """Return all pods that are known of a rank, whether they serve or not."""
        return [pod for pod in self._pods.values() if pod.rank == rank]

    def obstacles(self) -> str:
        """Return in a few words why ranks are missing; empty if nothing is known."""
        told = [
            f"{pod.name}: {pod.obstacle}"
            for pod in sorted(self._pods.values())
            if pod.rank in self.missing and pod.obstacle
        ]
        return _first(told)

    def skipped(self) -> str:
        """Return why pods cannot be used, in a few words; empty if all can."""
        return _first(list(self._strange.values()))

    def strange(self) -> list[str]:
        """Return why pods were skipped: each reason once."""
        new = [why for why in self._strange.values() if why not in self._reported]
        self._reported.update(new)
        return new


def _first(told: list[str]) -> str:
    """Return the first two texts, and how many more there are."""
    more = f" and {len(told) - 2} more" if len(told) > 2 else ""
    return "; ".join(told[:2]) + more
