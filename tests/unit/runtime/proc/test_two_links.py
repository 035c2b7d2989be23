"""Two links to one process: each name of the process has one, and both end with the process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.verdict import FAILED, Verdict
from monarch._engine.runtime.proc.links import LostLink
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.wire.frame import POST, pack

OLD, NEW = 2, 3
EXITED = Verdict(FAILED, "it exited")


@pytest.fixture
def ends() -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield both ends of two socket pairs."""
    ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
    yield list(ours), list(theirs)
    for sock in (*ours, *theirs):
        sock.close()


def test_a_replaced_process_has_its_link_under_both_names(proc: Proc, ends: Any) -> None:
    (ours, _), _ = ends
    link = proc.adopt(ours, OLD)
    proc._on_moved(OLD, NEW, handed=True)
    assert proc.link_to(OLD) is proc.link_to(NEW) is link
    assert proc.every_link() == [proc.local, link]


def test_each_name_keeps_its_link_until_the_process_ends(proc: Proc, ends: Any) -> None:
    (first, second), theirs = ends
    old, new = proc.adopt(first, OLD), proc.adopt(second, NEW)
    proc._on_moved(OLD, NEW, handed=True)
    assert (proc.link_to(OLD), proc.link_to(NEW)) == (old, new)
    assert set(proc.every_link()) == {proc.local, old, new}
    got: list[int] = []
    lost: list[Any] = []
    sink: Any = SimpleNamespace(
        deliver=lambda rank, flags, body, link: got.append(rank),
        peer_lost=lambda link, verdict: lost.append(link),
    )
    port = proc.open_port(sink)
    for number, their in enumerate(theirs):  # the sockets stay open, as if a child had them
        their.send(pack(POST, port, 0, number, b"", b""))
    proc._on_gone(NEW, EXITED)
    assert sorted(got) == [0, 1], "what was sent before the exit counts"
    assert sorted(map(id, lost)) == sorted(map(id, (old, new)))
    assert proc.every_link() == [proc.local]
    assert isinstance(proc.link_to(OLD), LostLink)
    assert proc.link_to(OLD).uid == NEW


def test_a_process_that_connected_at_the_same_time_is_read_on_both(proc: Proc, ends: Any) -> None:
    (first, second), _ = ends
    ours, its = proc.adopt(first, NEW, ours=True), proc.adopt(second, NEW)
    assert proc.link_to(NEW) is ours, "this process goes on to send there"
    assert set(proc.every_link()) == {proc.local, ours, its}
    its.lose("it is the first to be lost")
    proc._on_lost(its)
    proc._on_gone(NEW, EXITED)
    assert proc.every_link() == [proc.local]
