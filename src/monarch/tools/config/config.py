"""`Config`: which scheduler of torchx is to run an app, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monarch.tools.config.workspace import Workspace
from monarch.tools.launcher import torchx

__all__ = ["NOT_SET", "Config"]

NOT_SET = "__NOT_SET__"
"""The scheduler of a `Config` without one, and the name of its app."""


def _no_app() -> Any:
    """Return an app without roles; None where torchx, whose class it is, is not installed."""
    try:
        return torchx("specs").AppDef(name=NOT_SET)
    except ImportError:
        return None


@dataclass
class Config:
    """The arguments of `monarch.tools.commands.create`.

    >>> Config(scheduler="slurm", scheduler_args={"partition": "gpu"}).dryrun
    False
    """

    scheduler: str = NOT_SET
    """The name of a scheduler of torchx: local_cwd, local_docker, slurm, k8s."""
    scheduler_args: dict[str, Any] = field(default_factory=dict[str, Any])
    workspace: Workspace = field(default_factory=Workspace.null)
    dryrun: bool = False
    """Whether `create` only returns what it would submit."""
    appdef: Any = field(default_factory=_no_app)
    """The app, a ``torchx.specs.AppDef``. By default one without roles, or None without torchx."""
