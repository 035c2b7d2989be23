"""`ProcessJob`: each host is a process of this machine that runs a worker loop.

Such hosts behave like separate machines in every respect but the network: each has an agent of its
own, and actors on two of them communicate through links between hosts. So a program for many
machines can be tried on one.

The hosts listen on Unix sockets in a directory of the job that only this user may enter. The
directory also holds the job's own secret, which is passed on by its path only, and the output of
each host. The directory is removed when the job is killed.

The hosts outlive the script on purpose, so that the next script finds them ready. A job that its
script does not kill runs until ``monarch kill`` or a shutdown of the machine.

As long as no other script can find the hosts, they end with this script, however it ends
(`lifeline`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from monarch._failover.handles import end_job, is_kept, keep_job
from monarch._spi import (
    attach_hosts,
    parse_duration,
    python_command,
    renounce,
    start_thread,
)
from monarch.actor import HostMesh, Reattached, job_id, reattach
from monarch.job import lifeline
from monarch.job.folder import (
    last_words,
    lock_of,
    log_file,
    make_folder,
    proc_logs,
    remove_folder,
    remove_stale,
    secret_file,
)
from monarch.job.host_log import keep_small
from monarch.job.host_state import HostState
from monarch.job.os_process import OsProcess, descendants, wait_for, watch
from monarch.job.saved import DEFAULT_JOB_PATH
from monarch.job.state import JobState, leave
from monarch.job.trait import JobTrait, changes, check_meshes, job_load

__all__ = ["ProcessJob", "hosts_from_config"]

_START_LIMIT = 60.0  # seconds within which a host has to listen
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_PREFIX = "monarch-process-job-"
_LOG_DIR = "MONARCH_LOG_DIR"
_HOST = "from monarch.job.process import serve; serve(sys.argv[1], *map(int, sys.argv[2:]))"


class ProcessJob(JobTrait):
    """Hosts that are processes of this machine.

    Args:
        meshes: how many hosts each mesh has.
        env: environment variables of the hosts, and of all processes on them, in addition to this
            script's.
        grace: how long ("10m") the processes that a script spawned outlive it, so that the next
            script can `reattach`; None: they end with the script.

    >>> job = ProcessJob({"trainers": 2})
    >>> state = job.state(cached_path=None)
    >>> state.trainers
    <HostMesh {hosts: 2}>
    >>> job.kill()

    Starting blocks until every host listens. If a host cannot start, RuntimeError shows the end of
    its output. The hosts keep running when the script ends: see `JobTrait.state` and `kill`.
    """

    _grace = 0.0  # seconds

    def __init__(
        self,
        meshes: Mapping[str, int],
        env: Mapping[str, str] | None = None,
        *,
        grace: str | None = None,
    ) -> None:
        super().__init__()
        self._grace = 0.0 if grace is None else parse_duration(grace) / 1e9
        check_meshes(meshes)
        self._meshes = {str(name): int(count) for name, count in meshes.items()}
        self._env = dict(env or {})
        self._python = sys.version_info[:2]
        self._folder = ""
        self._hosts: dict[str, list[tuple[str, OsProcess]]] = {}  # address and process of each

    def can_run(self, spec: JobTrait) -> bool:
        """Whether all hosts run, and `spec` asks for the same meshes, variables and Python."""
        return (
            isinstance(spec, ProcessJob)
            and (self._meshes, self._env, self._python) == (spec._meshes, spec._env, spec._python)
            and bool(self._hosts)
            and not self._dead()
        )

    def _differs(self, spec: JobTrait) -> str:
        if not isinstance(spec, ProcessJob):
            return f"{type(self).__name__} -> {type(spec).__name__}"
        told = changes("meshes", self._meshes, spec._meshes)
        names = self._env.keys() | spec._env.keys()
        if other := sorted(name for name in names if self._env.get(name) != spec._env.get(name)):
            told.append(f"variables: other {', '.join(other)}")  # names only: a value may be secret
        if self._python != spec._python:
            told.append("Python: {}.{} -> {}.{}".format(*self._python, *spec._python))
        if dead := self._dead():
            told.append(f"{len(dead)} of its hosts ended")
        return "; ".join(told)

    def _check_saved(self) -> None:
        super()._check_saved()
        hosts = [host for hosts in self._hosts.values() for host in hosts]
        if [kind for host in hosts for kind in map(type, host)] != [str, OsProcess] * len(hosts):
            raise ValueError("_hosts has other items than addresses and processes")

    def _is_kept(self) -> bool:
        if not self._grace or self.apply_id in (None, job_id()):  # (the job may be this script's)
            return False
        return is_kept(str(self.apply_id))

    def reattach(self, cached_path: str = DEFAULT_JOB_PATH) -> Reattached:
        """Take over the processes that the last script of this job left, within the grace period.

        Args:
            cached_path: where that script's `state` wrote the job.

        Call this before `state`, which connects to the same hosts again. Raises LookupError if
        nothing was left, and the errors of `monarch.actor.reattach` and `job_load`.
        """
        saved = self._running_as() if self.active else job_load(cached_path)
        if not isinstance(saved, ProcessJob) or saved.apply_id is None:
            raise LookupError(f"{cached_path} is no running ProcessJob")
        if not os.path.exists(secret_file(saved._folder)):
            raise LookupError(f"the job of {cached_path} was killed")
        workers = [address for hosts in saved._hosts.values() for address, _ in hosts]
        return reattach(saved.apply_id, workers=workers, secret_file=secret_file(saved._folder))

    # -- starting, connecting and ending ---------------------------------------------------------

    def _connect(self) -> JobState:
        state = super()._connect()
        saved = self._running_as()
        if self._grace and isinstance(saved, ProcessJob) and saved.apply_id is not None:
            keep_job(saved.apply_id, self._grace, secret_file(saved._folder))
        return state

    def _should_spawn_telemetry_worker_collector_actors(self) -> bool:
        return False

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("ProcessJob cannot run batch-mode scripts; LocalJob can")
        remove_stale(_PREFIX)
        self._folder = make_folder(_PREFIX)
        started: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        try:
            for mesh, count in self._meshes.items():
                for rank in range(count):
                    address, process, line = self._start(f"{mesh}_{rank}", len(started))
                    started.append((process, line))
                    self._hosts.setdefault(mesh, []).append((address, OsProcess.of(process.pid)))
            for number, (_, line) in enumerate(started):
                self._await(number, line)
        except BaseException:
            self._kill()
            raise
        finally:
            for process, _ in started:
                watch(process)

    def _start(self, name: str, number: int) -> tuple[str, subprocess.Popen[bytes], socket.socket]:
        """Start a host. Return its address, its process, and this script's end of its lifeline.

        The host sends a byte on the lifeline once it listens.
        """
        address = f"ipc://{self._folder}/{number}"
        line, theirs = lifeline.add(self._folder)
        fds = [theirs.fileno(), *lock_of(self._folder)]
        environ = {
            **os.environ,
            **self._env,
            _LOG_DIR: self._proc_logs(),
            "HYPERACTOR_PROCESS_NAME": name,
            "MONARCH_JOB_SECRET_FILE": secret_file(self._folder),
        }
        try:
            with open(log_file(self._folder, number), "ab") as log:  # see `host_log`
                process = subprocess.Popen(
                    [*python_command(sys.executable, _HOST), address, *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    pass_fds=fds,
                    start_new_session=True,
                )
        finally:
            theirs.close()
        return address, process, line

    def _await(self, number: int, line: socket.socket) -> None:
        """Wait until a host listens. Raises RuntimeError if the host exits or takes too long."""
        if not select.select([line], [], [], _START_LIMIT)[0]:
            why = f"did not listen within {_START_LIMIT:g} s"
        elif _said(line):
            return
        else:
            why = "ended before it listened"
        raise RuntimeError(f"host {number} of the job {why}{self._last_words(number)}")

    def _replace_host(self, address: str) -> str:
        """Start a host in the place of a lost one, at the same address; end what is left of it."""
        places = [(mesh, rank) for mesh, hosts in self._hosts.items() for rank in range(len(hosts))]
        known = [self._hosts[mesh][rank][0] for mesh, rank in places]
        if address not in known:
            raise ValueError(f"the job has no host at {address}; its hosts are {', '.join(known)}")
        number = known.index(address)
        mesh, rank = places[number]
        old = self._hosts[mesh][rank][1]
        left = [*descendants([old]), old]
        for process in left:
            process.send(signal.SIGKILL)
        if wait_for(left, _GRACE):
            raise RuntimeError(f"host {number} of the job does not end (pid {old.pid})")
        stays = not lifeline.is_held(self._folder)  # the hosts outlive this script
        address, started, line = self._start(f"{mesh}_{rank}", number)
        self._hosts[mesh][rank] = (address, OsProcess.of(started.pid))
        try:
            self._await(number, line)
        finally:
            watch(started)
            if stays:
                lifeline.release(self._folder)
        return address

    def _state(self) -> JobState:
        dead = self._dead()
        if dead:
            number, mesh, process = dead[0]
            raise RuntimeError(
                f"lost connection to worker processes: {len(dead)} of them ended, the first of "
                f"mesh {mesh!r} (pid {process.pid}){self._last_words(number)}"
            )
        meshes = {
            mesh: attach_hosts([address for address, _ in hosts], secret_file(self._folder))
            for mesh, hosts in self._hosts.items()
        }
        return JobState(meshes)

    def _kill(self) -> None:
        leave([address for hosts in self._hosts.values() for address, _ in hosts])
        if self._apply_id == job_id():
            renounce()
        elif self._apply_id is not None:
            with contextlib.suppress(LookupError, RuntimeError, TimeoutError):  # nothing was kept
                end_job(str(self._apply_id), secret_file(self._folder))
        processes = [process for hosts in self._hosts.values() for _, process in hosts]
        below = descendants(processes)
        for process in processes:
            process.send(signal.SIGTERM)
        lifeline.cut(self._folder)
        left = wait_for([*processes, *below], _GRACE)
        left += [process for process in descendants(left) if process not in left]
        for process in left:
            process.send(signal.SIGKILL)
        still = wait_for(left, _GRACE)
        if self._folder:
            remove_folder(self._folder)
        self._hosts = {}
        self._folder = ""
        if still:
            raise RuntimeError(f"these processes do not end: {[p.pid for p in still]}")

    # -- the state of the hosts ------------------------------------------------------------------

    def _host_states(self) -> list[HostState]:
        hosts = [
            (mesh, rank, process)
            for mesh, hosts in self._hosts.items()
            for rank, (_, process) in enumerate(hosts)
        ]
        return [
            HostState(
                mesh, rank, f"process {process.pid}", process.alive, log_file(self._folder, n)
            )
            for n, (mesh, rank, process) in enumerate(hosts)
        ]

    def _proc_logs(self) -> str:
        default = os.environ.get(_LOG_DIR, proc_logs(self._folder))
        return self._env.get(_LOG_DIR, default)

    def _dead(self) -> list[tuple[int, str, OsProcess]]:
        hosts = [(mesh, process) for mesh, hosts in self._hosts.items() for _, process in hosts]
        return [(n, mesh, host) for n, (mesh, host) in enumerate(hosts) if not host.alive]

    def _last_words(self, number: int) -> str:
        text = last_words(self._folder, number)
        return f"; it said:\n{text}" if text else ""


ProcessJob.__module__ = "monarch.job"


def _said(line: socket.socket) -> bytes:
    try:
        return line.recv(1)
    except ConnectionResetError:  # the host exited
        return b""


def hosts_from_config(name: str) -> HostMesh:
    """Return a mesh of two hosts of this machine, for examples. The hosts end with the script.

    No configuration is read; `name` is only a label. Use a job for anything else. Blocks until the
    hosts listen.
    """
    job = ProcessJob({name: 2})
    job.apply()
    atexit.register(job.kill)
    mesh: HostMesh = getattr(job.state(cached_path=None), name)
    return mesh


def serve(address: str, fd: int, *lock: int) -> None:
    """Run a host until it is ended: the main function of a host's process.

    `fd` is the host's end of the lifeline. `lock` is the descriptor that holds the lock of the
    job's directory.
    """
    from monarch.job.host import serve_host

    path = address.removeprefix("ipc://")
    line = socket.socket(fileno=fd)
    for one in (fd, *lock):
        os.set_inheritable(one, False)
    alone = False

    def hold_on() -> None:
        nonlocal alone
        if lifeline.outlived(line):
            alone = True
            os.kill(os.getpid(), signal.SIGTERM)

    def listening(_url: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the script has exited
            line.send(b"1")
        start_thread("monarch-lifeline", hold_on)

    stop = threading.Event()
    log = log_file(os.path.dirname(path), int(os.path.basename(path)))
    start_thread("monarch-host-log", lambda: keep_small([log], stop))
    try:
        serve_host(address, listening)
    finally:
        stop.set()
    if alone:  # the script exited without removing the directory
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)
