"""Requests to SkyPilot, through its Python package.

SkyPilot's functions send a request to its API server and return the request's name, by which the
result is asked for. A request goes on without the process that sent it. Each failure, whatever
SkyPilot raises, becomes a `SchedulerError` of one line.

States are the words of SkyPilot: those of a request (``RUNNING``, ``SUCCEEDED``, ...) and those of
a job of a cluster (``SETTING_UP``, ``RUNNING``, ``FAILED_SETUP``, ...).
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from monarch.job.scheduler_command import SchedulerError, one_line

__all__ = ["MISSING", "OPEN", "Sky"]

MISSING = "SkyPilotJob needs SkyPilot, which is an extra: pip install 'pymonarch[skypilot]'"
"""The text of the error without the package."""

OPEN = ("PENDING", "WAITING", "RUNNING")
"""The states of a request that has not ended."""

_REMEDY = "does `sky status` work here?"
_LAST = 20  # lines at the end of a log that an error shows
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # the colours of SkyPilot's texts
_T = TypeVar("_T")


class Sky:
    """The SkyPilot of this process. Raises ImportError without the package."""

    def __init__(self) -> None:
        try:
            self._sky: Any = importlib.import_module("sky")
        except ImportError as error:
            raise ImportError(f"{MISSING} ({error})", name="sky") from error

    def launch(
        self,
        cluster: str,
        task: Mapping[str, object],
        resources: Mapping[str, Any] | None,
        options: Mapping[str, object],
    ) -> str:
        """Request a cluster that runs a task, and return the request. Uploads local files first."""

        def submit() -> str:
            given = dict(task)
            if resources is not None:
                given["resources"] = self._sky.Resources.from_yaml_config(dict(resources))
            made = self._sky.Task(**given)
            return str(self._sky.launch(made, cluster_name=cluster, **options))

        return _ask(f"launch cluster {cluster}", submit, "change the job accordingly")

    def request(self, request: str) -> str | None:
        """Return the state of a request; None if the server does not know it, or no longer."""

        def look() -> str | None:
            found = self._sky.api_status([request], all_status=True)
            return _word(found[0].status) if found else None

        return _ask(f"say what became of request {request}", look)

    def result(self, cluster: str, request: str) -> int | None:
        """Return the number of the job that a launch has submitted. Blocks until it has."""

        def fetch() -> int | None:
            number, _ = self._sky.get(request)
            return None if number is None else int(number)

        return _ask(f"launch cluster {cluster}", fetch, "`sky check` shows the clouds in reach")

    def exists(self, cluster: str) -> bool:
        """Whether there is a cluster of this name, whatever its state."""
        return self._record(cluster) is not None

    def addresses(self, cluster: str) -> list[str] | None:
        """Return the internal addresses of the nodes of a cluster; None if it is not up."""
        record = self._record(cluster)
        if record is None or _word(record["status"]) != "UP":
            return None

        def look() -> list[str]:
            handle = record["handle"]
            return [str(ip) for ip in handle.cached_internal_ips or handle.internal_ips()]

        return _ask(f"say where the nodes of cluster {cluster} are", look)

    def _record(self, cluster: str) -> Any:
        def look() -> Any:
            # The mode asks the cloud about clusters that may have ended by themselves.
            mode = self._sky.StatusRefreshMode.AUTO
            found = self._sky.get(self._sky.status([cluster], refresh=mode))
            return found[0] if found else None

        return _ask(f"say how cluster {cluster} is", look)

    def job(self, cluster: str, number: int) -> str | None:
        """Return the state of a job of a cluster; None if there is none."""

        def look() -> str | None:
            found = self._sky.get(self._sky.job_status(cluster, [number]))
            state = next((found[key] for key in found if str(key) == str(number)), None)
            return None if state is None else _word(state)

        return _ask(f"say how job {number} of cluster {cluster} is", look)

    def log(self, cluster: str, number: int) -> str:
        """Return the end of a job's output."""

        def fetch() -> str:
            output = io.StringIO()
            self._sky.tail_logs(cluster, number, follow=False, tail=_LAST, output_stream=output)
            return _ESCAPES.sub("", output.getvalue()).strip()

        return _ask(f"show the log of job {number} of cluster {cluster}", fetch)

    def cancel(self, request: str) -> None:
        """Cancel a request that has not ended yet."""
        if self.request(request) in OPEN:
            _ask(
                f"cancel request {request}",
                lambda: self._sky.get(self._sky.api_cancel([request], silent=True)),
            )

    def down(self, cluster: str) -> None:
        """Tear a cluster down, and wait for that. Does nothing if there is none."""
        if self.exists(cluster):
            _ask(
                f"tear down cluster {cluster}",
                lambda: self._sky.get(self._sky.down(cluster)),
                f"the cluster may still run, and cost: `sky down {cluster}`",
            )


def _ask(what: str, act: Callable[[], _T], remedy: str = _REMEDY) -> _T:
    try:
        return act()
    except Exception as error:  # all kinds, of clouds, of the server and of the network
        said = one_line(_ESCAPES.sub("", str(error))) or "no reason is given"
        raise SchedulerError(
            f"SkyPilot cannot {what}: {type(error).__name__}: {said}; {remedy}"
        ) from None


def _word(state: Any) -> str:
    """Return the word for a state, which is a member of an enumeration in some answers."""
    return str(getattr(state, "value", state))
