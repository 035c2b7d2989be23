"""What a process sends to the host agent for a cast."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._engine.runtime.cast.sender import Casting, Plan, heads_size
from monarch._engine.runtime.proc.body import MappedBody
from monarch._engine.transport.segment import SegmentPool
from monarch._engine.wire.codec import encode, loads
from monarch._engine.wire.frame import CALL, CAST, SEGMENT, FrameReader

THRESHOLD = 1 << 16
AGENT_LIMIT = 1 << 20


class Agent:
    """The link to the host agent."""

    def __init__(self, send: Callable[..., bool]) -> None:
        self.send = send
        self.paused: dict[int, Any] = {}
        self.queued, self.queue_limit = 0, 1


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("size", [10, 2 * THRESHOLD])
def test_a_payload_leaves_in_the_frame_or_in_a_segment(size: int, is_lost: bool) -> None:
    """A segment is in use until the agent releases it, or until it is known that it has none."""
    pool = SegmentPool(AGENT_LIMIT)
    sent: list[tuple[bytes, list[int]]] = []

    def send(frame: bytes, fds: list[int] | None = None) -> bool:
        sent.append((frame, fds or []))
        return not is_lost

    agent = Agent(send)
    link: Any = SimpleNamespace(born=(5, True), lost=None, used=False, casts=0, direct=None)
    casting = Casting(SimpleNamespace(agent=agent, segments=pool), 0)  # type: ignore[arg-type]
    plan = Plan([link], ["there"], "here")
    payload = encode(bytes(size), THRESHOLD)
    lost = casting.send(plan, CALL, 9, 0, b"", payload, 0, None, gathers=False)
    assert lost == ([0] if is_lost else [])
    ((data, fds),) = sent
    (frame,) = FrameReader(AGENT_LIMIT, "").feed(memoryview(data))
    assert (frame.kind, frame.dest, link.casts) == (CAST, 9, 1)
    content = bytes(frame.body[heads_size(frame.body) :])
    if size < THRESHOLD:
        assert (frame.flags & SEGMENT, fds) == (0, [])
        assert loads(content) == bytes(size)
    else:
        assert frame.flags & SEGMENT
        assert payload.stored is not None
        pool.release(None, payload.stored.id)  # the last send
        assert pool.statistics[0] == (0 if is_lost else 1)
        body = MappedBody(content, os.dup(fds[0]), lambda ident: pool.release(agent, ident))
        assert body.load() == bytes(size)
        del body
        assert pool.statistics[0] == 0
    pool.trim()
    pool.trim()
