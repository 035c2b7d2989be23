"""`start_telemetry`: how programs of earlier versions switch telemetry on."""

from __future__ import annotations

import os

from monarch._observer.handle import observe
from monarch._observer.switch import record
from monarch._spi import client_proc
from monarch.config import configure
from monarch.distributed_telemetry.engine import QueryEngine

__all__ = ["start_telemetry"]


def start_telemetry(
    batch_size: int = 1000,  # noqa: ARG001 - accepted for the interface
    retention_secs: int = 600,
    include_dashboard: bool = True,
    dashboard_port: int = 8265,
) -> QueryEngine:
    """Record what this script and its processes do from now on; return what answers SQL about it.

    Args:
        batch_size: accepted for the interface; rows leave a process four times a second.
        retention_secs: how many seconds messages, spans, events and metrics are kept.
        include_dashboard: whether the dashboard is served, if it is installed
            (``pymonarch[admin]``). Its address is in the environment variable
            ``MONARCH_DASHBOARD_URL`` then. It has a key in it, so treat it as a secret.
        dashboard_port: its port on the loopback interface; a free one if that is taken.

    Blocks until the observer is ready. Processes that exist already record nothing. Raises
    RuntimeError if it cannot be started.
    """
    configure(telemetry=True, telemetry_retention=f"{retention_secs}s")
    record(client_proc())
    shown = {"dashboard": dashboard_port} if include_dashboard else {}
    place = observe(telemetry=True, **shown).wait()
    if place.dashboard_url:
        os.environ["MONARCH_DASHBOARD_URL"] = place.link(place.dashboard_url)
    return QueryEngine(place.telemetry_url)
