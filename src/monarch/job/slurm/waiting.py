"""Waiting for Slurm: until a job runs, and until the worker of a node listens.

Slurm has no notice of a job that starts, so `Waiting` asks again and again, with growing pauses.
An error of ``squeue`` is not final: the controller may be restarting.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from monarch._spi import progress
from monarch.job.pauses import pauses
from monarch.job.scheduler_command import SchedulerError
from monarch.job.slurm.answers import SlurmState
from monarch.job.slurm.scheduler import Scheduler

__all__ = ["Waiting", "listens"]

_PATIENCE = 10.0  # seconds during which squeue may fail, as while the controller restarts
_DIAL_LIMIT = 5.0  # seconds for one connection
_LONGEST = 0.7  # seconds between two questions whether the job runs; the goal is 1 s


class Waiting:
    """Waits for what `scheduler` tells."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def look(self, number: int) -> SlurmState | None:
        """As `Scheduler.look`, again for 10 s if it fails. Raises SchedulerError after that."""
        for waited in pauses():
            try:
                return self._scheduler.look(number)
            except SchedulerError:
                if waited >= _PATIENCE:
                    raise
        raise AssertionError

    def nodes(self, number: int, wanted: int, limit: float | None) -> Sequence[str]:
        """Wait until a Slurm job runs, and return its nodes.

        Raises RuntimeError if it ends, if it has another number of nodes than `wanted`, and after
        `limit` seconds (None: no limit).
        """
        state: SlurmState | None = None

        def text() -> str:
            return f"waiting for Slurm job {number}: {state or 'no answer from squeue yet'}"

        with progress(text):
            for waited in pauses(_LONGEST):
                state = self.look(number)
                if state is None:
                    raise RuntimeError(f"Slurm no longer knows job {number}")
                if state.ended:
                    raise RuntimeError(f"Slurm job {number} ended: {state}")
                if state.running and (state.nodes or state.node_count is not None):
                    found = len(state.nodes) or state.node_count
                    if found != wanted:
                        raise RuntimeError(
                            f"Partial allocation not supported: Slurm job {number} has {found} "
                            f"nodes, and {wanted} were requested"
                        )
                    if state.nodes:
                        return state.nodes
                if limit is not None and waited >= limit:
                    raise RuntimeError(
                        f"Timeout waiting for SLURM job {number} to start: after {limit:g} s it is "
                        f"{state}; a longer job_start_timeout waits longer"
                    )
        raise AssertionError

    def addresses(self, nodes: Sequence[str], port: int) -> list[str]:
        """Return the addresses of the workers of these nodes. Raises RuntimeError if two agree."""
        found = self._scheduler.addresses(nodes)
        hosts = [f"[{host}]" if ":" in host else host for host in found]
        addresses = [f"tcp://{host}:{port}" for host in hosts]
        if len(set(addresses)) != len(addresses):
            raise RuntimeError(
                f"several nodes have one address ({', '.join(addresses)}): give each its own "
                "NodeAddr in slurm.conf"
            )
        return addresses

    def worker(self, address: str, number: int, deadline: float, log: str) -> None:
        """Wait until a worker listens. Raises RuntimeError, naming `log`, if it does not come."""
        for _ in pauses(_LONGEST):
            if listens(address):
                return
            state = self.look(number)
            if state is None or not state.running or time.monotonic() > deadline:
                raise RuntimeError(
                    f"Slurm job {number} is {state or 'ended'}, and no worker listens at "
                    f"{address}; see {log}"
                )


def listens(address: str) -> bool:
    """Whether a worker accepts connections at this address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _DIAL_LIMIT).close()
    except OSError:
        return False
    return True
