"""Whether the directory of a `SlurmJob` is left over: its Slurm job has ended for good."""

from __future__ import annotations

from monarch.job.folder import noted
from monarch.job.slurm.scheduler import Scheduler

__all__ = ["NUMBER", "is_left"]

NUMBER = "number"
"""The name of the note with the number of the Slurm job."""


def is_left(folder: str) -> bool:
    """Whether Slurm says that the job has ended, or does not know it. Raises RuntimeError."""
    number = noted(folder, NUMBER)
    if not number:
        raise RuntimeError("it does not say which Slurm job it belongs to: does one of yours run?")
    state = Scheduler().look(int(number))
    return state is None or state.ended
