"""A script takes over a job: all hosts of the job, and the meshes with their failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._failover import claim, reattachment


def test_the_script_owns_the_meshes_once_their_ranks_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = object()
    soon: list[Any] = []
    owned = SimpleNamespace(owner=None)
    proc = SimpleNamespace(reactor=SimpleNamespace(call_soon=soon.append), owned={1: owned})
    monkeypatch.setattr(reattachment, "current_proc", lambda: proc)
    monkeypatch.setattr(
        reattachment, "process_context", lambda: SimpleNamespace(actor_instance=root)
    )
    failures: Any = reattachment._Interim.of([])
    owned.owner = failures
    for callback in soon:
        callback()
    assert failures.get(timeout=60) == []
    assert owned.owner is root


def test_hosts_that_a_worker_knows_of_are_attached_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script names one worker of the job; the host there knows the others."""
    proc = SimpleNamespace(notices={})
    worker, first, second = "tcp://10.0.0.1:26600", "tcp:10.0.0.1:26600", "tcp:10.0.0.2:26600"
    attached: list[dict[str, str]] = []

    class Attachment:
        def __init__(self, hosts: dict[str, str], *_: object) -> None:
            attached.append(hosts)

        def ready(self) -> Any:
            known = {"hosts": {first: first, second: second}, "keep": {1: "one"}}
            proc.notices["inherited"](known)
            return SimpleNamespace(get=lambda _: None)

    found = claim.Found(7, 1, 60.0)
    monkeypatch.setattr(claim, "claim", lambda *_: found)
    monkeypatch.setattr(reattachment, "find_secret", lambda *_: b"k" * 32)
    monkeypatch.setattr(reattachment, "succeed", lambda *_: proc)
    monkeypatch.setattr(reattachment, "Attachment", Attachment)
    monkeypatch.setattr(reattachment, "_take_all", lambda _, kept: kept)
    monkeypatch.setattr(reattachment.handles, "keep_job", lambda *_: None)
    taken: Any = reattachment._come_home("a", [worker], None, 60.0)
    assert taken == ["one"]
    assert attached == [{first: first}, {second: second}]
