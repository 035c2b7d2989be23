"""The admin API of a job: what its processes and actors do, by HTTP.

The script's observer (`monarch._observer`) serves it, and ends with the script. It never fails a
job: what goes wrong is a warning, and `JobState.admin_url` stays None.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monarch._spi import settings
from monarch.job.component import ADMIN, Component
from monarch.job.format import savable

if TYPE_CHECKING:
    from monarch.job.state import JobState
    from monarch.job.trait import JobTrait

__all__ = ["MeshAdminConfig"]

_log = logging.getLogger("monarch.job")
_READY = 20.0  # seconds for the observer to start


@savable
@dataclass(frozen=True)
class MeshAdminConfig(Component):
    """Where `JobTrait.enable_admin` serves the admin API.

    Attributes:
        admin_addr: host and port, such as ``127.0.0.1:1729``; by default the setting
            ``mesh_admin_addr``. Port 0: a free one; one that is taken: the next free one.
    """

    order = ADMIN

    admin_addr: str | None = None

    def state(self, job: JobTrait, state: JobState) -> None:
        """Set the address of the admin API."""
        from monarch._observer.handle import observe

        try:
            address = self.admin_addr or settings.mesh_admin_addr
            place = observe(admin=address).wait(_READY)
        except (OSError, RuntimeError) as error:
            _log.warning("the job runs without the admin API: %s", error)
            return
        state.admin_url = place.link(place.admin_url) or None

    def end(self, job: JobTrait) -> None:
        """Serve the admin API no more, if this script does."""
        from monarch._observer.handle import conceal

        conceal("admin")


MeshAdminConfig.__module__ = "monarch.job"
