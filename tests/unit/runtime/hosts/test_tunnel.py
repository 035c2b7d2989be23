"""A tunnel forwards the frames of a proc in their order, however it packs them."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.hosts.tunnel import Tunnel
from monarch._engine.wire.frame import CALL, MARK, SEGMENT, Frame, FrameReader


@pytest.mark.parametrize("between", ["segment", "mark"])
def test_small_messages_stay_in_order_with_others(
    monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    tunnel = Tunnel.__new__(Tunnel)
    tunnel.expected = {}
    sent: list[list[bytes]] = []
    monkeypatch.setattr(tunnel, "_send", sent.append)
    monkeypatch.setattr(tunnel, "_forward_segment", lambda *_: sent.append([b"the segment"]))

    def call(number: int, flags: int = 0) -> Frame:
        return Frame(CALL, flags, number, 0, 0, 0, b"", b"")

    middle = call(3, SEGMENT) if between == "segment" else Frame(MARK, 0, 3, 0, 0, 0, b"", b"")
    link: Any = None
    tunnel._forward(link, [call(1), call(2), middle, call(4)])
    assert len(sent) == 3
    order = []
    for (data,) in sent:
        if data == b"the segment":
            order.append(3)
        else:
            frames = FrameReader(1 << 20, "").feed(memoryview(data))
            order += [frame.dest for frame in frames]
    assert order == [1, 2, 3, 4]


def test_a_tunnel_that_ends_again_leaves_the_descriptor_to_others() -> None:
    """Its number may have been given to another connection by then."""
    forgotten: list[int] = []
    nothing: Any = SimpleNamespace(drop_holder=lambda _: None, drop=lambda _: None)
    relay: Any = SimpleNamespace(
        opened=lambda _: None, attached=lambda _: None, closed=lambda _: None, repeated=lambda _: []
    )
    reactor: Any = SimpleNamespace(register=lambda *_: None, unregister=forgotten.append)
    session: Any = SimpleNamespace(send=lambda *_: True)
    way: Any = None
    tunnel = Tunnel(
        relay, way, reactor, session, 5, 1, 2, nothing, nothing, 1 << 20, None, ours=True
    )
    ours, its = socket.socketpair()
    fd = ours.fileno()
    tunnel.attach(ours)
    tunnel._end()
    assert forgotten == [fd]
    tunnel.close("the other proc closed its end")
    assert forgotten == [fd]
    its.close()
