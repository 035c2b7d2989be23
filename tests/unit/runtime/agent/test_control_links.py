"""The control links of an agent: what a process sent before its exit is handled."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from monarch._engine.runtime.agent import control
from monarch._engine.runtime.agent.control_links import ControlLinks
from monarch._engine.runtime.io.reactor import Reactor


@pytest.mark.parametrize("held", [False, True], ids=["closed", "held by a child"])
def test_a_request_that_takes_several_reads_is_handled_before_the_exit(held: bool) -> None:
    reactor = Reactor()
    reactor.scratch = memoryview(bytearray(4096))  # smaller than the request
    handled: list[Any] = []
    lost: list[Any] = []
    links = ControlLinks(
        reactor,
        lambda _, frame: handled.append(json.loads(bytes(frame.body))),
        lambda _: pytest.fail("a valid request was rejected"),
        lost.append,
    )
    near, far = socket.socketpair()
    link = links.connect(near, "a proc")
    with far:
        requests = [{"op": "kill", "uids": [*range(count)]} for count in (15_000, 1, 15_000)]
        for request in requests:
            far.sendall(control.encode(request))
        if not held:
            far.close()
        links.drain(link)
    assert requests == handled
    assert [link] * (not held) == lost
    links.close(link)
    reactor.close()


def test_an_invalid_message_is_reported_and_ends_the_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reactor = Reactor()
    reactor.scratch = memoryview(bytearray(4096))
    rejected: list[Any] = []
    lost: list[Any] = []

    def refuse(_link: Any, _frame: Any) -> None:
        raise LookupError("no such request")

    links = ControlLinks(reactor, refuse, rejected.append, lost.append)
    near, far = socket.socketpair()
    link = links.connect(near, "a proc")
    with far:
        far.sendall(control.encode({"op": "nonsense"}))
        links.drain(link)
    reactor.close()
    assert [link] == rejected == lost
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("monarch: a proc sent an invalid message and was disconnected: ")
    assert "no such request" in line
