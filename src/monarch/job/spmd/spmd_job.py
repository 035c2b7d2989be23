"""`SPMDJob`: a torchrun command on this machine, or on hosts of a scheduler, without torchrun.

The program runs by `monarch.spmd.run`, so its options are those of torchrun, and each is honoured
or refused. The hosts are those of another job, which `schedulers` makes: this one starts and ends
with it, and is saved with it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from monarch.actor import HostMesh, this_host
from monarch.job.host_state import HostState
from monarch.job.spmd.schedulers import LOCAL, MESH, check, job_of
from monarch.job.state import JobState
from monarch.job.trait import JobTrait
from monarch.spmd.command import launch
from monarch.spmd.host_ranks import rank_environ
from monarch.spmd.torchrun import Launch, parse_command

__all__ = ["SPMDJob", "serve"]


class SPMDJob(JobTrait):
    """A job that runs one torchrun command, as often as `run_spmd` is called. `serve` makes it.

    Args:
        handle: a name of the job, for messages.
        scheduler: "local_cwd", for this machine, "slurm", or "k8s".
        workspace: the directory where the program runs, which all hosts have; None: the working
            directory.
        original_roles: the command; the first role has "entrypoint", "args", "env", "num_replicas",
            "image" and "resource", as the roles of torchx, and "scheduler_cfg".
        service_proc_ids: not used: workers are known by their addresses.

    Raises ValueError for an unknown scheduler, and for a command that cannot be run.
    """

    def __init__(
        self,
        handle: str,
        scheduler: str,
        workspace: str | None = None,
        original_roles: list[dict[str, Any]] | None = None,
        service_proc_ids: list[Any] | None = None,
    ) -> None:
        super().__init__()
        check(scheduler)
        if not original_roles:
            raise ValueError("original_roles is empty: there is no command to run")
        self._handle = handle
        self._scheduler = scheduler
        self._workspace = workspace
        self._roles = [dict(role) for role in original_roles]
        self._launch()  # refuses impossible commands now
        if scheduler == LOCAL and (replicas := int(self._role.get("num_replicas") or 1)) != 1:
            raise ValueError(f"{replicas} hosts are asked for, and {scheduler} has one")
        self._job = job_of(scheduler, self._role.get("scheduler_cfg") or {}, self._role)

    def can_run(self, spec: JobTrait) -> bool:
        """Whether `spec` describes the same command, and the hosts run."""
        same = isinstance(spec, SPMDJob) and (self._scheduler, self._roles, self._workspace) == (
            spec._scheduler,
            spec._roles,
            spec._workspace,
        )
        return same and self._is_running()

    def _is_running(self) -> bool:
        return self._job is None or self._job._is_running()

    def _host_states(self) -> Sequence[HostState]:
        return [] if self._job is None else self._job._host_states()

    def run_spmd(self) -> None:
        """Run the program on all ranks, and wait for it. May be called again.

        The output of ranks appears on this script's stdout and stderr, with the rank before each
        line. Raises RuntimeError if a rank fails, after the restarts of ``--max-restarts``.
        """
        self.apply()
        hosts = self._remote_hosts()
        env: dict[str, str] = self._role.get("env") or {}
        if hosts is None:
            result = launch(self._launch(), environ=rank_environ(env), folder=self._workspace)
        else:
            result = launch(self._launch(), hosts, variables=env, folder=self._workspace)
        if not result.succeeded:
            raise RuntimeError(f"{self._handle}: {result.failures[-1]}")

    def _remote_hosts(self) -> HostMesh | None:
        """Return the hosts that run, connected; None: this machine."""
        job = self._running_as()
        inner = job._job if isinstance(job, SPMDJob) else None
        hosts: HostMesh | None = None
        if inner is not None:
            hosts = inner.state(cached_path=None)._hosts[MESH]
            hosts.initialized.get()
        return hosts

    @property
    def _role(self) -> dict[str, Any]:
        return self._roles[0]

    def _launch(self) -> Launch:
        words = [self._role["entrypoint"], *self._role.get("args", ())]
        return parse_command([str(word) for word in words])

    # -- a kind of job ---------------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("SPMDJob cannot run batch-mode scripts; use the job of its hosts")
        if self._job is not None:
            self._job.apply()
            self._folder = self._job._folder  # where scripts note that they use the hosts

    def _state(self) -> JobState:
        return JobState({MESH: this_host()}) if self._job is None else self._job._state()

    def _kill(self) -> None:
        """Release the hosts. Ranks end with `run_spmd`."""
        if self._job is not None:
            self._job.kill()
            self._folder = ""


SPMDJob.__module__ = "monarch.job.spmd"


def serve(
    appdef: Any,
    scheduler: str = "mast_conda",
    scheduler_cfg: dict[str, Any] | None = None,
) -> SPMDJob:
    """Return a job, applied, that runs a torchrun command.

    Args:
        appdef: the command as a list of words, for one host, or an AppDef of torchx, whose first
            role has the command and the number of hosts.
        scheduler: "local_cwd", for this machine; "slurm", for a `SlurmJob`; "k8s", for a
            `KubernetesJob`. The default names a scheduler that exists inside one company only; it
            is an error.
        scheduler_cfg: options of the scheduler: the arguments of the class of the job, such as
            ``{"partition": "gpu"}``; for "k8s" also ``"image"``. "local_cwd" has none.

        job = serve(["torchrun", "--nproc-per-node=4", "train.py"], scheduler="local_cwd")
        job.run_spmd()

    The hosts are requested at once, and stay until ``job.kill()``. Raises ValueError for an empty
    command, for a list of words that asks for several hosts by ``--nnodes``, and as `SPMDJob` does.
    """
    role = _role(appdef)
    role["scheduler_cfg"] = dict(scheduler_cfg or {})
    job = SPMDJob(f"{scheduler}://monarch/{role['name']}", scheduler, role.pop("folder"), [role])
    job.apply()
    return job


def _role(appdef: Any) -> dict[str, Any]:
    """Return the command of a list of words, or of the first role of an AppDef."""
    if isinstance(appdef, str):
        raise ValueError(f"the command must be a list of words, not {appdef!r}")  # noqa: TRY004 - as for others
    if isinstance(appdef, Sequence):
        words = [str(word) for word in cast("Sequence[object]", appdef)]
        asked = parse_command(words)
        if (asked.least, asked.most) not in ((0, 0), (1, 1)):
            raise ValueError(
                "a command is for one host (--nnodes=1): only single-node is supported here. Pass "
                "an AppDef with num_replicas for several"
            )
        return {"name": "trainer", "entrypoint": words[0], "args": words[1:], "folder": os.getcwd()}
    roles = getattr(appdef, "roles", None)
    if not roles:
        raise ValueError(
            f"serve takes a command or an AppDef with a role, not {type(appdef).__name__}"
        )
    if len(roles) > 1:
        warnings.warn(f"only the first of {len(roles)} roles is used", stacklevel=3)
    role = roles[0]
    env: Mapping[str, str] = role.env or {}
    return {
        "name": role.name,
        "entrypoint": role.entrypoint,
        "args": [str(word) for word in role.args],
        "num_replicas": role.num_replicas,
        "env": dict(env),
        "image": getattr(role, "image", None),
        "resource": _amounts(getattr(role, "resource", None)),
        "folder": _folder(getattr(role, "workspace", None)),
    }


def _amounts(resource: Any) -> dict[str, int]:
    """Return what a role wants of a host; nothing for what is not given, or negative."""
    wanted = {name: getattr(resource, name, None) for name in ("cpu", "gpu", "memMB")}
    return {name: int(amount) for name, amount in wanted.items() if amount and amount > 0}


def _folder(workspace: Any) -> str:
    """Return the first directory of a role's workspace; the working directory without one."""
    projects = getattr(workspace, "projects", None)
    return os.path.abspath(str(next(iter(projects)))) if projects else os.getcwd()
