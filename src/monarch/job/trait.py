"""`JobTrait`: what all kinds of jobs have in common.

A job is a *description* of hosts and, once applied, the facts about its *allocation*: process
numbers, addresses. Both are pickled, connections are not; so another script that loads the job can
connect to the same hosts.

A script does not load it. It describes the job that it wants and asks for its `state`: if the job
in the file (`cached_path`) runs and fits the description, that is the one; otherwise a new one
is started and written there. So the second run of a script finds its hosts ready.

A kind of job says how hosts come and go (`_create`, `_kill`), how to connect to them (`_state`),
and whether a saved job may serve a description (`can_run`). It never touches `_status`.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

from monarch.job import lifeline
from monarch.job.format import decode, encode
from monarch.job.saved import DEFAULT_JOB_PATH, locked, read, remove, write
from monarch.job.state import JobState
from monarch.job.users import User, has_joined, join, part, users

__all__ = ["JobTrait", "changes", "job_load", "job_loads"]

_log = logging.getLogger("monarch.job")
_FORMAT = 1  # of what is pickled

_NOT_RUNNING = "not_running"
_RUNNING = "running"


class JobTrait(ABC):
    """A description of hosts, and their allocation. See the kinds: `LocalJob`, `ProcessJob`.

    >>> job = LocalJob(("trainers", "generators"))
    >>> state = job.state(cached_path=None)
    >>> state.trainers, job.active
    (<HostMesh {}>, True)
    >>> job.kill()
    >>> job.active
    False

    A kind of one's own implements `_create(client_script)`, `_state()`, `can_run(spec)` and
    `_kill()`; everything is done under the calls below.
    """

    _status: str | JobTrait = _NOT_RUNNING  # or the saved job that serves this description
    _apply_id: str | None = None
    _folder = ""  # of the allocation, on this machine, if it has one: who uses it is noted there

    # -- for programs ----------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether it was applied, or runs as a saved job; nobody is asked whether it lives."""
        return self._status != _NOT_RUNNING

    @property
    def apply_id(self) -> str | None:
        """A name for the current allocation; None before `apply`. Kept when saved and loaded."""
        return self._running_as()._apply_id

    def apply(self, client_script: str | None = None) -> None:
        """Start the job, unless it runs. Blocks until the hosts were asked for.

        Args:
            client_script: a program that is started as well, as the client of the job (batch
                mode); kinds that cannot do that raise RuntimeError.
        """
        if self.active:
            return
        self._apply_id = str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
        try:
            self._create(client_script)
        except BaseException:
            self._apply_id = None
            raise
        self._status = _RUNNING

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH) -> JobState:
        """The host meshes of the job, connected; starts it if need be.

        Args:
            cached_path: the file where the job is kept for the next script. A job there that runs
                and `can_run` this description is used. Another is killed and replaced if no other
                script uses it, which is said on stderr. None: no file is read or written, and the
                job ends with this script.

        Each call returns new meshes. Blocks while the job starts, and while another script is
        between reading and writing the same file. Raises RuntimeError when the job cannot be
        started or was lost, and when the file has another job that another script uses;
        PermissionError and ValueError as `job_load`.
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
                self._status = saved
            else:
                self.apply()
                try:
                    self.dump(cached_path)
                except BaseException:  # nobody could find it again
                    self.kill()
                    raise
            self._join()  # before the next script looks who uses it
        return self._connect()

    def kill(self) -> None:
        """End the job and everything that runs on its hosts; blocks until that is so.

        Nothing happens if it does not run. The file that `state` wrote stays: who finds a dead job
        there starts anew.
        """
        if not self.active:
            return
        job = self._running_as()
        part(job._folder)
        job._kill()
        self._status = _NOT_RUNNING

    def dump(self, filename: str) -> None:
        """Write the job to a file, for `job_load`; makes its directory, and follows a link.

        From then on a job that runs does not end with this script.
        """
        write(filename, self._pickled())
        lifeline.release(self._running_as()._folder)

    def dumps(self) -> bytes:
        """The job as bytes, for `job_loads`; with the facts of its allocation. As `dump`."""
        data = self._pickled()
        lifeline.release(self._running_as()._folder)
        return data

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether this (saved) job lives and may serve the description `spec`."""

    # -- what a kind of job says -----------------------------------------------------------------

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Allocate the hosts; what has to be known about them goes into attributes."""

    @abstractmethod
    def _state(self) -> JobState:
        """Connect to the hosts. Raises RuntimeError when they are lost."""

    @abstractmethod
    def _kill(self) -> None:
        """Release the hosts, whatever has become of them; after a failed `_create`, too."""

    def _differs(self, spec: JobTrait) -> str:
        """Why `can_run` is False for `spec`, in a few words."""
        return "it cannot run what this script describes"

    def _is_running(self) -> bool:
        """Whether the allocation lives."""
        return self.can_run(self)

    # -- how it works ----------------------------------------------------------------------------

    def _running_as(self) -> JobTrait:
        return self._status if isinstance(self._status, JobTrait) else self

    def _pickled(self) -> bytes:
        return encode(self._running_as())

    def _join(self) -> None:
        """Be known as a user of the job, for scripts that would replace it."""
        folder = self._running_as()._folder
        if os.path.isdir(folder):  # else it was lost, which `_state` says
            join(folder)

    def _connect(self) -> JobState:
        return self._running_as()._state()

    def _saved(self, path: str) -> JobTrait | None:
        """The job in this file, if it can run this description; if not, it is ended.

        Raises RuntimeError if it is not for us to end.
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
        try:
            saved._kill()
        except Exception:
            _log.exception("could not end the job of %s; what it holds may still run", path)
        remove(path)
        return None

    def _is_kept(self) -> bool:
        """Whether its last script has left something that waits for the next, see `reattach`."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_format": _FORMAT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = state.pop("_format", None)
        if found != _FORMAT:
            raise ValueError(
                f"it was saved in format {found}, and this release reads format {_FORMAT}"
            )
        vars(self).update(state)

    # -- not in this release ---------------------------------------------------------------------

    def enable_telemetry(self, *_args: Any, **_options: Any) -> NoReturn:
        """Not in this release: raises NotImplementedError."""
        raise NotImplementedError(
            "enable_telemetry: jobs have no telemetry store in this release; see "
            "monarch.actor.get_meter()"
        )

    def enable_admin(self, *_args: Any, **_options: Any) -> NoReturn:
        """Not in this release: raises NotImplementedError."""
        raise NotImplementedError("enable_admin: there is no admin server in this release")

    def profile(self, **_options: Any) -> NoReturn:
        """Not in this release: raises RuntimeError, as without telemetry."""
        raise RuntimeError("profile requires distributed telemetry, which this release has not")

    def telemetry_query_client(self) -> NoReturn:
        """Not in this release: raises RuntimeError, as without telemetry."""
        raise RuntimeError("the job has no distributed telemetry configured: not in this release")

    def remote_mount(self, *_args: Any, **_options: Any) -> NoReturn:
        """Not in this release: raises NotImplementedError."""
        raise NotImplementedError(
            "remote_mount: there are no mounts in this release; share a file system, or copy"
        )

    def gather_mount(self, *_args: Any, **_options: Any) -> NoReturn:
        """Not in this release: raises NotImplementedError."""
        raise NotImplementedError("gather_mount: there are no mounts in this release")


JobTrait.__module__ = "monarch.job"


def changes(what: str, before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """How two descriptions differ, in words: one line, or none."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    told = [f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in names]
    return [f"{what}: {', '.join(told)}"] if told else []


def _in_use(path: str, using: list[User], why: str) -> str:
    """The error of a script that asks for another job than the one that is used."""
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
    """The job that `JobTrait.dump`, or `JobTrait.state`, wrote to this file.

    Raises FileNotFoundError; PermissionError for a file that others may have written; ValueError
    for one that holds no job, or one of an incompatible version.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "job.pkl")
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
    """The job of these bytes, which `JobTrait.dumps` made. Runs code: only for trusted bytes.

    Raises ValueError for bytes that hold no job, or are of a release whose jobs this one cannot
    read; TypeError for another object.
    """
    job = decode(data)
    if not isinstance(job, JobTrait):
        raise TypeError(f"this is no job but {type(job).__name__}")
    return job
