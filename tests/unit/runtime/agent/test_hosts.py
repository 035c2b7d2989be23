"""The sessions of an agent with other hosts: which begin, and that each end leaves the table."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.home import HOME
from monarch._engine.base.settings import settings
from monarch._engine.runtime.agent.hosts import Hosts
from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.reactor import Reactor

CLIENT = 1 << 63


def test_memory_for_payloads_of_other_hosts_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Any] = []
    clock = SimpleNamespace(call_later=lambda _, action: timers.append(action))
    monkeypatch.setattr(environments.current, "clock", lambda: clock)
    agent: Any = SimpleNamespace(reactor=Reactor())
    hosts = Hosts(agent, CLIENT, "here")
    agent.reactor.close()
    hosts.segments.reserve(1 << 20)  # freed at once
    assert hosts.segments.statistics[:2] == (0, 1)
    for _ in range(2):
        timers.pop()()
    assert hosts.segments.statistics == (0, 0, 0)


def agent_with(lost: list[Any], audited: list[Any]) -> Any:
    """Return an agent that records lost sessions and events of the audit log."""
    carrier: Any = SimpleNamespace(
        cast_at=None, cast_now=lambda: 0.0, cast_way=lambda host, *, dial: None
    )
    core = SimpleNamespace(
        casts=CastRelay(carrier, "here"),
        session_lost=lambda name, reason, *, farewell: lost.append((name, reason, farewell)),
        heard=lambda name, way, message: None,
    )
    return SimpleNamespace(
        core=core,
        reactor=Reactor(),
        keeper=None,
        audit=lambda event, **fields: audited.append((event, fields)),
    )


@pytest.mark.parametrize(("host", "reported"), [("elsewhere", True), (HOME, False)])
def test_a_host_without_an_address_is_lost(host: str, reported: bool) -> None:
    """The loss of home has been reported before: only its next connection can bring it back."""
    lost: list[Any] = []
    agent = agent_with(lost, [])
    hosts = Hosts(agent, CLIENT, "here")
    assert hosts.way(host, dial=True) is not None
    agent.reactor.call_soon(agent.reactor.stop)
    agent.reactor.run()
    agent.reactor.close()
    assert hosts.find(host) is None
    assert lost == [(host, "its address is not known here", False)] * reported


@pytest.mark.parametrize(("again", "least"), [(False, 8), (True, 9)])
def test_an_agent_that_home_has_given_up_is_refused(again: bool, least: int) -> None:
    """`again`: home has begun a later session since; else the host knows of the loss only."""
    audited: list[Any] = []
    agent = agent_with([], audited)
    hosts = Hosts(agent, CLIENT, "here")
    home: Any = SimpleNamespace(name=HOME, way=None)

    def begun(number: int) -> None:
        known: Any = {"hosts": {}, "secrets": {}, "trusting": False}
        hosts.from_peer_host(home, {"op": "addresses", "agents": {"other": number}, **known})

    def dials(number: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        purpose: Any = {"from": "other", "session": "", "tls": False, "bare": True}
        hosts.take_over({**purpose, "origin": number}, theirs.fileno())
        theirs.close()
        return ours

    begun(7)
    hosts.from_peer_host(home, {"op": "lost", "host": "other", "end": []})
    if again:
        begun(least)
    with dials(least - 1) as old:
        old.settimeout(10)
        assert old.recv(1) == b""
    assert audited == [("fenced", {"host": "other"})]
    assert hosts.find("other") is None
    with dials(least):
        assert audited == [("fenced", {"host": "other"})]
        assert hosts.find("other") is not None
        hosts.end_sessions("the test is over", farewell=False)
    agent.reactor.close()


def test_a_host_timeout_that_the_client_has_changed_counts_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent began with the value of its own environment."""
    agent = agent_with([], [])
    hosts = Hosts(agent, CLIENT, "here")
    patience: list[float] = []
    monkeypatch.setattr(hosts, "_take_settings", lambda _: None)
    monkeypatch.setattr(hosts.monitor, "be_patient", patience.append)
    request: Any = {"hosts": {}, "gateways": [], "trusting": False, "secrets": {}, "reign": 0}
    with settings.configured(host_timeout="77s"):
        hosts.attach_all(CLIENT, request)
    agent.reactor.close()
    assert patience == [77.0]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_worker_in_the_place_of_a_lost_host_has_the_secret_of_its_job_unless_that_was_killed(
    monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    agent = agent_with([], [])
    agent.core.directory = SimpleNamespace(host_found=lambda host: [])
    agent.core.perform = lambda effects: None
    hosts = Hosts(agent, CLIENT, "here")
    dialed: list[str] = []
    monkeypatch.setattr(hosts, "_peer_host", dialed.append)
    monkeypatch.setattr(hosts, "_directory", lambda host: {})
    monkeypatch.setattr(hosts, "_is_killed", lambda host: is_killed)
    monkeypatch.setattr(hosts, "spread", lambda message: None)
    hosts.addresses["spare"], hosts._secrets["spare"] = "tcp://10.0.0.9:1", "that of the spare"
    hosts._secrets["lost"] = "that of the lost host"
    request = {"host": "lost", "address": "tcp://10.0.0.9:1", "timeout": 60.0, "once": False}
    hosts.rebind(CLIENT, request)
    agent.reactor.close()
    assert dialed == ["lost"]
    assert hosts._secrets["lost"] == f"that of the {'lost host' if is_killed else 'spare'}"
