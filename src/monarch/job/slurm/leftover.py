"""Whether the directory of a `SlurmJob` is left over: its Slurm job has ended for good."""

from __future__ import annotations

from monarch.job.folder import noted
from monarch.job.slurm.scheduler import Scheduler

__all__ = ["NUMBER", "is_left"]

NUMBER = "number"
"""The name of the note with the numbers of the Slurm jobs."""


def is_left(folder: str) -> bool:
    """Whether Slurm says that the job has ended, or does not know it. Raises RuntimeError."""
    numbers = noted(folder, NUMBER).split()
    if not numbers:
        raise RuntimeError("it does not say which Slurm job it belongs to: does one of yours run?")
    states = [Scheduler().look(int(number)) for number in numbers]
    return all(state is None or state.ended for state in states)
