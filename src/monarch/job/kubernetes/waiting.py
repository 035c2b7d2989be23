"""Wait until pods serve all ranks of a mesh.

The pods are listed, and then watched from the version of that list on; so a pod that becomes ready
is noticed at once. When the watch ends, as it does after a minute, it goes on from the last version
seen. When it breaks, or the API no longer knows that version (410), the pods are listed again.
While the API does not answer, it is asked again, for half a minute.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from monarch._spi import progress
from monarch.job.kubernetes.cluster import Cluster, ClusterError
from monarch.job.kubernetes.pods import MeshPods, Pod
from monarch.job.kubernetes.specification import Mesh

__all__ = ["wait_for_pods"]

_log = logging.getLogger("monarch.job")
_WATCH = 60.0  # seconds of one watch
_LEAST = 10.0  # seconds for a list, also shortly before the deadline
_PATIENCE = 30.0  # seconds within which the API has to answer again
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts


def wait_for_pods(
    cluster: Cluster,
    mesh: Mesh,
    timeout: float | None,
    *,
    lost: str = "",
    rank: int | None = None,
) -> list[Pod]:
    """Return the pods of a mesh in the order of their ranks, once all of them serve.

    With `rank`, return the pod of that rank alone. A pod of the life `lost` does not count.

    Blocks for at most `timeout` seconds (None: without a limit), with a line on stderr after two
    seconds. Raises RuntimeError.
    """
    pods = MeshPods(mesh.replicas, mesh.rank_label, mesh.port, lost=lost, rank=rank)
    wanted = len(pods.missing)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    failing_since = math.inf
    pause = _FIRST_PAUSE
    error: ClusterError | None

    def text() -> str:
        missing = pods.missing
        why = pods.obstacles()
        return (
            f"waiting for {len(missing)} of the {wanted} pods of mesh {mesh.name!r} in "
            f"namespace {cluster.namespace!r}" + (f" ({why})" if why else "")
        )

    with progress(text):
        while True:
            try:
                left = deadline - time.monotonic()
                if not pods.version:
                    limit = max(_LEAST, min(_WATCH, left))
                    pods.listed(*cluster.list_pods(mesh.selector, limit))
                    failing_since = math.inf
                    _warn(pods)
                if pods.missing and left > 0:
                    seconds = max(1, math.ceil(min(_WATCH, left)))
                    for kind, found in cluster.watch_pods(mesh.selector, pods.version, seconds):
                        pods.event(kind, found)
                        _warn(pods)
                        if not pods.missing or not pods.version:
                            break
                error = None
            except ClusterError as failure:
                error = failure
                pods.version = ""
                now = time.monotonic()
                failing_since = min(failing_since, now)
                given_up = now - failing_since >= _PATIENCE or now >= deadline
                if failure.status != 410 and (not failure.passes or given_up):
                    raise RuntimeError(f"Failed to watch pods: {failure}") from failure
            if not pods.missing:
                return list(pods.serving.values())
            if time.monotonic() >= deadline:
                raise RuntimeError(_ended(mesh, pods, wanted))
            if error is None and pods.version:
                pause = _FIRST_PAUSE
            else:  # neither a failing API nor one that always expires is asked without pause
                threading.Event().wait(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(_LONGEST_PAUSE, 2 * pause)


def _ended(mesh: Mesh, pods: MeshPods, wanted: int) -> str:
    missing = pods.missing
    served = wanted - len(missing)
    known = (
        pods.obstacles()
        or pods.skipped()
        or f"there are no pods for them; look at: kubectl get pods --selector {mesh.selector}"
    )
    return f"Watch ended with {served}/{wanted} ranks. Missing ranks: {missing} ({known})"


def _warn(pods: MeshPods) -> None:
    for why in pods.strange():
        _log.warning("%s: it is not used", why)
