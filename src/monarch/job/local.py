"""`LocalJob`: every mesh is this host."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from monarch.actor import this_host
from monarch.job.batch import BATCH_VARIABLE, BatchJob
from monarch.job.saved import DEFAULT_JOB_PATH, open_folder
from monarch.job.state import JobState
from monarch.job.trait import JobTrait

__all__ = ["LocalJob"]


class LocalJob(JobTrait):
    """A job whose meshes all are `this_host()`. No host is started, and no host is killed.

    Args:
        hosts: names of the meshes.

    >>> LocalJob(("a", "b")).state(cached_path=None)
    JobState(hosts={'a': <HostMesh {}>, 'b': <HostMesh {}>})

    Processes on this host end with the script, so the next script never finds them.
    ``apply("x.py")`` starts a script in the background (`process`), with its output in
    ``.monarch/logs``.
    """

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self._names = list(hosts)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The script that ``apply(script)`` started. Raises ValueError if there is none."""
        if self._process is None:
            raise ValueError("no local batch job: this job was not applied with a script here")
        return self._process

    def can_run(self, spec: JobTrait) -> bool:
        """Return False: processes of this host end with the script that started them."""
        return False

    def _differs(self, spec: JobTrait) -> str:
        return ""  # no text: no host could be killed, so the replacement is not worth a message

    def _should_spawn_telemetry_worker_collector_actors(self) -> bool:
        return False

    def _create(self, client_script: str | None) -> None:
        if client_script is None:
            return
        BatchJob(self).dump(DEFAULT_JOB_PATH)
        logs = os.path.join(os.path.dirname(DEFAULT_JOB_PATH), "logs")
        os.close(open_folder(logs, make=True))
        folder = tempfile.mkdtemp(prefix="job_", dir=logs)
        with (
            open(os.path.join(folder, "stdout.log"), "wb") as out,
            open(os.path.join(folder, "stderr.log"), "wb") as err,
        ):
            self._process = subprocess.Popen(
                [sys.executable, client_script],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, BATCH_VARIABLE: "1"},
                start_new_session=True,
            )

    def _state(self) -> JobState:
        return JobState({name: this_host() for name in self._names})

    def _kill(self) -> None:
        """Do nothing: a batch script is ended through `process`."""

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_process": None}


LocalJob.__module__ = "monarch.job"
