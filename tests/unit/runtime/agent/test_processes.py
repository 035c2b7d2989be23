"""The processes of a host: what is recorded when they have started."""

from __future__ import annotations

from typing import Any

from monarch._engine.runtime.agent.processes import Process, Processes


def test_a_process_that_ended_before_its_start_was_reported_leaves_its_descriptors() -> None:
    """The caller closes those that nobody took."""
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
