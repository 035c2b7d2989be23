"""The telemetry of a job: rows for SQL about its messages, actors, spans and metrics.

It belongs to the script: the script's observer (`monarch._observer`) keeps the rows, and ends with
it. Telemetry never fails a job. What goes wrong is a warning, and the attributes of the `JobState`
stay None.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch._spi import settings
from monarch.config import configure
from monarch.job.component import TELEMETRY, Component
from monarch.job.format import savable

if TYPE_CHECKING:
    from monarch._store.client import QueryEngineClient
    from monarch.job.state import JobState
    from monarch.job.trait import JobTrait

__all__ = ["TelemetryConfig", "query_client"]

_log = logging.getLogger("monarch.job")
_READY = 20.0  # seconds for the observer to start


@savable
@dataclass(frozen=True)
class TelemetryConfig(Component):
    """What `JobTrait.enable_telemetry` records.

    Attributes:
        retention_secs: how many seconds messages, spans, events and metrics are kept; 0: as long
            as there is room (the setting ``telemetry_limit``, in bytes).
        include_dashboard: whether the dashboard is served as well.
        dashboard_port: its port on the loopback interface; 0, or one that is taken: a free one.
        snapshot_interval_secs: accepted for the interface. The tables of the topology show the
            moment of the query.

    Raises ValueError for negative numbers and for a port above 65535.
    """

    order = TELEMETRY

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0

    def __post_init__(self) -> None:
        if self.retention_secs < 0 or self.snapshot_interval_secs < 0:
            raise ValueError(
                f"retention_secs and snapshot_interval_secs are 0 or more seconds, not "
                f"{self.retention_secs} and {self.snapshot_interval_secs}"
            )
        if not 0 <= self.dashboard_port <= 65535:
            raise ValueError(f"dashboard_port is 0 to 65535, not {self.dashboard_port}")

    def before_connect(self, job: JobTrait) -> None:
        """Switch recording on, before any process of the job starts."""
        if not settings.telemetry:
            configure(telemetry=True, telemetry_retention=f"{self.retention_secs}s")

    def state(self, job: JobTrait, state: JobState) -> None:
        """Set the addresses of the observer."""
        from monarch._observer.handle import observe
        from monarch._observer.web import available
        from monarch._store.client import QueryEngineClient
        from monarch.job.mesh_admin import MeshAdminConfig

        shown: dict[str, Any] = {}
        if self.include_dashboard:
            shown["dashboard"] = self.dashboard_port
        admins = [one for one in job._components if isinstance(one, MeshAdminConfig)]
        if not admins and available():
            shown["admin"] = settings.mesh_admin_addr
        try:
            place = observe(telemetry=True, **shown).wait(_READY)
        except (OSError, RuntimeError) as error:
            _log.warning("the job runs without telemetry: %s", error)
            return
        state.telemetry_url = place.telemetry_url or None
        if place.dashboard_url and self.include_dashboard:
            state.dashboard_url = place.link(place.dashboard_url)
        if place.admin_url:
            state.admin_url = place.link(place.admin_url)
        state.query_engine_client = QueryEngineClient(place.telemetry_url)


def query_client(pids: list[int]) -> QueryEngineClient:
    """Return a client of the telemetry of one of these scripts. Raises RuntimeError without any."""
    from monarch._observer.places import running
    from monarch._store.client import QueryEngineClient

    found = [place for place in running() if place.pid in pids and place.telemetry_url]
    if not found:
        raise RuntimeError(
            "could not connect to distributed telemetry: no script that uses this job records it; "
            "call enable_telemetry() before state()"
        )
    return QueryEngineClient(found[-1].telemetry_url)


TelemetryConfig.__module__ = "monarch.job"
