"""`ProcessJob`: each host is a process of this machine that runs a worker loop.

What several hosts are in every respect but the network: each has an agent of its own, and actors on
two of them talk through the links between hosts. So a program for many machines is tried on one.

The hosts listen on Unix sockets in a directory of the job, which nobody else may enter. There, too,
are the job's own secret, made for it and passed on by its path, and what each host printed. All of
it goes when the job is killed. The hosts outlive the script on purpose, so that the next one finds
them ready; a job that is not killed is ended by ``monarch kill``, or by the machine.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from monarch._spi import attach_hosts, end_job, keep_job, parse_duration
from monarch.actor import HostMesh, Reattached, job_id, reattach
from monarch.job.folder import last_words, log_file, make_folder, secret_file
from monarch.job.os_process import OsProcess, descendants, wait_for, watch
from monarch.job.saved import DEFAULT_JOB_PATH
from monarch.job.state import JobState, let_go
from monarch.job.trait import JobTrait, job_load

__all__ = ["ProcessJob", "hosts_from_config"]

_START_LIMIT = 60.0  # seconds until a host has to listen
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_HOST = (
    "import sys; sys.path.insert(0, sys.argv[3]); "
    "from monarch.job.process import serve; serve(sys.argv[1], int(sys.argv[2]))"
)


class ProcessJob(JobTrait):
    """Hosts that are processes of this machine.

    Args:
        meshes: how many hosts each mesh has.
        env: variables that the hosts, and all processes on them, have beyond this script's.
        grace: how long what a script has spawned outlives it ("10m"), so that the next one can
            `reattach`; None: not at all.

    >>> job = ProcessJob({"trainers": 2})
    >>> state = job.state(cached_path=None)
    >>> state.trainers
    <HostMesh {hosts: 2}>
    >>> job.kill()

    Starting blocks until every host listens, and raises RuntimeError with what a host said that
    could not start. The hosts go on when the script ends: see `JobTrait.state` and `kill`.
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
        for name, count in meshes.items():
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"meshes[{name!r}] must be a number of hosts, not {count!r}")
            if count < 1:
                raise ValueError(f"meshes[{name!r}] must be at least 1, not {count}")
        self._meshes = dict(meshes)
        self._env = dict(env or {})
        self._python = sys.version_info[:2]
        self._folder = ""
        self._hosts: dict[str, list[tuple[str, OsProcess]]] = {}  # address and process of each
        self._connected: list[HostMesh] = []

    def can_run(self, spec: JobTrait) -> bool:
        """Whether all hosts live, and `spec` asks for the same meshes, variables and Python."""
        return (
            isinstance(spec, ProcessJob)
            and (self._meshes, self._env, self._python) == (spec._meshes, spec._env, spec._python)
            and bool(self._hosts)
            and not self._dead()
        )

    def reattach(self, cached_path: str = DEFAULT_JOB_PATH) -> Reattached:
        """Take over what the last script of this job has left, within its period of grace.

        Args:
            cached_path: where that script's `state` wrote the job.

        To be called before `state`, which connects to the same hosts again. Raises LookupError if
        nothing was left, and as `monarch.actor.reattach` and `job_load`.
        """
        saved = self._running_as() if self.active else job_load(cached_path)
        if not isinstance(saved, ProcessJob) or saved.apply_id is None:
            raise LookupError(f"{cached_path} is no running ProcessJob")
        if not os.path.exists(secret_file(saved._folder)):
            raise LookupError(f"the job of {cached_path} was killed")
        workers = [address for hosts in saved._hosts.values() for address, _ in hosts]
        return reattach(saved.apply_id, workers=workers, secret_file=secret_file(saved._folder))

    # -- life ------------------------------------------------------------------------------------

    def _connect(self) -> JobState:
        state = super()._connect()
        saved = self._running_as()
        if self._grace and isinstance(saved, ProcessJob) and saved.apply_id is not None:
            keep_job(saved.apply_id, self._grace, secret_file(saved._folder))
        return state

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("ProcessJob cannot run batch-mode scripts; LocalJob can")
        self._folder = make_folder("monarch_process_job_")
        started: list[tuple[str, str, subprocess.Popen[bytes], int]] = []
        try:
            for mesh, count in self._meshes.items():
                for rank in range(count):
                    started.append((mesh, *self._start(f"{mesh}_{rank}", len(started))))
                    _, address, process, _ = started[-1]
                    host = address, OsProcess.of(process.pid)
                    self._hosts.setdefault(mesh, []).append(host)
            for number, (_, _, _, ready) in enumerate(started):
                self._await(number, ready)
        except BaseException:
            self._kill()
            raise
        finally:
            for *_, process, ready in started:
                os.close(ready)
                watch(process)

    def _start(self, name: str, number: int) -> tuple[str, subprocess.Popen[bytes], int]:
        """Start a host: its address, its process, and what can be read from once it listens."""
        address = f"ipc://{self._folder}/{number}"
        ready, theirs = os.pipe()
        environ = {
            **os.environ,
            **self._env,
            "HYPERACTOR_PROCESS_NAME": name,
            "MONARCH_JOB_SECRET_FILE": secret_file(self._folder),
        }
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        try:
            with open(log_file(self._folder, number), "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-c", _HOST, address, str(theirs), root],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    pass_fds=[theirs],
                    start_new_session=True,
                )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(theirs)
        return address, process, ready

    def _await(self, number: int, ready: int) -> None:
        """Wait until a host listens."""
        if not select.select([ready], [], [], _START_LIMIT)[0]:
            why = f"did not listen within {_START_LIMIT:g} s"
        elif os.read(ready, 1):
            return
        else:
            why = "ended before it listened"
        raise RuntimeError(f"host {number} of the job {why}{self._last_words(number)}")

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
        self._connected += meshes.values()
        return JobState(meshes)

    def _kill(self) -> None:
        let_go(self._connected)
        if self._apply_id not in (None, job_id()):
            with contextlib.suppress(LookupError, RuntimeError, TimeoutError):  # nobody was kept
                end_job(str(self._apply_id), secret_file(self._folder))
        processes = [process for hosts in self._hosts.values() for _, process in hosts]
        below = descendants(processes)
        for process in processes:
            process.send(signal.SIGTERM)
        left = wait_for([*processes, *below], _GRACE)
        left += [process for process in descendants(left) if process not in left]
        for process in left:
            process.send(signal.SIGKILL)
        still = wait_for(left, _GRACE)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._hosts = {}
        self._folder = ""
        if still:
            raise RuntimeError(f"these processes do not end: {[p.pid for p in still]}")

    # -- what is known of the hosts --------------------------------------------------------------

    def _dead(self) -> list[tuple[int, str, OsProcess]]:
        hosts = [(mesh, process) for mesh, hosts in self._hosts.items() for _, process in hosts]
        return [(n, mesh, host) for n, (mesh, host) in enumerate(hosts) if not host.alive]

    def _last_words(self, number: int) -> str:
        text = last_words(self._folder, number)
        return f"; it said:\n{text}" if text else ""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_connected": []}


ProcessJob.__module__ = "monarch.job"


def hosts_from_config(name: str) -> HostMesh:
    """Two hosts of this machine, as a mesh: for examples. They end with the script.

    No configuration is read; `name` is for people. Use a job for anything else.
    """
    job = ProcessJob({name: 2})
    job.apply()
    atexit.register(job.kill)
    mesh: HostMesh = getattr(job.state(cached_path=None), name)
    return mesh


def serve(address: str, ready: int) -> None:
    """Be a host: the main function of its process."""
    from monarch._spi import serve_host

    def listening(_url: str) -> None:
        os.write(ready, b"1")
        os.close(ready)

    serve_host(address, listening)
