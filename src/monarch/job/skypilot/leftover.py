"""Whether the directory of a `SkyPilotJob` is left over: its cluster does not exist any longer."""

from __future__ import annotations

from monarch.job.folder import noted
from monarch.job.skypilot.guard import REQUEST
from monarch.job.skypilot.sky import OPEN, Sky

__all__ = ["CLUSTER", "is_left"]

CLUSTER = "cluster"
"""The name of the note with the name of the cluster."""


def is_left(folder: str) -> bool:
    """Whether there is no cluster, and none is launched. Raises RuntimeError, ImportError."""
    cluster, request = noted(folder, CLUSTER), noted(folder, REQUEST)
    if not cluster:
        return True  # the script was killed before it launched one
    sky = Sky()
    if request and sky.request(request) in OPEN:
        return False
    return not sky.exists(cluster)
