"""The states of requests and the addresses of nodes, from SkyPilot's objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch.job.skypilot.sky import Sky


def sky(**functions: Any) -> Any:
    made: Any = object.__new__(Sky)
    made._sky = SimpleNamespace(get=lambda found: found, **functions)
    made._sky.StatusRefreshMode = SimpleNamespace(AUTO="auto")
    return made


@pytest.mark.parametrize(
    ("found", "state"), [([], None), ([SimpleNamespace(status="RUNNING")], "RUNNING")]
)
def test_the_state_of_a_request(found: list[Any], state: str | None) -> None:
    assert sky(api_status=lambda _ids, all_status: found).request("r") == state


@pytest.mark.parametrize("cached", [None, ["10.0.0.1"]])
def test_addresses_that_are_not_known_yet_are_asked_for(cached: list[str] | None) -> None:
    handle = SimpleNamespace(cached_internal_ips=cached, internal_ips=lambda: ["10.0.0.2"])
    record = {"status": "UP", "handle": handle}
    found = sky(status=lambda _names, refresh: [record]).addresses("c")
    assert found == (cached or ["10.0.0.2"])
