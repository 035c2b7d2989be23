"""The set of a process's children, by both ways of finding it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from monarch._engine.launch import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has child subreapers")


def test_both_ways_to_list_children_agree() -> None:
    read, write = os.pipe()
    with subprocess.Popen(["cat"], stdin=read, stdout=subprocess.DEVNULL) as started:
        try:
            assert started.pid in children._children()
            assert sorted(children._children()) == sorted(children._children_by_parent())
        finally:
            os.close(read)
            os.close(write)
    assert started.pid not in children._children()


@pytest.fixture
def mine() -> Iterator[children.Children]:
    handler = signal.getsignal(signal.SIGCHLD)
    kept = children.Children()
    yield kept
    kept.leave_in_child()
    signal.signal(signal.SIGCHLD, handler)


def test_who_was_awaited_is_not_waited_for_again_nor_signalled(
    mine: children.Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pid may have been reused by then."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    mine.own.add(pid)
    mine.await_end(pid)
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    mine.end(ask=True)
    assert mine.own == set()
    assert pid not in signalled  # (the test run's host agent may have been signalled)


def test_the_end_waits_for_an_exit_between_two_looks(
    mine: children.Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking all the time would slow down the processes that are to exit."""
    steps: list[str] = []

    def wait(_timeout: float) -> None:
        steps.append("wait")
        mine.own.clear()

    poll = SimpleNamespace(register=lambda fd, mask: None, poll=wait)
    monkeypatch.setattr(select, "poll", lambda: poll)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    monkeypatch.setattr(children, "_children", list)
    monkeypatch.setattr(mine, "reap", lambda: steps.append("look"))
    mine.own.add(os.getpid())
    mine.end(ask=True)
    assert steps == ["look", "wait", "look", "look"]


def test_an_orphan_is_killed_at_once_or_after_the_time_that_it_has_to_clean_up(
    mine: children.Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    killed: list[int] = []
    graces = {7: 0.0, 8: 5.0}
    monkeypatch.setattr(children, "_children", lambda: [*graces])
    monkeypatch.setattr(children, "_grace", graces.__getitem__)
    monkeypatch.setattr(children.time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    mine.sweep()
    assert killed == [7]
    del graces[7]
    assert mine.sweep() == 105.0
    assert killed == [7]
    now = 105.0
    mine.sweep()
    assert killed == [7, 8]


@pytest.mark.parametrize(
    ("command", "grace"),
    [("cat", 0.0), ("multiprocessing.resource_tracker", children.GRACE)],
    ids=["any other", "it removes what processes share"],
)
def test_a_process_that_cleans_up_after_others_has_time_for_it(command: str, grace: float) -> None:
    with subprocess.Popen([command], executable="cat", stdin=subprocess.PIPE) as started:
        line = Path(f"/proc/{started.pid}/cmdline")
        while not line.read_bytes().startswith(command.encode()):
            pass  # the kernel is about to show the new command
        assert children._grace(started.pid) == grace
