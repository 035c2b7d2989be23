"""The processes of a host: how they are started and killed, and why they have exited."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.memory_file import memory_file
from monarch._engine.base.verdict import FAILED, NOT_CREATED
from monarch._engine.runtime.agent.output import Uncaptured
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


def test_a_host_that_captures_nothing_starts_processes_with_its_own_streams(tmp_path: Path) -> None:
    """Its agent lacks the feature, which the client of another host asks for."""
    told: list[tuple[Any, list[int]]] = []

    def connect(sock: socket.socket, _name: str) -> Any:
        sock.close()
        return SimpleNamespace()

    links: Any = SimpleNamespace(connect=connect, tell=lambda _, *order: told.append(order))
    unused: Any = None
    processes = Processes(links, unused, Uncaptured, lambda event, **fields: None)
    launcher: Any = SimpleNamespace(link=None)
    spec = {
        "env": {"TMPDIR": str(tmp_path)},
        "cwd": "/",
        "on_each": 1,
        "bindings": [],
        "preload": [],
        "path": [],
        "logs": {"tail": 0},
    }
    ours = os.open(os.devnull, os.O_RDONLY)
    assert processes.launch(launcher, 1, spec, [{"uid": 7}], [ours]) is None
    processes.end()
    ((order, (link, _control)),) = told  # no descriptors for its stdout and stderr
    assert [proc["uid"] for proc in order["procs"]] == [7]
    assert link == ours
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)


ENDED: Any = {"uid": 1, "status": 256}  # it has exited with 1
KILLED: Any = {"uid": 1, "status": signal.SIGKILL}
NOT_STARTED: Any = {"uid": 1, "error": "no such program"}


@pytest.fixture
def processes() -> Processes:
    """Return the processes of a host, of which one with uid 1 has exited."""
    nothing: Any = None
    made = Processes(nothing, nothing, nothing, lambda event, **fields: None)
    made._processes[1] = Process(1, nothing)
    return made


@pytest.mark.parametrize(
    ("exit_", "ready", "code", "says"),
    [
        (ENDED, True, "", "exited with non-zero code 1"),
        (ENDED, False, NOT_CREATED, "its command ended before it became a proc"),
        (NOT_STARTED, True, NOT_CREATED, "no such program"),
        (NOT_STARTED, False, NOT_CREATED, "no such program"),
    ],
)
def test_a_process_that_never_was_one_is_told_from_one_that_ended(
    processes: Processes, exit_: Any, ready: bool, code: str, says: str
) -> None:
    verdict = processes.why_exited(exit_, "", ready=ready)
    assert (verdict.kind, verdict.code) == (FAILED, code)
    assert says in verdict.error


@pytest.mark.parametrize("is_known", [False, True])
def test_the_advice_to_keep_output_is_for_failures_that_nothing_explains(
    processes: Processes, is_known: bool
) -> None:
    processes._processes[1].remembered = is_known
    verdict = processes.why_exited(KILLED, "", ready=True)
    assert (verdict.kind, "tail_log_lines" in verdict.advice) == (FAILED, not is_known)


DUMP = b"""Fatal Python error: Aborted

Current thread 0x00007f54603646c0 (most recent call first):
  File "/home/me/prog.py", line 15 in die
"""


def test_the_trace_of_a_crash_is_in_the_verdict(processes: Processes) -> None:
    box = processes._processes[1].box = memory_file()
    os.write(box, DUMP)
    try:
        verdict = processes.why_exited({"uid": 1, "status": signal.SIGABRT}, "", ready=True)
    finally:
        os.close(box)
    assert "line 15, in die" in verdict.trace
    assert verdict.advice == ""
