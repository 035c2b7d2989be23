"""The schedulers that `monarch.tools.commands` knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from monarch.tools.launcher import torchx

__all__ = ["component_fn", "dryrun_info_formatter", "scheduler_factories"]

_SCHEDULERS = {"local_cwd": "local_cwd", "local_docker": "local_docker", "slurm": "slurm"}
_SCHEDULERS["k8s"] = "kubernetes"


def component_fn(scheduler: str) -> NoReturn:
    """Raise NotImplementedError: no scheduler has a default app. Give `Config` an ``appdef``."""
    raise NotImplementedError(
        f"the scheduler {scheduler!r} has no default app: give Config an appdef"
    )


def scheduler_factories() -> dict[str, Any]:
    """Return what makes each scheduler, by name. Raises ImportError without torchx."""
    known = torchx("schedulers").get_scheduler_factories()
    return {name: known[theirs] for name, theirs in _SCHEDULERS.items() if theirs in known}


def dryrun_info_formatter(dryrun_info: Any) -> Callable[..., str]:
    """Return a function that formats the request of a dry run as text."""

    def text(request: Any) -> str:
        return str(dryrun_info._fmt(request))

    return text
