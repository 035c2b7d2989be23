"""The modules that a new host agent imports ahead for the processes of meshes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE
from monarch._engine.launch import helper
from monarch._engine.launch.cores import THREADS
from monarch._engine.runtime.agent import client


@pytest.mark.parametrize("given", [False, True], ids=["not set", "set"])
def test_libraries_that_read_the_number_of_threads_wait_until_it_is_known(
    monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """Unless the user has set it, a spawn does; it is read while the library is imported."""
    told: list[Any] = []
    monkeypatch.delenv(THREADS, raising=False)
    if given:
        monkeypatch.setenv(THREADS, "2")
    monkeypatch.setattr(client, "_agent_process", None)
    monkeypatch.setattr(client, "_preloads", lambda: ["numpy", "json"])
    monkeypatch.setattr(client, "find", lambda _: None)
    monkeypatch.setattr(helper, "start", lambda *_, **__: (None, None))
    proc: Any = SimpleNamespace(uid=1, adopt_agent=lambda _: None, tell_agent=told.append)
    client._start_agent(proc)
    (message,) = told
    assert message["preload"] == (["numpy", "json"] if given else ["json"])


@pytest.mark.parametrize("is_known", [False, True])
def test_the_end_of_the_agent_ends_everything_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    buried: list[Any] = []
    proc: Any = SimpleNamespace(hostname="here", bury_everyone=buried.append)
    monkeypatch.setattr(client, "_current", proc)
    monkeypatch.setattr(client, "_agent_process", SimpleNamespace(pid=7) if is_known else None)
    monkeypatch.setattr(client.environments.current, "wall_time", lambda: 5.0)
    client._agent_died("the connection was closed")
    (verdict,) = buried
    assert verdict.kind == FAILED
    assert (verdict.cause, verdict.host, verdict.when) == (INFRASTRUCTURE, "here", 5.0)
    assert f"(pid {7 if is_known else '?'}) ended unexpectedly" in verdict.error


@pytest.mark.parametrize("is_found", [False, True])
def test_a_client_that_succeeds_another_takes_over_its_agent(
    monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    """An agent that has exited is replaced by a new one."""
    done: list[Any] = []
    proc: Any = SimpleNamespace(
        adopt_agent=lambda sock: done.append(("adopted", sock)),
        tell_agent=lambda message: done.append(("told", message)),
    )
    monkeypatch.setattr(client, "_current", None)
    monkeypatch.setattr(client, "_agent_process", None)
    monkeypatch.setattr(client, "_make_client", lambda uid, reign: proc)
    monkeypatch.setattr(client, "_FoundAgent", lambda pid: SimpleNamespace(pid=pid))
    monkeypatch.setattr(client, "become", lambda proc: done.append("became"))
    monkeypatch.setattr(client, "start_agent", lambda: done.append("started"))
    sock: Any = object()
    assert client.succeed(3, 1, (sock, 7) if is_found else None) is proc
    if is_found:
        assert done == [("adopted", sock), "became", ("told", {"op": "here"})]
        assert client._agent_process is not None
        assert client._agent_process.pid == 7
    else:
        assert done == ["became", "started"]
