"""Names of the reference's notebooks, which reserve machines of a scheduler inside one company."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["reserve_torchx"]


def reserve_torchx(hosts: int, **_options: Any) -> NoReturn:
    """Raise NotImplementedError: the scheduler is not public. `monarch.job` reserves hosts."""
    raise NotImplementedError(
        f"{hosts} hosts cannot be reserved: mast_reserve is for a scheduler that is not public; "
        "use the jobs of monarch.job"
    )
