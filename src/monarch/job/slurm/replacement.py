"""The replacement of a lost node: a Slurm job of one node, with the options of the first job.

Slurm gives a running job no other nodes. So the new node belongs to a job of its own, and a
`SlurmJob` may consist of several Slurm jobs. If Slurm has requeued the job of the lost node, that
job is waited for instead.

`changing` orders the submission of such a job with `SlurmJob.kill`: a job that is submitted after
the kill would stay. A replacement that fails, or is interrupted, cancels its Slurm job.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from monarch.job import lifeline
from monarch.job.slurm.guard import start_guard
from monarch.job.slurm.waiting import listens

if TYPE_CHECKING:
    from monarch.job.slurm.job import SlurmJob

__all__ = ["Replacement", "changing"]

_LIMIT = 600.0  # seconds for a node in the place of a lost one; `job_start_timeout`, if set
_LISTEN_LIMIT = 60.0  # seconds within which the worker of a node that runs listens

changing = threading.RLock()
"""Held while a job gets or loses nodes."""


class Replacement:
    """The replacement of the host at `address`, or of the one that replaced it earlier.

    Raises ValueError if the job has no such host.
    """

    def __init__(self, job: SlurmJob, address: str) -> None:
        if address not in job._hosts and address not in job._replaced:
            known = ", ".join(job._hosts)
            raise ValueError(f"the job has no host at {address}; its hosts are {known}")
        self._job = job
        self._again = address not in job._hosts
        self._place = job._replaced[address] if self._again else job._hosts.index(address)
        self._old = job._hosts[self._place]
        limit = job._start_timeout
        self._limit = _LIMIT if limit is None else float(limit)

    def run(self) -> str:
        """Return the address of the new worker. Blocks until it listens. Raises RuntimeError."""
        if self._again and listens(self._old):  # the new worker was not reached in time
            return self._old
        job, place = self._job, self._place
        deadline = time.monotonic() + self._limit
        before = job._extra.get(str(place))
        number = self._requeued()
        if number is not None:
            wanted = sum(job._meshes.values()) if before is None else 1
            nodes = job._waiting().nodes(number, wanted, self._limit)
            return self._put(nodes[place if wanted > 1 else 0], number, deadline)
        number = self._submit()
        try:
            (node,) = job._waiting().nodes(number, 1, self._limit)
            new = self._put(node, number, deadline)
        except RuntimeError as error:
            self._withdraw(number, before)
            raise RuntimeError(f"no node in the place of {self._old}: {error}") from error
        except BaseException:
            self._withdraw(number, before)
            raise
        if before is not None:
            job._scheduler().cancel(before)
        return new

    def _requeued(self) -> int | None:
        """Return the Slurm job of the host if it waits in the queue again."""
        number = self._job._extra.get(str(self._place), self._job._job_id)
        state = None if number is None else self._job._waiting().look(number)
        waits = state is not None and not state.ended and not state.running
        return number if waits else None

    def _submit(self) -> int:
        job = self._job
        with changing:
            folder = job._folder
            if not folder:
                raise RuntimeError("the job was killed while a lost host was replaced")
            used = ",".join(self._nodes_in_use())
            without = [f"--exclude={used}"] if used else []
            number = job._submit(self._name, job._script(self._name, None, 1, *without))
            job._extra[str(self._place)] = number
            job._note()
            stays = not lifeline.is_held(folder)  # the nodes outlive this script
            start_guard(folder, number)
            if stays:
                lifeline.release(folder)
        return number

    def _withdraw(self, number: int, before: int | None) -> None:
        """Cancel the Slurm job of a replacement that failed, unless `kill` has done that."""
        job, place = self._job, str(self._place)
        with changing:
            if job._extra.get(place) != number:
                return
            del job._extra[place]
            if before is not None:
                job._extra[place] = before
            job._note()
            job._scheduler().cancel(number)

    @property
    def _name(self) -> str:
        """The name of the Slurm job; no other job has it."""
        job = self._job
        return f"{job._job_name}_{os.getpid()}_host{self._place}"

    def _nodes_in_use(self) -> list[str]:
        """Return the nodes of all Slurm jobs of this job: a worker's port may be taken there."""
        waiting = self._job._waiting()
        states = [waiting.look(number) for number in self._job._numbers()]
        return [node for state in states if state and state.running for node in state.nodes]

    def _put(self, node: str, number: int, deadline: float) -> str:
        """Wait until the worker of the new node listens, and make it the host at this place."""
        job, waiting = self._job, self._job._waiting()
        (new,) = waiting.addresses([node], job._port)
        if job._attach_to is None and not job._out_of_cluster:
            log = job._log_paths(self._name)[0].replace("%j", str(number))
            waiting.worker(new, number, min(deadline, time.monotonic() + _LISTEN_LIMIT), log)
        with changing:
            if not job._folder:
                raise RuntimeError("the job was killed while a lost host was replaced")
            job._replaced[self._old] = self._place
            job._hosts[self._place] = new
        return new
