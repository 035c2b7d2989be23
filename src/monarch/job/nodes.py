"""`NodesJob`: the processes in which a launcher started this very script, one on each host.

``srun python train.py`` and ``mpirun python train.py`` start a script on every node. The process of
rank 0 becomes the driver, and runs the script. All others become workers where they create the job,
and never return from there. A further worker beside the driver serves the driver's own host.

All processes compute where the driver listens from the launcher's variables, or read it in
``MONARCH_RENDEZVOUS``. They are not children of one process that could make a secret for them, so
they use the secret of the launch (``MONARCH_JOB_SECRET``) or else that of the user, as workers that
are started by hand.

The driver itself holds the lifelines of the workers, see `rendezvous`. So the hosts end with the
script, and the launcher with them; no other script finds the job.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from monarch._spi import (
    ChannelAddr,
    SecretError,
    attach_hosts,
    find_secret,
    progress,
    python_command,
    when_forked,
)
from monarch.job.node import SECRET_VARIABLE, kept_secret, take_secret
from monarch.job.rank import RENDEZVOUS_VARIABLE, Rank, find_rank, meeting_point
from monarch.job.rendezvous import Meeting
from monarch.job.reporting_host import serve
from monarch.job.state import JobState, leave
from monarch.job.trait import JobTrait

__all__ = ["NodesJob", "main"]

_GRACE = 20.0  # seconds for the worker beside the driver to exit
_BESIDE = "from monarch.job.nodes import main; main()"

_lines: dict[str, list[socket.socket]] = {}  # the lifelines of the workers, by the job's `apply_id`
_beside: dict[str, subprocess.Popen[bytes]] = {}  # the workers beside the driver


class NodesJob(JobTrait):
    """The hosts on which a launcher started this script. Made by `from_environment`."""

    def __init__(
        self, meshes: Mapping[str, int], rendezvous: str, address: str, job_start_timeout: float
    ) -> None:
        super().__init__()
        self._meshes = dict(meshes)
        self._rendezvous = rendezvous
        self._address = address
        self._limit = float(job_start_timeout)
        self._hosts: dict[str, list[str]] = {}

    @staticmethod
    def from_environment(
        meshes: Mapping[str, int] | None = None,
        *,
        rendezvous: str | None = None,
        address: str | None = None,
        job_start_timeout: float = 300.0,
    ) -> NodesJob:
        """Return the job in the process of rank 0; in all others serve as a host, and then exit.

        Args:
            meshes: how many hosts each mesh has, in all as many as there are processes. None: one
                mesh, ``hosts``.
            rendezvous: ``host:port`` where rank 0 listens; None: from ``MONARCH_RENDEZVOUS``, or
                the variables of the launcher.
            address: where the workers listen; None: at all addresses of their host (``tcp://*:0``),
                or at loopback if the rendezvous is there.
            job_start_timeout: seconds within which the processes have to find each other.

        In a process that serves, SystemExit is raised when the script of rank 0 has ended, or with
        one line if the worker cannot serve. Each process is a host, so start one on each node.

            job = NodesJob.from_environment()           # srun --ntasks-per-node=1 python train.py
            procs = job.state(cached_path=None).hosts.spawn_procs({"gpus": 8})

        Raises RuntimeError if no launcher started this process, or if the place of the rendezvous
        is unknown; ValueError for impossible variables or arguments.
        """
        rank = find_rank(os.environ)
        if rank is None:
            raise RuntimeError(
                "no launcher has started this process: there is no rank in its environment; start "
                "it by srun, mpirun or torchrun, or use ProcessJob for hosts on this machine"
            )
        meshes = {"hosts": rank.size} if meshes is None else dict(meshes)
        if sum(meshes.values()) != rank.size:
            raise ValueError(
                f"the meshes have {sum(meshes.values())} hosts, and {rank.launcher} has started "
                f"{rank.size} processes"
            )
        where = rendezvous or os.environ.get(RENDEZVOUS_VARIABLE) or meeting_point(os.environ, rank)
        if not where:
            raise RuntimeError(
                f"{rank.launcher} does not say where rank 0 runs: name its host and a free port, "
                f"such as {RENDEZVOUS_VARIABLE}=node1:22300, for all processes (with mpirun: -x "
                f"{RENDEZVOUS_VARIABLE})"
            )
        where = f"tcp://{where.removeprefix('tcp://')}"
        if not ChannelAddr.parse(where).port:
            raise ValueError(f"the rendezvous {where} has no port: name one that is free on rank 0")
        if address is None:
            address = "tcp://127.0.0.1:0" if _is_loopback(where) else "tcp://*:0"
        if SECRET_VARIABLE in os.environ:
            atexit.register(_keep(take_secret()).close)
        if rank.number:
            _serve(where, address, rank, job_start_timeout)
        return NodesJob(meshes, where, address, job_start_timeout)

    def can_run(self, spec: JobTrait) -> bool:
        """Return False: the hosts end with the script."""
        return False

    def _differs(self, spec: JobTrait) -> str:
        return ""

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("NodesJob cannot run batch-mode scripts")
        count = sum(self._meshes.values())
        listener = self._listen()
        with contextlib.closing(Meeting(listener, find_secret(), count)) as meeting:
            name = str(self._apply_id)
            try:
                _beside[name] = subprocess.Popen(
                    [*python_command(sys.executable, _BESIDE), self._rendezvous, self._address],
                    stdin=subprocess.DEVNULL,
                )
                self._await(meeting)
                reported = [meeting.reported[rank] for rank in range(count)]
                # Copies: the meeting closes the connections that it has.
                _lines[name] = [one.line.dup() for one in reported]
            except BaseException:
                meeting.close()  # the workers that have reported end
                self._kill()
                raise
        addresses = iter([one.report.address for one in reported])
        for mesh, hosts in self._meshes.items():
            self._hosts[mesh] = [next(addresses) for _ in range(hosts)]

    def _listen(self) -> socket.socket:
        address = ChannelAddr.parse(self._rendezvous)
        try:
            if _is_loopback(self._rendezvous):
                family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
                return socket.create_server((address.host, address.port), family=family)
            # At all addresses: a host often resolves its own name to loopback.
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("::", address.port), family=socket.AF_INET6, dualstack_ipv6=True
                )
            return socket.create_server(("", address.port))
        except OSError as error:
            raise RuntimeError(
                f"rank 0 cannot listen at {self._rendezvous} ({error.strerror or error}): name "
                f"another port with {RENDEZVOUS_VARIABLE}, for all processes"
            ) from error

    def _await(self, meeting: Meeting) -> None:
        def text() -> str:
            return f"waiting at {self._rendezvous} for {meeting.lack()}"

        deadline = time.monotonic() + self._limit
        with progress(text):
            while not meeting.complete:
                if not select.select([meeting], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise RuntimeError(
                        f"the job did not start within {self._limit:g} s: {meeting.lack()} did not "
                        f"come to {self._rendezvous}"
                    )
                meeting.heard()
                if meeting.error:
                    raise RuntimeError(f"the job cannot start: {meeting.error}")

    def _state(self) -> JobState:
        return JobState({mesh: attach_hosts(hosts) for mesh, hosts in self._hosts.items()})

    def _kill(self) -> None:
        name = str(self._apply_id)
        if name in _lines:  # it is this script's
            leave([address for hosts in self._hosts.values() for address in hosts])
        for line in _lines.pop(name, ()):
            line.close()
        beside = _beside.pop(name, None)
        if beside is not None:
            if not self._hosts:  # it may not have reported
                beside.send_signal(signal.SIGTERM)
            try:
                beside.wait(_GRACE)
            except subprocess.TimeoutExpired:
                beside.kill()
                beside.wait()
        self._hosts = {}


NodesJob.__module__ = "monarch.job"


def _keep(secret: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(kept_secret(secret))
    return stack


def _serve(where: str, address: str, rank: Rank, limit: float) -> None:
    """Serve this host, and exit."""
    try:
        serve(where, address, rank, limit=limit)
    except (ValueError, SecretError) as error:
        sys.exit(f"monarch worker on {socket.gethostname()}: {error}")
    sys.exit(0)


def _is_loopback(url: str) -> bool:
    host = ChannelAddr.parse(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def main() -> None:
    """Serve the driver's own host: the main function of the worker beside it."""
    rank = find_rank(os.environ)
    assert rank is not None  # the driver has found it in the same environment
    _serve(sys.argv[1], sys.argv[2], rank, 0.0)


def _forked() -> None:
    """Close the lifelines in a child that user code forks: the hosts belong to the parent."""
    while _lines:
        for line in _lines.popitem()[1]:
            line.close()
    _beside.clear()


when_forked(_forked)
