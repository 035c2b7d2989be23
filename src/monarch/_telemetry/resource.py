"""The resource: which process the data of OpenTelemetry comes from.

Attributes that the program's environment gives (``OTEL_RESOURCE_ATTRIBUTES``,
``OTEL_SERVICE_NAME``) come before our own.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch._spi import Proc

__all__ = ["attributes_of", "describe"]

_RANKS = (1 << 20) - 1  # the bits of a process's uid that hold its rank in its mesh


def attributes_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes that the environment gives.

    >>> attributes_of({"OTEL_RESOURCE_ATTRIBUTES": "team=vision,region=eu%20west"})
    {'team': 'vision', 'region': 'eu west'}
    """
    found: dict[str, str] = {}
    for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        name, equals, value = pair.partition("=")
        if equals and name.strip():
            found[name.strip()] = urllib.parse.unquote(value.strip())
    service = environ.get("OTEL_SERVICE_NAME")
    if service:
        found["service.name"] = service
    return found


def describe(
    proc: Proc | None, environ: Mapping[str, str], sdk: str = "pymonarch"
) -> dict[str, str | int]:
    """Return the resource of this process.

    Args:
        proc: its part of the runtime, if it has one.
        environ: the environment.
        sdk: what the data is made by. (The standard reserves the name ``opentelemetry``; the tables
            for SQL have it all the same, as existing queries expect.)
    """
    found: dict[str, str | int] = {
        "service.name": "unknown_service",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": sdk,
        "process.pid": os.getpid(),
    }
    if proc is not None:
        client = proc.uid if proc.client else int(proc.spec["client"])
        mesh, _, _ = proc.label.rpartition("-")
        found["service.instance.id"] = f"{proc.uid:x}"
        found["host.name"] = proc.hostname
        found["monarch.job"] = proc.job or f"{client:x}"
        found["monarch.proc"] = proc.label
        if not proc.client:
            found["monarch.mesh"] = mesh or proc.label
            found["monarch.rank"] = proc.uid & _RANKS
    return {**found, **attributes_of(environ)}
