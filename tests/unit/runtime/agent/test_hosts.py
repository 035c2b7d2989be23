"""The sessions of an agent with other hosts: each one that ends leaves the table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.home import HOME
from monarch._engine.runtime.agent.hosts import Hosts
from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.io.reactor import Reactor

CLIENT = 1 << 63


@pytest.mark.parametrize(("host", "reported"), [("elsewhere", True), (HOME, False)])
def test_a_host_without_an_address_is_lost(host: str, reported: bool) -> None:
    """The loss of home has been reported before: only its next connection can bring it back."""
    lost: list[Any] = []
    carrier: Any = SimpleNamespace(
        cast_at=None, cast_now=lambda: 0.0, cast_way=lambda host, *, dial: None
    )
    core = SimpleNamespace(
        casts=CastRelay(carrier, "here"),
        session_lost=lambda name, reason, *, farewell: lost.append((name, reason, farewell)),
    )
    agent: Any = SimpleNamespace(core=core, reactor=Reactor(), keeper=None)
    hosts = Hosts(agent, CLIENT, "here")
    assert hosts.way(host, dial=True) is not None
    agent.reactor.call_soon(agent.reactor.stop)
    agent.reactor.run()
    agent.reactor.close()
    assert hosts.find(host) is None
    assert lost == [(host, "its address is not known here", False)] * reported
