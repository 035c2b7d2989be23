"""`SPMDJob`: a torchrun command on this machine, without torchrun.

The program runs by `monarch.spmd.run`, so its options are those of torchrun, and each is honoured
or refused. On other hosts, ``monarch run --mesh`` runs the same command on the job of their kind.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from monarch.actor import this_host
from monarch.job.state import JobState
from monarch.job.trait import JobTrait
from monarch.spmd.command import launch
from monarch.spmd.host_ranks import rank_environ
from monarch.spmd.torchrun import Launch, parse_command

__all__ = ["SPMDJob", "serve"]

_MESH = "workers"
_LOCAL = "local_cwd"


class SPMDJob(JobTrait):
    """A job that runs one torchrun command, as often as `run_spmd` is called. `serve` makes it.

    Args:
        handle: a name of the job, for messages.
        scheduler: "local_cwd", for this machine.
        workspace: the directory where the program runs; None: the working directory.
        original_roles: the command; the first role has "entrypoint", "args" and "env", as
            the roles of torchx.
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
        if scheduler != _LOCAL:
            raise ValueError(
                f"the scheduler {scheduler!r} is not supported here: pass scheduler={_LOCAL!r}. On "
                "the hosts of a job, `monarch run --mesh NAME` runs the same command"
            )
        if not original_roles:
            raise ValueError("original_roles is empty: there is no command to run")
        self._handle = handle
        self._scheduler = scheduler
        self._workspace = workspace
        self._roles = [dict(role) for role in original_roles]
        self._launch()  # refuses impossible commands now
        if (replicas := int(self._role.get("num_replicas") or 1)) != 1:
            raise ValueError(f"{replicas} hosts are asked for, and {scheduler} has one")

    def can_run(self, spec: JobTrait) -> bool:
        """Whether `spec` describes the same command."""
        return isinstance(spec, SPMDJob) and (self._scheduler, self._roles, self._workspace) == (
            spec._scheduler,
            spec._roles,
            spec._workspace,
        )

    def run_spmd(self) -> None:
        """Run the program on all ranks, and wait for it. May be called again.

        The output of ranks appears on this script's stdout and stderr, with the rank before each
        line. Raises RuntimeError if a rank fails, after the restarts of ``--max-restarts``.
        """
        self.apply()
        environ = rank_environ(self._role.get("env") or {})
        result = launch(self._launch(), environ=environ, folder=self._workspace)
        if not result.succeeded:
            raise RuntimeError(f"{self._handle}: {result.failures[-1]}")

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

    def _state(self) -> JobState:
        return JobState({_MESH: this_host()})

    def _kill(self) -> None:
        """Do nothing: the ranks end with `run_spmd`."""


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
        scheduler: "local_cwd", for this machine. The default names a scheduler that exists inside
            one company only; it is an error.
        scheduler_cfg: options of the scheduler; "local_cwd" has none.

        job = serve(["torchrun", "--nproc-per-node=4", "train.py"], scheduler="local_cwd")
        job.run_spmd()

    Raises ValueError for an empty command, for one that asks for several hosts by ``--nnodes``, and
    as `SPMDJob` does.
    """
    role = _role(appdef)
    if scheduler_cfg:
        raise ValueError(f"scheduler_cfg: {_LOCAL} has no option {', '.join(scheduler_cfg)}")
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
        "folder": _folder(getattr(role, "workspace", None)),
    }


def _folder(workspace: Any) -> str:
    """Return the first directory of a role's workspace; the working directory without one."""
    projects = getattr(workspace, "projects", None)
    return os.path.abspath(str(next(iter(projects)))) if projects else os.getcwd()
