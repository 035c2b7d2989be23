"""`JobTrait`: the base class of all kinds of jobs.

A job is a *description* of hosts and, once applied, the facts about its *allocation*: process
numbers and addresses. Both are attributes, which are saved as JSON (`format`), and connections are
not. So another script that loads the job can connect to the same hosts.

A script does not load the job itself. The script describes the job that it wants and asks for its
`state`. If the job saved in the file (`cached_path`) runs and fits the description, that job is
used; otherwise a new job is started and saved there. So the second run of a script finds its hosts
ready.

A kind of job implements how hosts are started and ended (`_create`, `_kill`), how to connect to
them (`_state`), and whether a saved job may serve a description (`can_run`). It never touches
`_status`.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch._spi import revoke
from monarch.job import lifeline
from monarch.job.component import Component, connected, end_all
from monarch.job.folder import secret_file
from monarch.job.format import decode, encode
from monarch.job.host_state import HostState
from monarch.job.mounts import GatherMountOption, names_of, remote_mount_option
from monarch.job.saved import DEFAULT_JOB_PATH, locked, read, remove, write
from monarch.job.state import JobState
from monarch.job.users import User, has_joined, join, part, users

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch._store.client import QueryEngineClient
    from monarch._traces.recording import profile
    from monarch.job.mesh_admin import MeshAdminConfig
    from monarch.job.telemetry import TelemetryConfig

__all__ = ["JobTrait", "changes", "check_meshes", "job_load", "job_loads"]

_log = logging.getLogger("monarch.job")
_NOT_RUNNING = "not_running"
_RUNNING = "running"


class JobTrait(ABC):
    """A description of hosts, and their allocation.

    The kinds of jobs are its subclasses, such as `LocalJob`, `ProcessJob` and `SSHJob`.

    >>> job = LocalJob(("trainers", "generators"))
    >>> state = job.state(cached_path=None)
    >>> state.trainers, job.active
    (<HostMesh {}>, True)
    >>> job.kill()
    >>> job.active
    False

    A subclass implements `_create(client_script)`, `_state()`, `can_run(spec)` and `_kill()`; the
    methods below call them.
    """

    _status: str | JobTrait = _NOT_RUNNING  # or the saved job that serves this description
    _apply_id: str | None = None
    _since: float | None = None  # when it was applied, in seconds since 1970; shown to people
    _folder = ""  # the allocation's directory on this machine, if any; users are listed there
    _components: tuple[Component, ...] = ()

    # -- for programs ----------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the job was applied, or runs as a saved job.

        The hosts are not checked: they may have exited since.
        """
        return self._status != _NOT_RUNNING

    @property
    def apply_id(self) -> str | None:
        """A name for the current allocation; None before `apply`. It is saved with the job."""
        return self._running_as()._apply_id

    def apply(self, client_script: str | None = None) -> None:
        """Start the job, unless it runs already. Blocks until the hosts were requested.

        Args:
            client_script: a program to start beside the job, as its client (batch mode). Kinds of
                jobs without a batch mode raise RuntimeError.
        """
        if self.active:
            return
        self._apply_id = str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
        try:
            self._create(client_script)
        except BaseException:
            self._apply_id = None
            raise
        self._since = time.time()  # noqa: TID251 - shown to people
        self._status = _RUNNING

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH) -> JobState:
        """Return the host meshes of the job, connected; start the job if necessary.

        Args:
            cached_path: the file where the job is saved for the next script. A saved job that runs
                and `can_run` this description is used. A saved job that cannot is killed and
                replaced, with a message on stderr, unless another script uses it. None: no file is
                read or written, and the job ends with this script.

        Each call returns new meshes. Blocks while the job starts, and while another script is
        between reading and writing the same file. Raises RuntimeError when the job cannot be
        started or was lost, and when the file holds a different job that another script uses;
        PermissionError and ValueError like `job_load`.
        """
        if self.active:
            _log.info("Job is running, returning current state")
            self._join()
            return self._connect()
        if cached_path is None:
            _log.info("No cached path provided")
            self.apply()
            self._join()
            return self._connect()
        with locked(cached_path):
            saved = self._saved(cached_path)
            if saved is not None:
                saved._rebind_connection_inputs(self)
                if saved._components != self._components:
                    saved._components = self._components
                    saved.dump(cached_path)
                self._status = saved
            else:
                self.apply()
                try:
                    self.dump(cached_path)
                except BaseException:  # no other script could find the job
                    self.kill()
                    raise
            self._join()  # under the lock: the next script then sees this one as a user
        return self._connect()

    def kill(self) -> None:
        """End the job and everything that runs on its hosts. Blocks until all of it has exited.

        Does nothing if the job does not run. The file that `state` wrote stays: a script that finds
        a dead job there starts a new one.
        """
        if not self.active:
            return
        job = self._running_as()
        part(job._folder)
        end_all(job, job._components)
        if job._folder:
            revoke(secret_file(job._folder))  # other scripts that use the hosts have not lost them
        job._kill()
        self._status = _NOT_RUNNING

    def replace_host(self, address: str) -> str:
        """Replace a host of the running job that was lost; return the address of its new worker.

        Args:
            address: the address of the worker that was lost. Its remaining processes are ended.

        A `Supervisor` that was given the job as its `spares` calls this. Blocks until the new
        worker listens. A job that was saved before has to be saved again. Raises RuntimeError if no
        host can be started, ValueError if the job has no host at the address, and
        NotImplementedError for kinds of jobs that cannot replace a host.
        """
        if not self.active:
            raise RuntimeError("the job does not run: it has no hosts to replace")
        return self._running_as()._replace_host(address)

    def dump(self, filename: str) -> None:
        """Write the job to a file, for `job_load`. Create its directory, and follow a link.

        A running job that was written no longer ends with this script. Raises TypeError for an
        attribute that cannot be saved, with its name, and ValueError for a class that another
        script could not find.
        """
        write(filename, self._encoded())
        lifeline.release(self._running_as()._folder)

    def dumps(self) -> bytes:
        """Return the job and the facts of its allocation as bytes, for `job_loads`.

        They are JSON. As after `dump`, a running job no longer ends with this script, and the same
        errors are raised.
        """
        data = self._encoded()
        lifeline.release(self._running_as()._folder)
        return data

    def remote_mount(
        self,
        source: str,
        mntpoint: str | None = None,
        meshes: Iterable[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
    ) -> None:
        """Declare that the hosts see a directory of this machine, from the next `state` on.

        Args:
            source: the directory. It is read-only there; see `monarch.remotemount`.
            mntpoint: where it appears on the hosts; None: at the same path.
            meshes: the names of the meshes whose hosts see it; None: all.
            python_exe: an interpreter below the directory, which the processes on those meshes run;
                None: they run the one that they would run without this.

        Each further `state` shows the changes that were made meanwhile. The mount ends with this
        script, or with `kill`. Raises ValueError if there is no such directory or interpreter.
        `state` raises the errors of `monarch.remotemount`.
        """
        self._add_component(remote_mount_option(source, mntpoint, meshes, python_exe))

    def gather_mount(
        self,
        remote_mount_point: str,
        local_mount_point: str,
        meshes: Iterable[str] | None = None,
    ) -> None:
        """Declare that a directory of each host appears on this machine, from the next `state` on.

        Args:
            remote_mount_point: the directory on the hosts; ``$SUBDIR`` stands for the coordinates
                of a host.
            local_mount_point: where the hosts' directories appear, as ``hosts_0`` and so on.
            meshes: the names of the meshes; None: all. Several meshes have a directory each.

        The mount ends with this script, or with `kill`. `state` raises the errors of
        `monarch.gather_mount`.
        """
        option = GatherMountOption(remote_mount_point, local_mount_point, names_of(meshes))
        self._add_component(option)

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether this (saved) job runs and may serve the description `spec`."""

    # -- for subclasses --------------------------------------------------------------------------

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Allocate the hosts, and keep the facts about them in attributes."""

    @abstractmethod
    def _state(self) -> JobState:
        """Connect to the hosts. Raises RuntimeError when a host was lost."""

    @abstractmethod
    def _kill(self) -> None:
        """Release the hosts, in whatever state they are; also called after a failed `_create`."""

    def _replace_host(self, address: str) -> str:
        """See `replace_host`."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot replace a lost host: give the Supervisor spare hosts, "
            "as a mesh of their own in this job"
        )

    def _differs(self, spec: JobTrait) -> str:
        """Return in a few words why `can_run` is False for `spec`."""
        return "it cannot run what this script describes"

    def _is_running(self) -> bool:
        """Whether the hosts still run."""
        return self.can_run(self)

    def _rebind_connection_inputs(self, spec: JobTrait) -> None:
        """Take what is not saved, such as credentials, from `spec`, which this saved job serves."""
        return

    def _prepare_client_gateway(self) -> None:
        """Prepare this script's way to the hosts. Called before each `_state`."""
        return

    def _requires_sidecar_gateway(self) -> bool:
        """Whether processes beside this script need a way of their own to the hosts."""
        return False

    def _should_spawn_telemetry_worker_collector_actors(self) -> bool:
        """Whether the hosts are other machines, so that telemetry has to collect events there."""
        return True

    def _cleanup_log_context(self) -> Mapping[str, object]:
        """Return the names that a scheduler has for the allocation, for log messages."""
        return {}

    def _host_states(self) -> Sequence[HostState]:
        """Return how each host is, for ``monarch status`` and ``logs``; none if unknown."""
        return []

    def _proc_logs(self) -> str:
        """Return the directory on this machine with the output of each process; empty: none."""
        return ""

    def _add_component(self, component: Component) -> None:
        """Add a component. It replaces one of the same class, unless that allows several."""
        kept = [
            one for one in self._components if type(one) is not type(component) or component.several
        ]
        self._components = (*kept, component)

    # -- implementation --------------------------------------------------------------------------

    def _check_saved(self) -> None:
        """Check the attributes of this class after they were read from a file."""
        if self._status not in (_NOT_RUNNING, _RUNNING):
            raise ValueError(f"_status is {self._status!r}")
        if not (self._apply_id is None or isinstance(self._apply_id, str)):
            raise ValueError(f"_apply_id is {self._apply_id!r}")
        if not (self._since is None or type(self._since) is float):
            raise ValueError(f"_since is {self._since!r}")
        if type(self._folder) is not str:
            raise ValueError(f"_folder is {self._folder!r}")
        if not all(isinstance(one, Component) for one in self._components):
            raise ValueError(f"_components is {self._components!r}")

    def _running_as(self) -> JobTrait:
        return self._status if isinstance(self._status, JobTrait) else self

    def _encoded(self) -> bytes:
        job = self._running_as()
        return encode(type(job), job.__getstate__(), lambda value: isinstance(value, JobTrait))

    def _join(self) -> None:
        """Register this script as a user of the job, so that no other script replaces the job."""
        folder = self._running_as()._folder
        if os.path.isdir(folder):  # without it the job was lost, and `_state` raises
            join(folder)

    def _connect(self) -> JobState:
        return connected(self._running_as(), self._components)

    def _saved(self, path: str) -> JobTrait | None:
        """Return the job of this file if it can run this description; otherwise end that job.

        Raises RuntimeError if another script uses that job, or its state is kept for `reattach`.
        """
        try:
            saved = job_load(path)
        except FileNotFoundError:
            _log.info("No cached job found at path: %s", path)
            return None
        if not saved.active:
            return None
        if saved.can_run(self):
            _log.info("Connecting to cached job")
            return saved
        _log.info("Cached job cannot run this spec, removing cache")
        why = saved._differs(self)
        using = users(saved._folder)
        alone = has_joined(saved._folder) and len(using) == 1  # a notebook describes it anew
        if (using and not alone) or saved._is_kept():
            raise RuntimeError(_in_use(path, using, why))
        if why:
            who = "only this script" if alone else "no script"
            sys.stderr.write(
                f"monarch: the job of {path}, which {who} uses, is killed and replaced: {why}\n"
            )
        part(saved._folder)
        end_all(saved, saved._components)
        try:
            saved._kill()
        except Exception:
            names = ", ".join(f"{key} {it}" for key, it in saved._cleanup_log_context().items())
            _log.exception(
                "could not end the job of %s%s; its processes may still run",
                path,
                f" ({names})" if names else "",
            )
        remove(path)
        return None

    def _is_kept(self) -> bool:
        """Whether the last script left processes that wait for the next one, see `reattach`."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    # -- observability ----------------------------------------------------------------------------

    def enable_telemetry(
        self,
        config: TelemetryConfig | None = None,
        *,
        mesh_admin_config: MeshAdminConfig | None = None,
        **kwargs: Any,
    ) -> Self:
        """Record what the job does, for SQL; return the job. Call it before `state`.

        Args:
            config: what is recorded; by default a `TelemetryConfig` of the keyword arguments.
            mesh_admin_config: where the admin API is served; by default as `enable_admin` does,
                if its extra is installed.

        `JobState.query_engine_client` answers queries then, and ``monarch query`` in a terminal.
        Raises TypeError for unknown options, and for a configuration beside options.
        """
        from monarch.job.telemetry import TelemetryConfig

        if config is not None and kwargs:
            raise TypeError(
                f"enable_telemetry: give a TelemetryConfig or its options, not both ({[*kwargs]})"
            )
        self._add_component(TelemetryConfig(**kwargs) if config is None else config)
        if mesh_admin_config is not None:
            self.enable_admin(mesh_admin_config)
        return self

    def enable_admin(self, config: MeshAdminConfig | None = None, **kwargs: Any) -> Self:
        """Serve the admin API: what processes and actors do, by HTTP; return the job.

        Args:
            config: where; by default a `MeshAdminConfig` of the keyword arguments.

        Call it before `state`, whose `JobState.admin_url` is the address, with the key in it. Needs
        the extra ``[admin]``; without it there is a warning, and the address is None. Raises
        TypeError for unknown options, and for a configuration beside options.
        """
        from monarch.job.mesh_admin import MeshAdminConfig

        if config is not None and kwargs:
            raise TypeError(
                f"enable_admin: give a MeshAdminConfig or its options, not both ({[*kwargs]})"
            )
        self._add_component(MeshAdminConfig(**kwargs) if config is None else config)
        return self

    def profile(self, *, on_trace_ready: Callable[[profile], object] | None = None) -> profile:
        """Return a context manager: what all processes of the job do in its block, as a trace.

        Args:
            on_trace_ready: called with it once the block has ended.

        ``with job.profile() as profiled: ...``, and then ``profiled.export_perfetto_trace()``.
        Raises RuntimeError if the job records no telemetry, or was not started.
        """
        from monarch._traces.recording import profile
        from monarch.job.telemetry import TelemetryConfig, query_client

        if not any(isinstance(one, TelemetryConfig) for one in self._components):
            raise RuntimeError(
                "profile requires distributed telemetry; call enable_telemetry() before state()"
            )
        if not self.active:
            raise RuntimeError("the job is not active; call job.state() before job.profile()")
        return profile(query_client([os.getpid()])._url, on_trace_ready=on_trace_ready)

    def telemetry_query_client(self) -> QueryEngineClient:
        """Return a client for SQL about the running job, without connecting to its hosts.

        Raises RuntimeError if the job is not active, or no script that uses it records telemetry.
        """
        from monarch.job.telemetry import TelemetryConfig, query_client

        if not self.active:
            raise RuntimeError("the saved job is not active; call state()")
        job = self._running_as()
        if not any(isinstance(one, TelemetryConfig) for one in job._components):
            raise RuntimeError(
                "the job has no distributed telemetry configured; call enable_telemetry() before "
                "state()"
            )
        return query_client([os.getpid(), *(user.pid for user in users(job._folder))])


JobTrait.__module__ = "monarch.job"


def check_meshes(meshes: Mapping[str, int]) -> None:
    """Check the number of hosts of each mesh. Raises TypeError and ValueError."""
    for name, count in meshes.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"meshes[{name!r}] must be a number of hosts, not {count!r}")
        if count < 1:
            raise ValueError(f"meshes[{name!r}] must be at least 1, not {count}")


def changes(what: str, before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return how two descriptions differ, in words: a list of one line, or of none."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    told = [f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in names]
    return [f"{what}: {', '.join(told)}"] if told else []


def _in_use(path: str, using: list[User], why: str) -> str:
    """Return the error text for a script that describes a different job than the one in use."""
    if not using or (len(using) == 1 and using[0].pid == os.getpid()):
        whom = "is kept for the script that takes over what its last one left (`job.reattach()`)"
    else:
        whom = f"is in use by {' and '.join(map(str, using))}"
    return (
        f"the job of {path} {whom}, and this script describes another: {why}. Either end that job "
        "(`monarch kill`, or kill() on it), or keep both: state(cached_path=...) with the name of "
        "another file"
    )


def job_load(filename: str = DEFAULT_JOB_PATH) -> JobTrait:
    """Return the job that `JobTrait.dump`, or `JobTrait.state`, wrote to this file.

    Imports the module of the job's class, and runs no other code. Raises FileNotFoundError;
    PermissionError for a file that another user may have written; ValueError for a file that holds
    no job, or a job of an incompatible release, above all a pickle.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "job.json")
    >>> LocalJob(("trainers",)).dump(path)
    >>> job_load(path).active
    False
    """
    data = read(filename)
    try:
        return job_loads(data)
    except Exception as error:
        raise ValueError(
            f"{filename} cannot be read as a job: {error}; if its hosts have ended, remove it"
        ) from error


def job_loads(data: bytes) -> JobTrait:
    """Return the job that `JobTrait.dumps` made these bytes of.

    Imports the module of the job's class, by the name in the bytes: only for trusted bytes. Raises
    ValueError for bytes that hold no job, or a job of a release that this one cannot read;
    TypeError for the class of something else.
    """
    job: JobTrait = decode(data, _built)
    return job


def _built(cls: type, attributes: dict[str, Any]) -> JobTrait:
    """Return a job of this class with these attributes, without a call of its constructor."""
    if not issubclass(cls, JobTrait):
        raise TypeError(f"this is no job but {cls.__name__}")
    job = cls.__new__(cls)
    try:
        job.__setstate__(attributes)
        job._check_saved()
    except Exception as error:
        raise ValueError(f"its attributes do not fit {cls.__name__}: {error}") from error
    return job
