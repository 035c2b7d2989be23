"""Slurm's commands: submit, look, cancel. Each failure is a `SchedulerError` of one line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence

from monarch.job.scheduler_command import SchedulerError, run_command
from monarch.job.slurm.answers import (
    FIELDS,
    SlurmState,
    addresses_of_text,
    state_of_json,
    state_of_text,
    submitted_id,
)

__all__ = ["Scheduler"]

_log = logging.getLogger("monarch.job")

_MISSING = (
    "install Slurm's commands (Debian: slurm-client), or run this on a login node of the cluster"
)
_UNREACHABLE = "does `sinfo` work here? If not, ask the operators of the cluster"
_SHOWN = 200  # characters of an answer that makes no sense
_COMMAND_LIMIT = 30.0  # seconds


class Scheduler:
    """The Slurm that this machine's commands reach.

    ``squeue --json`` is asked first. Without the plugin for JSON the text form is used from then
    on; it lacks the exit code.
    """

    def __init__(self) -> None:
        self._json = True

    def submit(self, script: str, environ: Mapping[str, str]) -> int:
        """Submit a batch script, and return the number of the job."""
        output = run_command(
            ["sbatch"],
            input=script,
            environ=environ,
            limit=_COMMAND_LIMIT,
            missing=_MISSING,
            remedy="change the options of the job accordingly",
            wrapped="Failed to submit SLURM job: {}",
        )
        try:
            return submitted_id(output)
        except ValueError as error:
            raise _nonsense("sbatch", output, error, "Failed to parse job ID: ") from error

    def look(self, number: int) -> SlurmState | None:
        """Return the state of a job; None if Slurm does not know the job, or no longer."""
        if self._json:
            command = ["squeue", "--job", str(number), "--states=all", "--json"]
            try:
                output = run_command(command, limit=_COMMAND_LIMIT, missing=_MISSING)
                try:
                    return state_of_json(output, number)
                except ValueError as error:
                    raise _nonsense("squeue --json", output, error) from error
            except SchedulerError as error:
                if "Invalid job id" in str(error):
                    return None
                state = self._look_at_text(number)  # raises if squeue does not work at all
                _log.info("squeue --json is of no use here: %s", error)
                self._json = False
                return state
        return self._look_at_text(number)

    def _look_at_text(self, number: int) -> SlurmState | None:
        command = ["squeue", "--job", str(number), "--states=all", "--noheader"]
        try:
            output = run_command(
                [*command, f"--format={FIELDS}"],
                limit=_COMMAND_LIMIT,
                missing=_MISSING,
                remedy=_UNREACHABLE,
            )
        except SchedulerError as error:
            if "Invalid job id" in str(error):
                return None
            raise
        try:
            return state_of_text(output, number)
        except ValueError as error:
            raise _nonsense("squeue", output, error) from error

    def addresses(self, nodes: Sequence[str]) -> list[str]:
        """Return where these nodes are reached: their NodeAddr, or else their names."""
        found: dict[str, str] = {}
        try:
            found = addresses_of_text(self._show(",".join(nodes)))
        except SchedulerError as error:
            _log.info("nodes are reached by their names: %s", error)
        return [found.get(node, node) for node in nodes]

    def _show(self, nodes: str) -> str:
        return run_command(["scontrol", "show", "node", "--oneliner", nodes], limit=_COMMAND_LIMIT)

    def cancel(self, number: int) -> None:
        """Cancel a job, whatever its state."""
        try:
            run_command(
                ["scancel", str(number)],
                limit=_COMMAND_LIMIT,
                missing=_MISSING,
                remedy=f"the job may still run: `scancel {number}`",
            )
        except SchedulerError:
            with contextlib.suppress(SchedulerError):
                state = self.look(number)
                if state is None or state.ended:
                    return
            raise

    def cancel_named(self, name: str, user: str) -> None:
        """Cancel all jobs of this name: the answer to their submission was lost."""
        run_command(
            ["scancel", f"--name={name}", f"--user={user}"],
            limit=_COMMAND_LIMIT,
            missing=_MISSING,
        )


def _nonsense(command: str, output: str, error: ValueError, prefix: str = "") -> SchedulerError:
    shown = " | ".join(output.split("\n"))[:_SHOWN]
    return SchedulerError(
        f"{prefix}the answer of `{command}` makes no sense: {error}; it was: {shown!r}; is the "
        "command the one of Slurm?"
    )
