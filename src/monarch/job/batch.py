"""`BatchJob`: a job as it appears to the script that batch mode started beside the job.

Batch mode starts a job and, beside it, a script as the job's client. The script needs no change: it
describes a job and asks for its state. The saved job that the script finds in the file is this
wrapper around the started job. It serves any description, but in that script only.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence

from monarch.job.host_state import HostState
from monarch.job.state import JobState
from monarch.job.trait import JobTrait

__all__ = ["BATCH_VARIABLE", "BatchJob"]

BATCH_VARIABLE = "MONARCH_BATCH_JOB"


class BatchJob(JobTrait):
    """A wrapper that serves the script of a batch job, and ends `job` when the script exits."""

    def __init__(self, job: JobTrait) -> None:
        super().__init__()
        self._job = job
        self._status = "running"

    @property
    def apply_id(self) -> str | None:
        """The `apply_id` of the wrapped job."""
        return self._job.apply_id

    def can_run(self, spec: JobTrait) -> bool:
        """Whether this is the script of the batch job; if so, the job will end with the script.

        Raises RuntimeError in another script while the batch job runs: it must not be replaced.
        """
        if os.environ.get(BATCH_VARIABLE) != "1":
            if self._job._is_running():
                raise RuntimeError(
                    "the file has a batch job that still runs, for its own script: end it "
                    "(`monarch kill`), or name another file: state(cached_path=...)"
                )
            return False
        atexit.register(self._kill)
        return True

    def _differs(self, spec: JobTrait) -> str:
        return self._job._differs(spec)

    def _host_states(self) -> Sequence[HostState]:
        return self._job._host_states()

    def _is_running(self) -> bool:
        return self._job._is_running()

    def _create(self, client_script: str | None) -> None:
        raise RuntimeError("a batch job is submitted through the job it runs: apply(script)")

    def _state(self) -> JobState:
        return self._job._state()

    def _kill(self) -> None:
        self._job._kill()


BatchJob.__module__ = "monarch._src.job.job"
