"""What waits for another process, or for the host agent, goes on when that one is lost."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, Verdict
from monarch._engine.runtime.proc.proc import Proc
from monarch._engine.transport.link import CastLink, Link
from monarch._engine.wire.frame import CONTROL, FLOW, Frame

PEER, OTHER = 2, 3
MAILBOX = 7
EXITED = Verdict(FAILED, "it exited")
WITHOUT_AGENT = Verdict(FAILED, "the host agent ended")


@pytest.fixture
def link(proc: Proc) -> Iterator[Any]:
    ours, theirs = socket.socketpair()
    yield proc.adopt(ours, PEER)
    ours.close()
    theirs.close()


def notice(proc: Proc, *fds: int, **message: Any) -> None:
    """Handle a notice of the host agent, which comes with these descriptors."""
    agent: Any = SimpleNamespace(take_fds_if_any=lambda _: list(fds))
    proc.agent = agent
    body = json.dumps(message).encode()
    proc._on_control(agent, Frame(CONTROL, 0, 0, 0, 0, len(fds), b"", body))


def test_senders_to_a_full_receiver_go_on_when_its_process_is_lost(proc: Proc, link: Any) -> None:
    proc._on_flow(link, Frame(FLOW, 1, MAILBOX, 0, 0, 0, b"", b""))
    gate = link.paused[MAILBOX]
    assert not gate.wait(0)
    proc._on_gone(PEER, EXITED)
    assert gate.wait(0)
    assert not link.paused


def test_who_waits_for_an_end_hears_of_the_end_of_the_agent(proc: Proc) -> None:
    """What is known already of an end stays so."""
    heard: dict[int, Verdict] = {}
    proc.agent = object()  # type: ignore[assignment]
    for uid in (PEER, OTHER):
        proc.when_gone(uid, lambda verdict, uid=uid: heard.update({uid: verdict}))
    proc.when_agent_fails(lambda verdict: heard.update({0: verdict}))
    proc.reactor.call_soon(proc.reactor.stop)
    proc.reactor.run()
    assert heard == {}
    proc.verdicts[OTHER] = EXITED
    proc.bury_everyone(WITHOUT_AGENT)
    assert heard == {PEER: WITHOUT_AGENT, OTHER: EXITED, 0: WITHOUT_AGENT}
    assert proc.verdicts == {PEER: WITHOUT_AGENT, OTHER: EXITED}


def test_what_waits_for_a_silent_agent_fails(proc: Proc) -> None:
    heard: list[Verdict] = []
    proc.spec = {"agent": os.getpid()}
    proc._exit_sinks[PEER] = [heard.append]
    proc.when_agent_fails(heard.append)
    proc._bury_waiting(3.0, [OTHER])
    assert [(each.kind, each.cause) for each in heard] == [(FAILED, INFRASTRUCTURE)] * 2
    assert heard[0] is heard[1]
    assert "answered nothing for 3 s" in heard[0].error
    assert proc.verdicts == dict.fromkeys((PEER, OTHER), heard[0])


def test_a_rank_whose_mesh_has_ended_meanwhile_is_not_recorded_again(proc: Proc, link: Any) -> None:
    waits: list[int] = []
    proc.when_gone = lambda uid, _: waits.append(uid)  # type: ignore[method-assign]
    proc.rank_unreachable(5, 0, link)
    assert waits == []
    proc.owned[5] = object()  # type: ignore[assignment]
    proc.rank_unreachable(5, 0, link)
    assert waits == [PEER]


def test_descriptors_that_a_notice_does_not_need_are_closed(proc: Proc) -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    notice(proc, fd, op="gone", procs=[])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_new_link_to_another_host_needs_no_mark_for_its_first_cast(proc: Proc) -> None:
    """Marks for all new processes of a spawn would be as many messages."""
    procs = [{"uid": PEER}, {"uid": OTHER, "host": "another"}]
    (near, far), launch = proc._launching({}, procs)
    launch()
    assert (type(near), near.used) == (Link, True)
    assert (type(far), far.used) == (CastLink, False)
    for each in (near, far):
        each.close("the test is over")
