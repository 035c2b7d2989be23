"""A tunnel forwards the frames of a proc in their order, however it packs them."""

from __future__ import annotations

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
