"""The host agent of a client: what it imports ahead for processes of meshes, and its end."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, Verdict
from monarch._engine.launch import helper
from monarch._engine.launch.cores import THREADS
from monarch._engine.runtime.agent import client
from monarch.actor import endpoint


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


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="without it Popen waits by itself")
@pytest.mark.parametrize("exits", [True, False])
def test_the_exit_of_the_agent_is_awaited_for_the_grace_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, exits: bool
) -> None:
    done: list[Any] = []

    class Agent(subprocess.Popen[bytes]):
        """The process of an agent; another process has its pid."""

        def __init__(self) -> None:
            self.pid = os.getpid()

        def wait(self, timeout: float | None = None) -> int:
            done.append(("wait", timeout))
            if timeout is not None and not exits:
                raise subprocess.TimeoutExpired("agent", timeout)
            return 0

        def kill(self) -> None:
            done.append("kill")

    def await_exit(_handle: int, timeout: float | None) -> bool:
        done.append(("poll", timeout))
        return exits

    monkeypatch.setattr(client, "_current", SimpleNamespace(agent=None))
    monkeypatch.setattr(client, "_agent_process", Agent())
    monkeypatch.setattr(client, "_exits", await_exit)
    client.close_client(5.0, Verdict(FAILED, "the script ended"))
    if exits:
        assert done == [("poll", 5.0), ("wait", 5.0)]
    else:
        assert done == [("poll", 5.0), ("wait", 0.0), "kill", ("wait", None)]


@pytest.mark.parametrize("is_agent", [False, True])
def test_an_agent_that_is_silent_is_killed_and_its_procs_are_given_up(
    monkeypatch: pytest.MonkeyPatch, is_agent: bool
) -> None:
    done: list[Any] = []
    proc: Any = SimpleNamespace(
        hostname="here",
        agent=object() if is_agent else None,
        bury_everyone=done.append,
        lose=lambda link, error: done.append((link, error)),
    )
    process = SimpleNamespace(pid=7, kill=lambda: done.append("killed"))
    monkeypatch.setattr(client, "_current", proc)
    monkeypatch.setattr(client, "_agent_process", process)
    monkeypatch.setattr(client, "why_silent", lambda pid, timeout: f"{pid} silent for {timeout} s")
    monkeypatch.setattr(client.environments.current, "wall_time", lambda: 5.0)
    client._agent_is_silent(3.0, [])
    if is_agent:
        assert done == ["killed", (proc.agent, "7 silent for 3.0 s")]
        proc.agent_lost("the connection was closed")
        verdict = Verdict(FAILED, "7 silent for 3.0 s", INFRASTRUCTURE, "here", 0, 5.0)
        assert done[2:] == [verdict]
    else:
        assert done == [], "it has exited"


def test_launchers_load_the_event_loop_if_an_endpoint_is_async(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_async_actors", False)

    async def fetch(_: Any) -> None: ...

    endpoint(lambda _: None)
    assert not client._async_actors
    endpoint(fetch)
    assert client._async_actors
