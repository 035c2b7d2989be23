"""`LoginJob`: named hosts that accept a login; a process of this machine keeps each of them.

A subclass implements how a host is started (`_start_host`). The result is a local process that
lives exactly as long as the host, and the address of the host. `SSHJob` is the subclass in this
package.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch._spi import ChannelAddr, attach_hosts
from monarch.job.folder import log_file, make_folder, remove_folder, secret_file
from monarch.job.format import savable
from monarch.job.host_state import HostState
from monarch.job.os_process import OsProcess, wait_for
from monarch.job.state import JobState, leave
from monarch.job.trait import JobTrait, changes

__all__ = ["Host", "LoginJob", "ProcessState", "check_hosts"]

_GRACE = 5.0  # seconds for a killed process to exit


class ProcessState(NamedTuple):
    """A host that was started: the local process that keeps it, and the address of its worker."""

    pid: int
    channel: str


@savable
class Host(NamedTuple):
    """A host that was started: its name, its worker's address, and its local process."""

    name: str
    address: str
    process: OsProcess


class LoginJob(JobTrait):
    """A job of named hosts. A subclass implements `_start_host`, or `_start_hosts` for all."""

    _prefix = "monarch-login-job-"  # the name of the job's directory begins so

    def __init__(self) -> None:
        super().__init__()
        self._meshes: dict[str, list[str]] = {}
        self._folder = ""
        self._hosts: dict[str, list[Host]] = {}

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """Add a mesh of these hosts to the description.

        Raises ValueError without hosts, for a name of another mesh, and for an invalid host name;
        TypeError for a string instead of a list.
        """
        if not hosts:
            raise ValueError(f"mesh {name!r} has no hosts")
        if name in self._meshes:
            raise ValueError(f"there is a mesh {name!r} already")
        check_hosts(hosts)
        self._meshes[name] = list(hosts)

    def host_names(self) -> list[str]:
        """Return a name or IP address of each host, mesh after mesh, where the workers are dialed.

        These may differ from the names in the description, which a login may translate. Raises
        RuntimeError if the job does not run.
        """
        job = self._running_as()
        if not isinstance(job, LoginJob) or not job._hosts:
            raise RuntimeError("the job does not run: call apply() or state() first")
        return [
            ChannelAddr.parse(one.address).host for hosts in job._hosts.values() for one in hosts
        ]

    def can_run(self, spec: JobTrait) -> bool:
        """Whether all hosts run, and `spec` describes the same job."""
        return (
            isinstance(spec, LoginJob)
            and self._description() == spec._description()
            and bool(self._hosts)
            and not self._dead()
        )

    def _differs(self, spec: JobTrait) -> str:
        if type(self) is not type(spec) or not isinstance(spec, LoginJob):
            return f"{type(self).__name__} -> {type(spec).__name__}"
        told = changes("meshes", self._meshes, spec._meshes)
        if dead := self._dead():
            told.append(f"{len(dead)} of its hosts ended")
        return "; ".join(told) or "other options"

    def _check_saved(self) -> None:
        super()._check_saved()
        if not all(isinstance(host, Host) for hosts in self._hosts.values() for host in hosts):
            raise ValueError("_hosts has other items than hosts")

    def _description(self) -> tuple[Any, ...]:
        """Return the values that are equal in two jobs if each can serve as the other."""
        return type(self), self._meshes

    # -- for subclasses --------------------------------------------------------------------------

    def _start_host(self, host: str) -> ProcessState:
        """Start a worker on `host`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a host is started")

    def _start_hosts(self, hosts: Sequence[str]) -> list[ProcessState]:
        """Start a worker on each host. If one cannot be started, end the others, and raise."""
        return [self._start_host(host) for host in hosts]

    def _end_hosts(self, processes: list[OsProcess]) -> None:
        """End the local processes. May block."""
        for process in processes:
            process.send(signal.SIGKILL)

    # -- starting, connecting and ending ---------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError(f"{type(self).__name__} cannot run batch-mode scripts")
        if not self._meshes:
            raise ValueError("At least one mesh must be added using add_mesh()")
        self._folder = make_folder(self._prefix)
        try:
            names = [host for hosts in self._meshes.values() for host in hosts]
            started = iter(self._start_hosts(names))
            for mesh, hosts in self._meshes.items():
                self._hosts[mesh] = [
                    Host(host, state.channel, OsProcess.of(state.pid))
                    for host, state in zip(hosts, started, strict=False)
                ]
        except BaseException:
            self._kill()
            raise

    def _state(self) -> JobState:
        dead = self._dead()
        if dead:
            names = ", ".join(host.name for host in dead)
            raise RuntimeError(f"lost connection to {len(dead)} of the hosts: {names}")
        meshes = {
            mesh: attach_hosts([host.address for host in hosts], secret_file(self._folder))
            for mesh, hosts in self._hosts.items()
        }
        return JobState(meshes)

    def _kill(self) -> None:
        leave([host.address for hosts in self._hosts.values() for host in hosts])
        processes = [host.process for hosts in self._hosts.values() for host in hosts]
        self._end_hosts(processes)
        still = wait_for(processes, _GRACE)
        if self._folder:
            remove_folder(self._folder)
        self._hosts = {}
        self._folder = ""
        if still:
            raise RuntimeError(f"these processes do not end: {[p.pid for p in still]}")

    def _host_states(self) -> list[HostState]:
        hosts = [
            (mesh, rank, host)
            for mesh, hosts in self._hosts.items()
            for rank, host in enumerate(hosts)
        ]
        return [
            HostState(mesh, rank, host.name, host.process.alive, log_file(self._folder, number))
            for number, (mesh, rank, host) in enumerate(hosts)
        ]

    def _dead(self) -> list[Host]:
        return [host for hosts in self._hosts.values() for host in hosts if not host.process.alive]


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise ValueError for an invalid host name, TypeError for a string instead of a list."""
    if isinstance(hosts, str):
        raise TypeError(f"hosts must be a list of names, not {hosts!r}")
    for host in hosts:
        if not host or host.startswith("-") or any(char.isspace() for char in host):
            raise ValueError(f"{host!r} is no name of a host")


for _public in (LoginJob, ProcessState):
    _public.__module__ = "monarch._src.job.job"
