"""The processes of a host: what is recorded when they have started."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.agent.processes import Process, Processes


def test_a_process_that_ended_before_its_start_was_reported_leaves_its_descriptors() -> None:
    """The caller closes the descriptors that are left."""
    audited: list[Any] = []
    unused: Any = None
    processes = Processes(unused, unused, unused, lambda event, **fields: audited.append(event))
    known = processes._processes[1] = Process(1, unused)
    fds = [10, 11, 12, 13]  # two each, in the order of the processes
    processes.started([(2, 200), (1, 100)], fds)
    assert fds == [10, 11]
    assert (known.pid, known.pidfd, known.box) == (100, 12, 13)
    assert processes.pids() == {1: 100}
    assert audited == ["spawned"]


def test_a_proc_that_has_not_started_is_killed_by_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no pid yet, so no process gets a signal."""
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: kills.append((pid, number)))
    nothing: Any = None
    processes = Processes(nothing, nothing, nothing, lambda event, **fields: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link: Any = SimpleNamespace(sock=ours, fileno=ours.fileno())
        processes.admit(7, link)
        assert processes.pids() == {}
        processes.kill(7)
        assert theirs.recv(1) == b""
        assert kills == []
        process = processes.find(7)
        assert process is not None
        process.pid = 1234
        assert processes.pids() == {7: 1234}
        processes.kill(7)
        assert kills == [(1234, signal.SIGKILL)]
