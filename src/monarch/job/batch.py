"""`BatchJob`: the job as the script sees it that was started along with it.

Batch mode starts a job and, beside it, a script as its client. The script is the same as ever: it
describes a job and asks for its state. What it finds in the file is this wrapper around the job
that was started for it, which serves any description, in that script and nowhere else.
"""

from __future__ import annotations

import atexit
import os

from monarch.job.state import JobState
from monarch.job.trait import JobTrait

__all__ = ["BATCH_VARIABLE", "BatchJob"]

BATCH_VARIABLE = "MONARCH_BATCH_JOB"


class BatchJob(JobTrait):
    """Serves the script of a batch job with `job`, and ends that at the script's exit."""

    def __init__(self, job: JobTrait) -> None:
        super().__init__()
        self._job = job
        self._status = "running"

    @property
    def apply_id(self) -> str | None:
        """That of the job itself."""
        return self._job.apply_id

    def can_run(self, spec: JobTrait) -> bool:
        """In the script of the batch job; from then on the job ends with the script."""
        if os.environ.get(BATCH_VARIABLE) != "1":
            return False
        atexit.register(self._kill)
        return True

    def _differs(self, spec: JobTrait) -> str:
        return self._job._differs(spec)

    def _create(self, client_script: str | None) -> None:
        raise RuntimeError("a batch job is submitted through the job it runs: apply(script)")

    def _state(self) -> JobState:
        return self._job._state()

    def _kill(self) -> None:
        self._job._kill()


BatchJob.__module__ = "monarch._src.job.job"
