"""A job that is kept for another script: its name, and what its agent is told."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from monarch import _spi
from monarch._failover import handles, rendezvous


class Proc:
    """A client; it writes down what its agent is told, and with how many descriptors."""

    uid, reign = 7, 2

    def __init__(self) -> None:
        self.job = ""
        self.context: Any = None
        self.told: list[tuple[dict[str, Any], int]] = []

    def tell_agent(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        self.told.append((message, len(fds or ())))


def test_a_job_is_kept_once_and_then_its_period_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    proc = Proc()
    sock, other = socket.socketpair()
    saved: list[Any] = []
    root = SimpleNamespace(_meshes={1: "a mesh"})
    proc.context = SimpleNamespace(actor_instance=root)
    monkeypatch.setattr(handles, "client_proc", lambda: proc)
    monkeypatch.setattr(handles, "start_agent", lambda: None)
    monkeypatch.setattr(handles, "save", lambda *arguments: saved.append(arguments))
    monkeypatch.setattr(_spi, "find_secret", lambda _: b"k" * 32)
    monkeypatch.setattr(rendezvous, "open_door", lambda job: (sock, f"/run/{job}.door"))
    with other:
        handles.keep_job("a", 60.0, "secret.txt")
    assert sock.fileno() == -1, "the agent has it"
    assert proc.job == "a"
    assert saved == [(proc, root, 1, "a mesh")]
    handles.keep_job("a", 0.0)
    (kept, fds), changed = proc.told
    assert fds == 1
    assert {**kept, "environ": None} == {
        "op": "keep",
        "grace": 60.0,
        "job": "a",
        "reign": 2,
        "secret": "secret.txt",
        "environ": None,
        "path": "/run/a.door",
        "pid": os.getpid(),
    }
    assert changed == ({"op": "keep", "grace": 0.0}, 0)


@pytest.mark.parametrize(
    ("script", "begins"),
    [
        (["/home/me/train_v2.py", "x"], "trainv2-"),
        (["-c"], "c-"),
        (["/home/me/été.py"], "t-"),
        (["..."], "job-"),
        ([], "job-"),
        (["/a/" + "b" * 50 + ".py"], "b" * 20 + "-"),
    ],
)
def test_a_job_without_a_name_has_that_of_its_script_and_a_number(
    monkeypatch: pytest.MonkeyPatch, script: list[str], begins: str
) -> None:
    monkeypatch.setattr("sys.argv", script)
    name = handles._new_name()
    assert rendezvous.check_job_id(name) == name
    assert name.startswith(begins)
    assert len(name) == len(begins) + 8
