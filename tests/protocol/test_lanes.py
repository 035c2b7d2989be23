"""Lanes keep their own order, share the link fairly, and delay no message for long."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.protocol.session.lanes import CONTROL, OVERHEAD, Lanes, Message

QUANTUM = 10_000


def lanes(limit: int = 1 << 40) -> Lanes:
    return Lanes(QUANTUM, limit)


def text(piece) -> bytes:
    return b"".join(map(bytes, piece))


def test_pieces_are_views_of_the_buffers() -> None:
    head, body = b"h" * 30, bytearray(3 * QUANTUM)
    queue = lanes()
    queue.put(Message(1, [head, b"", body], None))
    parts = []
    while (taken := queue.take()) is not None:
        parts += taken[1]
    assert all(len(part) for part in parts)
    assert [head, body, body, body, body] == [part.obj for part in parts]
    assert all(part.obj is body for part in parts[1:])


def test_a_message_that_fits_is_sent_as_it_is() -> None:
    buffers = [b"head", b"body"]
    message = Message(1, buffers, "token")
    assert message.take(8) is buffers
    assert (message.left, message.token) == (0, "token")
    rest = Message(1, buffers, None)
    assert text(rest.take(3)) == b"hea"
    assert text(rest.take(8)) == b"dbody"


@pytest.mark.parametrize("sizes", [[], [0], [0, 0], [1], [QUANTUM], [QUANTUM, 1], [0, 25_000, 0]])
def test_every_byte_once(sizes) -> None:
    buffers = [bytes([n % 251]) * size for n, size in enumerate(sizes, 1)]
    message = Message(1, buffers, None)
    queue = lanes()
    queue.put(message)
    got = b""
    while (taken := queue.take()) is not None:
        assert taken[0] is message
        assert len(text(taken[1])) == min(QUANTUM, sum(sizes) - len(got))
        got += text(taken[1])
    assert b"".join(buffers) == got


def test_transfers_share_equally_whatever_their_messages() -> None:
    queue = lanes()
    for lane, size in [(1, 40 * QUANTUM), (2, QUANTUM // 3), (3, 700)]:
        for _ in range(40 * QUANTUM // size):
            queue.put(Message(lane, [bytes(size)], None))
    got = Counter()
    while got.total() < 60 * QUANTUM:
        message, piece = queue.take()
        got[message.lane] += len(text(piece)) + OVERHEAD
    assert max(got.values()) - min(got.values()) <= 2 * QUANTUM


@pytest.mark.parametrize("lane", [CONTROL, 999])
def test_what_is_rare_goes_next(lane) -> None:
    """A call does not wait for transfers, however many are queued."""
    queue = lanes()
    for busy in range(1, 101):
        queue.put(Message(busy, [bytes(100 * QUANTUM)], None))
    for _ in range(250):
        queue.take()
    call = Message(lane, [b"call"], None)
    queue.put(call)
    assert queue.take()[0] is call


def test_a_lane_that_is_always_new_starves_nobody() -> None:
    queue = lanes()
    queue.put(Message(1, [bytes(100 * QUANTUM)], None))
    got = Counter()
    for _ in range(1000):
        queue.put(Message(2, [b"ping"], None))
        got[queue.take()[0].lane] += 1
    assert got[1] >= 10


def test_lanes_that_are_new_in_turn_starve_nobody() -> None:
    queue = lanes()
    queue.put(Message(1, [bytes(1000 * QUANTUM)], None))
    got = Counter()
    for number in range(1000):
        queue.put(Message(2 + number % 4, [b"ping"], None))
        got[queue.take()[0].lane] += 1
    assert got[1] >= 10


def test_a_pause_does_not_give_a_lane_another_turn() -> None:
    queue = lanes()
    for lane in (1, 2):
        queue.put(Message(lane, [bytes(100 * QUANTUM)], None))
    for _ in range(10):
        queue.pause(1)
        queue.resume(1)
    got = Counter(queue.take()[0].lane for _ in range(40))
    assert abs(got[1] - got[2]) <= 2


def test_a_lane_that_is_done_with_leaves_no_trace() -> None:
    queue = lanes()
    message = Message(1, [b"x"], None)
    queue.put(message)
    queue.take()
    queue.acknowledge(message, 1 + OVERHEAD)
    assert queue.take() is None
    assert queue._lanes == {}


def test_nobody_overtakes_control() -> None:
    queue = lanes()
    for lane in (3, CONTROL, 4, CONTROL):
        queue.put(Message(lane, [bytes(2 * QUANTUM)], None))
    assert [queue.take()[0].lane for _ in range(4)] == [CONTROL] * 4
    assert queue.take(control=True) is None
    assert queue.take()[0].lane == 3


def test_a_paused_lane_keeps_its_messages() -> None:
    queue = lanes()
    queue.put(Message(1, [bytes(2 * QUANTUM)], None))
    assert queue.take()[0].lane == 1
    queue.pause(1)
    queue.pause(2)
    queue.put(Message(2, [b"x"], None))
    assert queue.take() is None
    queue.resume(2)
    queue.resume(1)
    assert {1, 2} == {queue.take()[0].lane for _ in range(2)}
    assert queue.take() is None


def test_full_until_half_is_acknowledged() -> None:
    queue = lanes(limit=10 * (100 + OVERHEAD))
    messages = [Message(1, [bytes(100)], None) for _ in range(11)]
    assert [queue.put(message) for message in messages] == [True] * 10 + [False]
    assert not queue.put(last := Message(1, [], None))
    assert queue.put(Message(2, [], None))
    told = [queue.acknowledge(message, 100 + OVERHEAD) for message in messages[:6]]
    assert told == [False] * 6  # the empty one counts, too
    assert queue.acknowledge(last, OVERHEAD)
    assert not queue.acknowledge(messages[6], 100 + OVERHEAD)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 4), st.integers(0, 3 * QUANTUM)),
            st.tuples(st.sampled_from(["pause", "resume"]), st.integers(1, 4)),
            st.tuples(st.just("take")),
            st.tuples(st.just("acknowledge")),
        ),
        max_size=60,
    )
)
def test_any_history(steps) -> None:
    """Each lane keeps order and content; pauses hold; finished messages leave no trace."""
    queue = lanes(limit=2 * QUANTUM)
    waiting = {lane: deque() for lane in range(5)}
    paused: set[int] = set()
    under_way = []
    held: Counter[int] = Counter()
    full: set[int] = set()

    def take() -> bool:
        taken = queue.take()
        if taken is None:
            assert all(not waiting[lane] or lane in paused for lane in waiting)
            return False
        message, piece = taken
        assert message.lane not in paused
        assert message.lane == CONTROL or not waiting[CONTROL]
        assert waiting[message.lane][0] is message
        size = len(text(piece)) + (0 if message.left else OVERHEAD)
        if not message.left:
            waiting[message.lane].popleft()
        under_way.append((message, size))
        return True

    def acknowledge() -> None:
        message, size = under_way.pop(0)
        held[message.lane] -= size
        has_room = message.lane in full and held[message.lane] <= QUANTUM
        if has_room:
            full.remove(message.lane)
        assert has_room == queue.acknowledge(message, size)

    for step in steps:
        match step:
            case ("put", lane, size):
                message = Message(lane, [bytes(size)], None)
                waiting[lane].append(message)
                held[lane] += size + OVERHEAD
                if held[lane] > 2 * QUANTUM:
                    full.add(lane)
                assert (lane not in full) == queue.put(message)
            case ("pause", lane):
                paused.add(lane)
                queue.pause(lane)
            case ("resume", lane):
                paused.discard(lane)
                queue.resume(lane)
            case ("take",):
                take()
            case _:
                if under_way:
                    acknowledge()
    for lane in sorted(paused):
        queue.resume(lane)
    paused.clear()
    while take():
        pass
    while under_way:
        acknowledge()
    assert not full
    assert list(queue) == []
    assert queue._lanes == {}
