"""A process that receives malformed frames closes that link and stays healthy."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch._engine.runtime.agent.client import client_proc
from monarch._engine.transport.link import Link
from monarch._engine.wire import frame as wire
from monarch._engine.wire.frame import HEADER, pack
from monarch.actor import Actor, SupervisionError, endpoint

from .conftest import WAIT, Inside, until

Fresh = Callable[..., Any]

NOBODY = 1 << 50  # no actor and no port has this number

GARBAGE = {
    "text": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "zeros": bytes(4096),
    "random": os.urandom(70_000),
    "huge": HEADER.pack(2**32 - 1, wire.CALL, 0, 0, NOBODY, 0, 0, 0, 0),
    "segment without descriptor": pack(wire.CALL, NOBODY, 0, 0, b"", b"x" * 36, wire.SEGMENT, 1),
    "segment table cut short": pack(wire.POST, NOBODY, 0, 0, b"", b"x", wire.SEGMENT, 0),
    "control from a peer": pack(wire.CONTROL, 0, 0, 0, b"", b'{"op":"gone","procs":[]}'),
    "spawn with bad meta": pack(wire.SPAWN, NOBODY, 0, 0, b"\xff[", b""),
    "spawn of nobody": pack(wire.SPAWN, NOBODY, 0, 0, b"[1]", b""),
    "event that is no failure": pack(wire.EVENT, NOBODY, 0, 0, b"", b"garbage"),
    "release cut short": pack(wire.RELEASE, 0, 0, 0, b"", b"abc") + b"\xff" * 64,
}


class Vandal(Actor):
    @endpoint
    def write_to(self, uid: int, data: bytes, hang_up: bool = False) -> str:
        """Send raw bytes to another proc and return the reason for which the link was closed."""
        link = client_proc().link_to(uid)
        assert isinstance(link, Link)
        with contextlib.suppress(OSError):  # the peer may close the link during the send
            link.sock.send(data)
            if hang_up:
                link.sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + WAIT
        while link.lost is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return link.lost or "the peer kept the link"


@pytest.mark.internal_errors
@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.usefixtures("reactor_is_well")
def test_garbage_from_a_proc(fresh: Fresh, kind: str) -> None:
    procs = fresh(2)
    inside = procs.spawn("inside", Inside)
    victim = inside.slice(gpus=0)
    pid = victim.pid.call_one().get(timeout=WAIT)
    uid = victim.uid.call_one().get(timeout=WAIT)
    vandal = procs.spawn("vandal", Vandal).slice(gpus=1)
    reason = vandal.write_to.call_one(uid, GARBAGE[kind]).get(timeout=2 * WAIT)
    assert "closed the connection" in reason or "broke" in reason
    assert victim.pid.call_one().get(timeout=WAIT) == pid
    assert victim.tables.call_one().get(timeout=WAIT)["cells"] >= 1


@pytest.mark.internal_errors
def test_nothing_in_a_control_frame_is_unpickled(fresh: Fresh, tmp_path: Any) -> None:
    """Only payloads are unpickled; an event that reports an actor's exit is not a payload."""
    procs = fresh(2)
    trace = tmp_path / "unpickled"
    inside = procs.spawn("inside", Inside)
    uid = inside.slice(gpus=0).uid.call_one().get(timeout=WAIT)
    vandal = procs.spawn("vandal", Vandal).slice(gpus=1)
    pickle = f"cpathlib\nPath\n(V{trace}\ntR.".encode()
    touch = b"cbuiltins\ngetattr\n(" + pickle[:-1] + b"Vtouch\ntR(tR."
    data = pack(wire.EVENT, NOBODY, 0, 0, b"", touch)
    vandal.write_to.call_one(uid, data, hang_up=True).get(timeout=2 * WAIT)
    assert inside.slice(gpus=0).uid.call_one().get(timeout=WAIT) == uid
    assert not trace.exists()


@pytest.mark.failures
@pytest.mark.usefixtures("reactor_is_well")
@pytest.mark.parametrize("kind", ["text", "random"])
def test_garbage_from_a_proc_to_its_host_agent(fresh: Fresh, kind: str) -> None:
    """The agent closes the link to that proc only, and no other proc is affected."""
    good = fresh(1).spawn("inside", Inside)
    bad = fresh(1).spawn("vandal", AgentVandal)
    pid = good.pid.call_one().get(timeout=WAIT)
    bad.write.broadcast(GARBAGE[kind])
    ended = []
    bad_pids = until(lambda: ended or not _answers(bad, ended))
    assert bad_pids
    assert good.pid.call_one().get(timeout=WAIT) == pid
    assert fresh(1).spawn("inside", Inside).pid.call_one().get(timeout=WAIT) != pid


def _answers(mesh: Any, ended: list[BaseException]) -> bool:
    try:
        mesh.write.call_one(b"").get(timeout=WAIT)
    except SupervisionError as error:
        ended.append(error)
    return not ended


class AgentVandal(Actor):
    @endpoint
    def write(self, data: bytes) -> None:
        agent = client_proc().agent
        assert agent is not None
        if data:
            agent.sock.send(data)
            # In reply the agent closes this link and ends this process.


@pytest.mark.failures
@pytest.mark.usefixtures("reactor_is_well")
def test_garbage_to_the_client(fresh: Fresh) -> None:
    good = fresh(1).spawn("inside", Inside)
    bad = fresh(1).spawn("vandal", Vandal)
    pid = good.pid.call_one().get(timeout=WAIT)
    client = client_proc().uid
    with pytest.raises(SupervisionError, match=r"protocol error|closed"):
        bad.write_to.call_one(client, GARBAGE["text"]).get(timeout=WAIT)
    assert good.pid.call_one().get(timeout=WAIT) == pid
    assert isinstance(client_proc().agent, Link)
    assert isinstance(client_proc().agent.sock, socket.socket)
