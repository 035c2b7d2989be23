"""The process that forks ranks: what a rank keeps of it, and what is left of a rank."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch.spmd.fork_server import rank
from monarch.spmd.fork_server.server import _Server

PID = 7


def test_a_rank_closes_what_is_of_the_server() -> None:
    left: list[str] = []
    server: Any = object.__new__(_Server)
    server._selector = selectors.DefaultSelector()
    server._listening = SimpleNamespace(close=lambda: left.append("listening"))
    connection = SimpleNamespace(close=lambda: left.append("connection"))
    server._connections = [SimpleNamespace(sock=connection)]
    server._children = SimpleNamespace(leave_in_child=lambda: left.append("children"))
    server._lifeline, other_end = os.pipe()
    server._leave()
    assert left == ["listening", "connection", "children"]
    with pytest.raises(OSError):
        os.fstat(server._lifeline)
    os.close(other_end)


@pytest.mark.parametrize("is_rank", [True, False])
def test_what_a_rank_has_left_behind_is_killed_while_the_number_is_its_own(
    is_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other children are orphans that the server has adopted."""
    done: list[Any] = []
    read, write = os.pipe()
    os.set_blocking(read, False)
    exited = [SimpleNamespace(si_pid=PID), None]
    monkeypatch.setattr(os, "waitid", lambda *_: exited.pop(0))
    monkeypatch.setattr(os, "killpg", lambda pid, number: done.append((pid, number)))

    def wait(pid: int, _options: int) -> tuple[int, int]:
        done.append(pid)
        return pid, 3

    monkeypatch.setattr(os, "waitpid", wait)
    told = SimpleNamespace(keys={PID: 5}, tell=lambda **facts: done.append(facts))
    server: Any = object.__new__(_Server)
    server._children = SimpleNamespace(fileno=read)
    server._pids = {PID: told} if is_rank else {}
    server._reap()
    for end in (read, write):
        os.close(end)
    if is_rank:
        assert done == [(PID, signal.SIGKILL), PID, {"op": "exit", "key": 5, "status": 3}]
    else:
        assert done == [PID]


def test_a_script_knows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # and restore it
    path = tmp_path / "script.py"
    path.write_text("assert __name__ == '__main__'\nFOUND = __file__\n")
    rank._run_path(str(path))
    assert vars(sys.modules["__main__"])["FOUND"] == str(path)
