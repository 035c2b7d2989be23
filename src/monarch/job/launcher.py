"""`LauncherJob`: hosts whose workers are started by one command of this machine.

The command (`mpirun`, `srun`, a program of one's own) runs the worker on every host, waits for all
of them, passes on environment variables, and gives each process a rank. The script opens a
rendezvous (`rendezvous`), starts the command through a keeper (`keeper`), and waits for the report
of each worker. The addresses are given to the meshes in the order of the ranks.

The rendezvous and the workers listen at all addresses of their host by default, since a launcher is
for other hosts than this one. A peer that does not know the job's secret is refused, and the
rendezvous is closed as soon as all workers have reported.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from monarch._spi import (
    ANY_PYTHON,
    FROM_ANY_PYTHON,
    ChannelAddr,
    attach_hosts,
    find_secret,
    own_name,
    progress,
    python_command,
)
from monarch.job import lifeline
from monarch.job.folder import (
    last_words,
    lock_of,
    log_file,
    make_folder,
    remove_folder,
    remove_stale,
    secret_file,
)
from monarch.job.host_state import HostState
from monarch.job.keeper import CONNECTION, ended_file
from monarch.job.node import SECRET_VARIABLE
from monarch.job.os_process import OsProcess, wait_for, watch
from monarch.job.rank import RENDEZVOUS_VARIABLE
from monarch.job.rendezvous import Meeting
from monarch.job.reporting_host import ADDRESS_VARIABLE
from monarch.job.scheduler_command import one_line
from monarch.job.state import JobState, leave
from monarch.job.trait import JobTrait, changes, check_meshes

__all__ = ["LauncherJob"]

_PREFIX = "monarch-launched-job-"
_ROUND = 0.5  # seconds between two looks for workers that a launcher has reported as ended
_GRACE = 60.0  # seconds for the keeper to end the launcher
_WORKER = "from monarch.job.reporting_host import main; main()"
_KEEPER = "from monarch.job.keeper import main; main()"
_EVERYWHERE = ("::", "0.0.0.0")  # noqa: S104 - looked for, not listened at
_MOST_LOG = 1 << 16  # bytes of a launcher's output that are searched for causes
_MOST = 800  # characters of it that an error shows
_MARKS = ("monarch worker on ", "monarch launcher: ")  # begin the line of a cause


class LauncherJob(JobTrait):
    """Hosts whose workers are started by one command, which numbers them.

    Args:
        meshes: how many hosts each mesh has. The ranks are given to the meshes in this order.
        launcher: the command, which is followed by the worker's command. It has to start the worker
            as often as there are hosts in all meshes, pass on this job's environment variables, and
            run until all workers have exited. The worker finds its rank as `find_rank` does.
        python_exe: the Python of the hosts, in shell syntax; None: the one of this script. It needs
            pymonarch, and the same minor version as this one.
        env: environment variables of the launcher, in addition to this script's.
        address: where the rendezvous and the workers listen: at all addresses of their host
            (``tcp://*:0``), or at a certain one, such as ``tcp://127.0.0.1:0``. Port 0 is any.
        job_start_timeout: seconds within which all workers have to report.

    Starting blocks until every worker has reported. Raises RuntimeError of one line if the launcher
    is missing, fails or hangs, and if a worker cannot serve; no process is left then. The hosts end
    with `kill`, when the launcher exits, and with this script as long as the job is not saved (see
    `JobTrait.state`).

        job = LauncherJob({"trainers": 2}, ["srun", "--nodes=2", "--ntasks-per-node=1"])
        procs = job.state().trainers.spawn_procs({"gpus": 8})

    Raises TypeError and ValueError for impossible arguments.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        launcher: Sequence[str],
        *,
        python_exe: str | None = None,
        env: Mapping[str, str] | None = None,
        address: str = "tcp://*:0",
        job_start_timeout: float = 300.0,
    ) -> None:
        super().__init__()
        if isinstance(launcher, str) or not launcher:
            raise TypeError(
                f"launcher must be a list: a command and its arguments, not {launcher!r}"
            )
        check_meshes(meshes)
        if not address.startswith("tcp://"):
            raise ValueError(f"address must be such as tcp://*:0, not {address!r}")
        ChannelAddr.parse(address)  # raises for an impossible one
        if not job_start_timeout > 0:
            raise ValueError(f"job_start_timeout must be positive, not {job_start_timeout}")
        self._meshes = dict(meshes)
        self._launcher = list(launcher)
        self._python_exe = python_exe
        self._env = dict(env or {})
        self._address = address
        self._limit = float(job_start_timeout)
        self._python = list(sys.version_info[:2])
        self._folder = ""
        self._hosts: dict[str, list[str]] = {}  # the addresses of each mesh
        self._keeper: OsProcess | None = None

    def can_run(self, spec: JobTrait) -> bool:
        """Whether all hosts run, and `spec` describes the same job."""
        return (
            isinstance(spec, LauncherJob)
            and self._description() == spec._description()
            and bool(self._hosts)
            and not self._lost()
        )

    def _description(self) -> dict[str, object]:
        """Return the values that are equal in two jobs if each can serve as the other."""
        return {
            "kind": type(self).__name__,
            "meshes": self._meshes,
            "launcher": self._launcher,
            "python_exe": self._python_exe,
            "address": self._address,
            "env": self._env,
            "Python": self._python,
        }

    def _differs(self, spec: JobTrait) -> str:
        if type(self) is not type(spec) or not isinstance(spec, LauncherJob):
            return f"{type(self).__name__} -> {type(spec).__name__}"
        told = changes("meshes", self._meshes, spec._meshes)
        mine, other = self._description(), spec._description()
        # Names only: a value may be a secret.
        if names := [name for name in mine if name != "meshes" and mine[name] != other[name]]:
            told.append(f"other {', '.join(names)}")
        if lost := self._lost():
            told.append(lost)
        return "; ".join(told)

    def host_names(self) -> list[str]:
        """Return a name or IP address of each host, by rank, where other hosts reach it.

        Raises RuntimeError if the job does not run.
        """
        job = self._running_as()
        if not isinstance(job, LauncherJob) or not job._hosts:
            raise RuntimeError("the job does not run: call apply() or state() first")
        return [ChannelAddr.parse(one).host for hosts in job._hosts.values() for one in hosts]

    def _check_saved(self) -> None:
        super()._check_saved()
        if self._keeper is not None and not isinstance(self._keeper, OsProcess):
            raise ValueError("_keeper is no process")

    def _host_states(self) -> list[HostState]:
        ended = self._ended_ranks() if self._alive() else list(range(self._count))
        hosts = [
            (mesh, rank, ChannelAddr.parse(address).host)
            for mesh, addresses in self._hosts.items()
            for rank, address in enumerate(addresses)
        ]
        log = log_file(self._folder, 0)  # a launcher collects the output of all hosts
        return [
            HostState(mesh, rank, name, number not in ended, log)
            for number, (mesh, rank, name) in enumerate(hosts)
        ]

    # -- for subclasses --------------------------------------------------------------------------

    def _command(self) -> list[str]:
        """Return the launcher's command for this machine, with its arguments.

        May run other commands to find it out. Raises RuntimeError.
        """
        return self._launcher

    def _worker(self) -> list[str]:
        """Return the command of a worker; empty if the launcher has its own."""
        if self._python_exe is None:
            return python_command(sys.executable, _WORKER)
        return [*ANY_PYTHON, *shlex.split(self._python_exe), "-c", FROM_ANY_PYTHON + _WORKER]

    def _variables(self) -> dict[str, str]:
        """Return more environment variables of the launcher."""
        return {}

    @property
    def _count(self) -> int:
        return sum(self._meshes.values())

    # -- starting --------------------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError(f"{type(self).__name__} cannot run batch-mode scripts")
        if not self._meshes:
            raise ValueError(f"{type(self).__name__} needs at least one mesh: meshes is empty")
        command = self._command()
        if shutil.which(command[0]) is None:
            raise RuntimeError(
                f"`{command[0]}` is not installed here: the job starts workers by it"
            )
        remove_stale(_PREFIX)
        self._folder = make_folder(_PREFIX)
        try:
            addresses = iter(self._start([*command, *self._worker()]))
        except BaseException:
            self._kill()
            raise
        for mesh, count in self._meshes.items():
            self._hosts[mesh] = [next(addresses) for _ in range(count)]

    def _start(self, command: Sequence[str]) -> list[str]:
        """Start the keeper with the launcher; return the workers' addresses by rank."""
        listener, where = self._listen()
        meeting = Meeting(listener, find_secret(secret_file(self._folder)), self._count)
        with contextlib.closing(meeting):
            line, theirs = lifeline.add(self._folder)
            with theirs:
                keeper = self._keep(command, theirs, where)
            try:
                self._await(meeting, line, keeper)
            finally:
                watch(keeper)
            reports = [meeting.reported[rank].report for rank in range(self._count)]
            for rank in range(self._count):
                try:
                    socket.send_fds(line, [CONNECTION], [meeting.reported[rank].line.fileno()])
                except OSError as error:
                    raise RuntimeError("the keeper of the job has ended; start it again") from error
        return [report.address for report in reports]

    def _listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket for the rendezvous, and the address for workers."""
        address = ChannelAddr.parse(self._address)
        host = address.host
        try:
            if host in _EVERYWHERE and socket.has_dualstack_ipv6():
                family = socket.AF_INET6
                listener = socket.create_server(("::", 0), family=family, dualstack_ipv6=True)
            else:
                found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
                listener = socket.create_server(found[4][:2], family=found[0])
        except OSError as error:
            text = f"cannot listen at {self._address}: {error.strerror or error}"
            raise RuntimeError(f"{text}; name an address of this machine") from error
        if host in _EVERYWHERE:
            host = own_name()
        port = listener.getsockname()[1]
        return listener, f"tcp://{f'[{host}]' if ':' in host else host}:{port}"

    def _keep(
        self, command: Sequence[str], line: socket.socket, where: str
    ) -> subprocess.Popen[bytes]:
        fds = [line.fileno(), *lock_of(self._folder)]
        told = [str(line.fileno()), self._folder, log_file(self._folder, 0), *command]
        environ = {
            **os.environ,
            **self._env,
            **self._variables(),
            SECRET_VARIABLE: Path(secret_file(self._folder)).read_text().strip(),
            RENDEZVOUS_VARIABLE: where,
            ADDRESS_VARIABLE: self._address,
        }
        keeper = subprocess.Popen(
            [*python_command(sys.executable, _KEEPER), *told],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            pass_fds=fds,
            start_new_session=True,
        )
        self._keeper = OsProcess.of(keeper.pid)
        return keeper

    def _await(
        self, meeting: Meeting, line: socket.socket, keeper: subprocess.Popen[bytes]
    ) -> None:
        """Wait until all workers have reported. Raises RuntimeError."""

        def text() -> str:
            return f"waiting for {meeting.lack()} that `{self._launcher[0]}` starts"

        deadline = time.monotonic() + self._limit
        with progress(text):
            while not meeting.complete:
                left = max(0.0, deadline - time.monotonic())
                ends = [meeting.fileno(), line.fileno()]
                ready = select.select(ends, [], [], min(left, _ROUND))[0]
                if meeting.fileno() in ready:
                    meeting.heard()
                if meeting.error:
                    raise RuntimeError(f"the job cannot start: {meeting.error}")
                if line.fileno() in ready:
                    raise RuntimeError(self._ended(keeper.wait(), meeting))
                if lost := self._ended_ranks():
                    raise RuntimeError(
                        f"the job cannot start: rank {', '.join(map(str, lost))} ended before all "
                        f"workers had reported{self._said()}"
                    )
                if not ready and left <= _ROUND:
                    raise RuntimeError(
                        f"the job did not start within {self._limit:g} s: there is no report of "
                        f"{meeting.lack()}{self._said()}"
                    )

    def _ended(self, status: int, meeting: Meeting) -> str:
        """Return the error text for a launcher that has ended too early."""
        return (
            f"the job cannot start: `{self._launcher[0]}` ended with status {status} before the "
            f"report of {meeting.lack()}{self._said()}"
        )

    def _said(self) -> str:
        """Return what the launcher has printed, on one line."""
        with contextlib.suppress(OSError), open(log_file(self._folder, 0), "rb") as log:
            if said := _gist(log.read(_MOST_LOG).decode(errors="replace")):
                return f"; it said: {said}"
        return ""

    # -- connecting and ending -------------------------------------------------------------------

    def _state(self) -> JobState:
        if lost := self._lost():
            raise RuntimeError(f"lost connection to the hosts: {lost}{self._last_words()}")
        secret = secret_file(self._folder)
        return JobState({mesh: attach_hosts(hosts, secret) for mesh, hosts in self._hosts.items()})

    def _kill(self) -> None:
        leave([address for hosts in self._hosts.values() for address in hosts])
        keeper, self._keeper = self._keeper, None
        still: list[OsProcess] = []
        if keeper is not None:
            keeper.send(signal.SIGTERM)
            lifeline.cut(self._folder)
            still = wait_for([keeper], _GRACE)
        if self._folder:
            remove_folder(self._folder)
        self._hosts = {}
        self._folder = ""
        if still:
            keeper_pid = still[0].pid
            still[0].send(signal.SIGKILL)
            raise RuntimeError(f"process {keeper_pid}, the keeper of the job, had to be killed")

    def _last_words(self) -> str:
        text = one_line(last_words(self._folder, 0))
        return f"; it said: {text}" if text else ""

    def _lost(self) -> str:
        """Return in words what has ended of a running job; an empty string if all of it runs."""
        if not self._alive():
            return f"`{self._launcher[0]}` ended"
        ended = self._ended_ranks()
        return f"the hosts of rank {', '.join(map(str, ended))} ended" if ended else ""

    def _alive(self) -> bool:
        return self._keeper is not None and self._keeper.alive

    def _ended_ranks(self) -> list[int]:
        return [n for n in range(self._count) if os.path.exists(ended_file(self._folder, n))]


LauncherJob.__module__ = "monarch.job"


def _gist(text: str) -> str:
    """Return a launcher's output on one line, without what is not worth reading.

    A worker that cannot serve says why in one line; the launcher may print much else.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip().strip("-=*#")]
    causes = [line[line.index(mark) :] for line in lines for mark in _MARKS if mark in line]
    joined = " | ".join(dict.fromkeys(causes or lines))
    return joined if len(joined) <= _MOST else f"{joined[: _MOST // 2]} ... {joined[-_MOST // 2 :]}"
