"""Which script the commands about a running script mean, if there are several."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch._observer.places import Place

__all__ = ["job_users", "observed"]


def observed(pid: int | None = None) -> Place:
    """Return the observer of script `pid`.

    Without `pid`: of the only script, or of the only one that uses the job of this directory.
    Raises LookupError, with the remedy, if there is none or more than one.
    """
    from monarch._observer.places import running, wanted

    try:
        return wanted(pid)
    except LookupError:
        if pid is None:
            users = job_users()
            ours = [place for place in running() if place.pid in users]
            if len(ours) == 1:
                return ours[0]
        raise


def job_users() -> set[int]:
    """Return the scripts that use the job of this directory."""
    from monarch.cli.status import saved
    from monarch.job.users import users

    try:
        _, job = saved(None)
    except (FileNotFoundError, ValueError):  # none, or none that can be read here
        return set()
    return {user.pid for user in users(job._folder)}
