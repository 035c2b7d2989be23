"""`check_link`: the rules that every link between two processes keeps, real or simulated.

The runtime relies on these rules, and the simulator replaces the links. So both kinds of link pass
the same checks. A harness makes the bytes move, since only that differs: a reactor moves them for a
real link, the scheduler in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch._engine.base.errors import ProtocolError
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.frame import CALL, CONTROL, HEADER, POST, Frame, pack

__all__ = ["LinkHarness", "check_link"]

FRAME_LIMIT = 1 << 20
"""The largest frame that the links of a harness accept, in bytes."""

QUEUE_LIMIT = 1 << 20
"""The queue limit of the links of a harness, in bytes."""

_MANY = 10_000


class LinkHarness(Protocol):
    """Two connected links, and what a reactor would do for them."""

    left: Any
    right: Any

    def move(self) -> None:
        """Let sent data arrive, as far as the receivers have room."""

    def receive(self, link: FrameLink) -> list[Frame]:
        """Return all frames that have arrived; like `Link.receive`, detects EOF."""
        ...

    def descriptor(self) -> Any:
        """Return a descriptor that can be sent with a frame."""

    def same(self, sent: Any, arrived: Any) -> bool:
        """Whether `arrived` refers to the same file as `sent`."""
        ...


def check_link(harness: Callable[[], LinkHarness]) -> None:
    """Check one kind of link: raise AssertionError, with the rule, if it breaks a rule.

    `harness` makes a new pair of links for each rule.
    """
    for check in (
        _frames_arrive_whole_and_in_order,
        _both_directions_work,
        _big_frames_arrive,
        _a_receiver_that_does_not_read_fills_the_queue_and_nothing_is_lost,
        _waiting_for_room_ends,
        _descriptors_arrive_with_their_frames,
        _the_end_comes_after_what_was_sent,
        _sending_to_one_that_is_gone_fails,
        _giving_up_is_ones_own_business,
        _a_frame_that_is_none_ends_the_link,
        _a_frame_over_the_limit_ends_the_link,
    ):
        pair = harness()
        try:
            check(pair)
        except AssertionError as error:
            rule = check.__name__.strip("_").replace("_", " ")
            raise AssertionError(f"a rule of links is broken: {rule}") from error
        finally:
            pair.left.close("done")
            pair.right.close("done")


def _frame(number: int, body: bytes = b"") -> bytes:
    return pack(CALL, number, number + 1, number + 2, b"meta", body)


def _numbers(frames: list[Frame]) -> list[int]:
    return [frame.dest for frame in frames]


def _frames_arrive_whole_and_in_order(pair: LinkHarness) -> None:
    for number in range(100):
        assert pair.left.send(_frame(number, b"x" * number))
    pair.left.send(_frame(100) + _frame(101))
    pair.move()
    frames = pair.receive(pair.right)
    assert _numbers(frames) == list(range(102))
    assert frames[7] == Frame(CALL, 0, 7, 8, 9, 0, b"meta", b"x" * 7)
    assert pair.receive(pair.right) == []
    assert pair.right.lost is None


def _both_directions_work(pair: LinkHarness) -> None:
    pair.left.send(_frame(1))
    pair.right.send(_frame(2))
    pair.move()
    assert _numbers(pair.receive(pair.left)) == [2]
    assert _numbers(pair.receive(pair.right)) == [1]


def _big_frames_arrive(pair: LinkHarness) -> None:
    body = bytes(range(256)) * 3000
    pair.left.send(_frame(1, body) + _frame(2))
    frames: list[Frame] = []
    while len(frames) < 2:
        pair.move()
        frames += pair.receive(pair.right)
    assert bytes(frames[0].body) == body
    assert _numbers(frames) == [1, 2]


def _fill(pair: LinkHarness) -> int:
    """Send until more than the limit is queued; return how many frames that took."""
    for number in range(_MANY):
        assert pair.left.send(_frame(number, b"x" * 1000))
        if pair.left.queued > pair.left.queue_limit:
            return number + 1
    raise AssertionError("a receiver that reads nothing takes everything")


def _a_receiver_that_does_not_read_fills_the_queue_and_nothing_is_lost(pair: LinkHarness) -> None:
    count = _fill(pair)
    frames: list[Frame] = []
    while len(frames) < count:
        pair.move()
        frames += pair.receive(pair.right)
    assert _numbers(frames) == list(range(count))
    assert pair.left.queued == 0


def _waiting_for_room_ends(pair: LinkHarness) -> None:
    assert pair.left.wait_room(0.0)
    _fill(pair)
    assert not pair.left.wait_room(0.01)
    while pair.left.queued > pair.left.queue_limit // 2:
        pair.move()
        pair.receive(pair.right)
    assert pair.left.wait_room(0.0)
    _fill(pair)
    pair.left.lose("as a test")
    assert pair.left.wait_room(0.0)


def _descriptors_arrive_with_their_frames(pair: LinkHarness) -> None:
    sent = [pair.descriptor() for _ in range(3)]
    pair.left.send(pack(CONTROL, 1, 0, 0, b"", b"", nfd=2), sent[:2])
    pair.left.send(_frame(2))
    pair.left.send(pack(CONTROL, 3, 0, 0, b"", b"", nfd=1), sent[2:])
    pair.move()
    frames = pair.receive(pair.right)
    assert _numbers(frames) == [1, 2, 3]
    arrived = [end for frame in frames for end in pair.right.take_fds(frame.nfd)]
    assert all(map(pair.same, sent, arrived))
    assert len(arrived) == len(sent)
    try:
        pair.right.take_fds(1)
    except ProtocolError:
        return
    raise AssertionError("more descriptors than came")


def _the_end_comes_after_what_was_sent(pair: LinkHarness) -> None:
    pair.left.send(_frame(1))
    pair.left.close("as a test")
    assert not pair.left.send(_frame(2))
    pair.move()
    assert _numbers(pair.receive(pair.right)) == [1]
    pair.move()
    assert pair.receive(pair.right) == []
    assert "closed the connection" in str(pair.right.lost)
    assert not pair.right.send(_frame(3))


def _sending_to_one_that_is_gone_fails(pair: LinkHarness) -> None:
    pair.right.close("as a test")
    pair.move()
    assert not pair.left.send(_frame(1))
    assert pair.left.lost is not None


def _giving_up_is_ones_own_business(pair: LinkHarness) -> None:
    pair.left.lose("as a test")
    pair.left.lose("once only")
    assert pair.left.lost == "as a test"
    assert not pair.left.send(_frame(1))
    pair.move()
    assert pair.receive(pair.right) == []
    assert pair.right.lost is None


def _a_frame_that_is_none_ends_the_link(pair: LinkHarness) -> None:
    pair.left.send(_frame(1))
    pair.move()
    assert _numbers(pair.receive(pair.right)) == [1]
    pair.left.send(b"this is not a frame, whatever it is")
    pair.move()
    _expect_refusal(pair)


def _a_frame_over_the_limit_ends_the_link(pair: LinkHarness) -> None:
    pair.left.send(HEADER.pack(FRAME_LIMIT + 1, POST, 0, 0, 1, 0, 0, 0, 0x6D6F))
    pair.move()
    _expect_refusal(pair)


def _expect_refusal(pair: LinkHarness) -> None:
    refusal = ""
    try:
        pair.receive(pair.right)
    except ProtocolError as error:
        refusal = str(error)
    assert pair.right.peer in refusal, "it was taken for a frame"
    assert pair.right.lost is not None
