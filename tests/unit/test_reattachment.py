"""A script takes over a job: all hosts of the job, and the meshes with their failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch._failover import claim, reattachment, rendezvous


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


def test_meshes_of_other_owners_stay_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor of this process may own some by then."""
    soon: list[Any] = []
    actor = object()
    owned = SimpleNamespace(owner=actor)
    proc = SimpleNamespace(reactor=SimpleNamespace(call_soon=soon.append), owned={1: owned})
    root = SimpleNamespace(actor_instance=object())
    monkeypatch.setattr(reattachment, "current_proc", lambda: proc)
    monkeypatch.setattr(reattachment, "process_context", lambda: root)
    failures: Any = reattachment._Interim.of([])
    for callback in soon:
        callback()
    assert failures.get(timeout=60) == []
    assert owned.owner is actor


def test_a_mesh_has_answered_when_each_of_its_ranks_has() -> None:
    soon: list[Any] = []
    ports: list[Any] = []
    link: Any = object()
    proc: Any = SimpleNamespace(
        reactor=SimpleNamespace(call_soon=soon.append),
        open_port=lambda sink: ports.append(sink) or 7,  # type: ignore[func-returns-value]
        close_port=lambda _: None,
        say=lambda *_: True,
    )
    done = object()
    reattachment._Present.ask(5, [link, link], proc, done)  # type: ignore[arg-type]
    (present,) = ports
    for rank in (0, 0, 1, 1):
        assert soon == []
        present.deliver(rank, 0, b"", link)
        if rank:
            break
    assert soon == [done]
    present.deliver(1, 0, b"", link)
    assert soon == [done]


def test_a_process_that_is_a_client_already_takes_over_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reattachment, "current_proc", lambda: object())
    with pytest.raises(RuntimeError, match="must come before any other call"):
        reattachment.reattach("yesterday")


def test_a_job_that_was_taken_over_is_that_of_this_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is kept for yet another one, and not begun anew."""
    proc = SimpleNamespace(job="")
    welcome = {"uid": 7, "reign": 2, "agent": 4711, "keepsakes": ["one"]}
    succeeded: list[Any] = []

    def succeed(*arguments: Any) -> Any:
        succeeded.append(arguments)
        return proc

    monkeypatch.setattr(reattachment, "current_proc", lambda: None)
    monkeypatch.setattr(reattachment, "find_secret", lambda _: b"k" * 32)
    monkeypatch.setattr(rendezvous, "knock", lambda *_: ("the link", welcome))
    monkeypatch.setattr(reattachment, "succeed", succeed)
    monkeypatch.setattr(reattachment, "_take_all", lambda job, kept: (job, kept, proc.job))
    assert reattachment.reattach("a") == ("a", ["one"], "a")
    assert succeeded == [(7, 2, ("the link", 4711))]


def test_meshes_of_one_name_are_numbered_in_the_order_of_arrival() -> None:
    named = [("a", 1), ("b", 2), ("a", 3), ("a-2", 4), ("a", 5)]
    assert reattachment._by_name(named) == {"a": 1, "b": 2, "a-2": 3, "a-2-2": 4, "a-3": 5}
