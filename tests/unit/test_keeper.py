"""An agent of a job that may outlive its driver, and its answers to a claim."""

from __future__ import annotations

import json
import select
import socket
import types
from collections.abc import Iterator
from typing import Any

import pytest

from monarch._failover import claim as claims
from monarch._failover.keeper import ANSWER, JobKeeper
from monarch._spi import HOME, ClosedInHandshake


class Agent:
    """Writes down what it is asked to do."""

    hostname, client = "here", 7

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.said: list[dict[str, Any]] = []
        self.owner = object()
        self.reactor = types.SimpleNamespace(call_at=lambda *_: None)
        self.home_is_up = True

    def peer_hosts(self) -> list[Any]:
        link = types.SimpleNamespace(up=self.home_is_up)
        return [types.SimpleNamespace(name=HOME, link=link, say=self.said.append)]

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.did.append((name, *args))


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def keeper(agent: Agent) -> JobKeeper:
    holder: Any = agent
    return JobKeeper(holder)


def begin(keeper: JobKeeper) -> None:
    news: Any = {"job": "a", "reign": 0, "grace": 60.0}
    keeper.heard(news)


def answer(keeper: JobKeeper) -> Any:
    """Return what the keeper answers to a claim."""
    ours, theirs = socket.socketpair()
    with ours:
        keeper.answer_claim(theirs)
        (size,) = ANSWER.unpack(ours.recv(ANSWER.size))
        return json.loads(ours.recv(size))


def test_a_claim_is_granted_once_the_driver_is_lost(agent: Agent, keeper: JobKeeper) -> None:
    assert answer(keeper) == {"driven": True, "sure": True}
    begin(keeper)
    assert answer(keeper) == {"driven": True, "sure": True}
    agent.home_is_up = False
    assert answer(keeper) == {"driven": True, "sure": False}
    assert keeper.home_lost("no route")
    assert answer(keeper) == {"uid": 7, "reign": 1, "grace": 60.0}


def test_the_loss_of_home_says_why(agent: Agent, keeper: JobKeeper) -> None:
    assert not keeper.home_lost("no route")
    assert agent.did == []
    begin(keeper)
    agent.did.clear()
    assert keeper.home_lost("no route")
    (left, verdict), (printed,) = agent.did
    assert (left, printed) == ("home_left", "print_here")
    assert "the client's host is unreachable: no route" in str(verdict)


def test_entries_are_kept_for_a_job_that_may_outlive_its_driver_only(
    agent: Agent, keeper: JobKeeper
) -> None:
    keeper.remember(1, "one")
    keeper.forget(1)
    assert agent.said == []
    begin(keeper)
    keeper.remember(1, "one")
    keeper.forget(1)
    job = {"op": "job", "job": "a", "reign": 0}
    assert agent.said == [{**job, "keep": [[1, "one"]]}, {**job, "drop": [1]}]


def test_only_the_welcomed_driver_of_a_job_without_one_is_admitted(
    agent: Agent, keeper: JobKeeper
) -> None:
    owner: Any = agent.owner
    other: Any = object()
    keeper.driver_is_here(owner)  # the job ends with its driver
    begin(keeper)
    agent.did.clear()
    keeper.driver_is_here(owner)  # it has been here all the time
    keeper.home_lost("no route")
    keeper.driver_is_here(other)
    assert [name for name, *_ in agent.did] == ["home_left", "print_here"]
    agent.did.clear()
    keeper.driver_is_here(owner)
    assert agent.did == [("admit_driver", owner), ("driver_returned",), ("print_there",)]


def test_who_knocks_at_a_job_with_a_driver_is_refused_and_told_by_whom(
    agent: Agent, keeper: JobKeeper
) -> None:
    link, sock = types.SimpleNamespace(), object()
    holder: Any = agent
    holder.connect = lambda *_: link
    knocked: Any = keeper._knocked
    knocked(sock, {"job": "a", "pid": 4711})
    (told, _, refused), closed = agent.did
    assert (told, closed) == ("tell", ("close", link))
    assert refused == {"op": "refused", "reason": "it has a driver, another process"}
    begin(keeper)
    agent.did.clear()
    keeper.remember(1, "one")
    keeper.home_lost("no route")
    knocked(sock, {"job": "a", "pid": 4711})
    _, (_, _, welcome) = agent.did[-2], agent.did[-1]
    assert (welcome["op"], welcome["uid"], welcome["reign"]) == ("welcome", 7, 1)
    assert welcome["keepsakes"] == ["one"]
    assert agent.owner is link
    assert link.uid == 7
    knocked(sock, {"job": "a", "pid": 4712})
    assert agent.did[-2][2]["reason"] == "it has a driver, process 4711 on here"


def test_a_new_home_is_one_epoch_ahead_and_comes_when_the_old_one_is_lost(
    keeper: JobKeeper,
) -> None:
    assert not keeper.may_come_home(1), "the job ends with its driver, which is here"
    begin(keeper)
    assert not keeper.may_come_home(1), "it has a driver"
    keeper.home_lost("no route")
    assert not keeper.may_come_home(0)
    assert not keeper.may_come_home(2)
    assert keeper.may_come_home(1)
    assert not keeper.may_come_home(1), "another one has come"


# -- who asks ------------------------------------------------------------------------------------

WORKERS: Any = ["tcp://a:1"]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield the worker's end of the connection that `claim` opens."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(claims, "dial", lambda *_, **__: ours)
    with ours, theirs:
        yield theirs


def test_a_worker_that_closes_the_connection_has_no_such_job(worker: socket.socket) -> None:
    worker.close()
    with pytest.raises(LookupError, match="it has no such job"):
        claims.claim("a", WORKERS, b"key", 60)


def test_a_worker_without_an_agent_has_no_such_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def dial(*_: object, **__: object) -> None:
        raise ClosedInHandshake("closed")

    monkeypatch.setattr(claims, "dial", dial)
    with pytest.raises(LookupError, match="it has no such job"):
        claims.claim("a", WORKERS, b"key", 60)


def test_a_worker_is_not_waited_for_longer_than_asked(
    worker: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(*args: Any) -> Any:
        waits.append(args[3])
        return [], [], []

    monkeypatch.setattr(select, "select", wait)
    with pytest.raises(LookupError, match="it did not answer in time"):
        claims.claim("a", WORKERS, b"key", 60)
    assert all(0 < seconds <= 60 for seconds in waits)
    assert len(waits) == 1


def test_a_job_without_a_driver_is_found(worker: socket.socket) -> None:
    said = json.dumps({"uid": 7, "reign": 2, "grace": 60.0}).encode()
    worker.send(ANSWER.pack(len(said)) + said)
    assert claims.claim("a", WORKERS, b"key", 60) == claims.Found(7, 2, 60.0)


def test_a_job_with_a_driver_is_refused(worker: socket.socket) -> None:
    said = json.dumps({"driven": True, "sure": True}).encode()
    worker.send(ANSWER.pack(len(said)) + said)
    with pytest.raises(RuntimeError, match="cannot re-attach to job 'a': it has a driver"):
        claims.claim("a", WORKERS, b"key", 60)
