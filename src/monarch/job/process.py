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
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from monarch._spi import attach_hosts
from monarch.actor import HostMesh
from monarch.job.os_process import OsProcess, descendants, wait_for
from monarch.job.state import JobState
from monarch.job.trait import JobTrait

__all__ = ["ProcessJob", "hosts_from_config"]

_log = logging.getLogger("monarch.job")
_START_LIMIT = 60.0  # seconds until a host has to listen
_LET_GO = 10.0  # seconds for actors that this script has there
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_LONGEST_PATH = 100  # of a Unix socket: systems differ between 104 and 108
_HOST = (
    "import sys; sys.path.insert(0, sys.argv[3]); "
    "from monarch.job.process import serve; serve(sys.argv[1], int(sys.argv[2]))"
)


class ProcessJob(JobTrait):
    """Hosts that are processes of this machine.

    Args:
        meshes: how many hosts each mesh has.
        env: variables that the hosts, and all processes on them, have beyond this script's.

    >>> job = ProcessJob({"trainers": 2})
    >>> state = job.state(cached_path=None)
    >>> state.trainers
    <HostMesh {hosts: 2}>
    >>> job.kill()

    Starting blocks until every host listens, and raises RuntimeError with what a host said that
    could not start. The hosts go on when the script ends: see `JobTrait.state` and `kill`.
    """

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        super().__init__()
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

    # -- life ------------------------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("ProcessJob cannot run batch-mode scripts; LocalJob can")
        self._folder = _make_folder()
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
                # Waits for its end, so that it is no zombie, and says so.
                thread = threading.Thread(
                    target=_watch, args=(process,), name="monarch-job-watch", daemon=True
                )
                thread.start()

    def _start(self, name: str, number: int) -> tuple[str, subprocess.Popen[bytes], int]:
        """Start a host: its address, its process, and what can be read from once it listens."""
        address = f"ipc://{self._folder}/{number}"
        ready, theirs = os.pipe()
        environ = {
            **os.environ,
            **self._env,
            "HYPERACTOR_PROCESS_NAME": name,
            "MONARCH_JOB_SECRET_FILE": self._secret_file,
        }
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        try:
            with open(self._log_file(number), "wb") as log:
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
            mesh: attach_hosts([address for address, _ in hosts], self._secret_file)
            for mesh, hosts in self._hosts.items()
        }
        self._connected += meshes.values()
        return JobState(meshes)

    def _kill(self) -> None:
        self._let_go()
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

    def _let_go(self) -> None:
        """Stop what this script has on the hosts, so that their end is no failure to it."""
        meshes, self._connected = self._connected, []

        def run() -> None:
            for leaving in [mesh.stop() for mesh in meshes]:
                try:
                    leaving.get(timeout=_LET_GO)
                except TimeoutError:
                    _log.warning("actors did not stop within %g s; they are killed", _LET_GO)

        if meshes:  # aside: the caller may be on an event loop, and waits either way
            thread = threading.Thread(target=run, name="monarch-job-kill")
            thread.start()
            thread.join()

    # -- what is known of the hosts --------------------------------------------------------------

    @property
    def _secret_file(self) -> str:
        return os.path.join(self._folder, "secret")

    def _log_file(self, number: int) -> str:
        return os.path.join(self._folder, f"{number}.log")

    def _dead(self) -> list[tuple[int, str, OsProcess]]:
        hosts = [(mesh, process) for mesh, hosts in self._hosts.items() for _, process in hosts]
        return [(n, mesh, host) for n, (mesh, host) in enumerate(hosts) if not host.alive]

    def _last_words(self, number: int) -> str:
        try:
            with open(self._log_file(number), "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 2000))
                text = file.read().decode(errors="replace").strip()
        except OSError:
            return ""
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


def _make_folder() -> str:
    """A directory for the sockets, secret and logs of one job (mode 0700)."""
    folder = tempfile.mkdtemp(prefix="monarch_process_job_")
    if len(folder) > _LONGEST_PATH - 8:  # no socket can be called that
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="monarch_process_job_", dir="/tmp")
    fd = os.open(os.path.join(folder, "secret"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return folder


def _watch(process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    if status not in (0, -signal.SIGTERM):
        _log.warning("worker process %d of a job ended with status %d", process.pid, status)
