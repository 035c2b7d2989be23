"""Casts at one host, with a carrier made of lists: none is lost, and no caller waits forever."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.cast.sender import HEADS, answers_in
from monarch._engine.runtime.cast.tunnel_end import Cast, TunnelEnd, Way
from monarch._engine.runtime.io.reactor import Timer
from monarch._engine.wire.frame import (
    ANSWERS,
    CALL,
    CAST,
    FLOW,
    MARK,
    POST,
    Frame,
    FrameReader,
    pack,
)

CALLER, RECEIVER, PORT = 11, 22, 7


class Peer:
    """The session with the other host. Its messages go to the `other` relay, if there is one."""

    def __init__(self) -> None:
        self.sessions = (1, 1)
        self.takes = True  # whether a lane has room after a message
        self.tunnels: list[list[int]] = []  # of each cast that was sent
        self.told: list[bool] = []  # whether the other side's lane was held back
        self.deliver: Callable[[int, bytes], None] = lambda lane, data: None

    def cast(self, lane: int, buffers: Sequence[bytes]) -> bool:
        data = b"".join(buffers)
        head = json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
        if isinstance(head[0], list):
            self.tunnels += [share[2] for share in head[1]]
        self.deliver(lane, data)
        return self.takes

    def hold(self, lane: int, *, on: bool) -> None:
        self.told.append(on)


class End(TunnelEnd):
    """An end of a tunnel whose proc is too slow, if it is `full`."""

    full = False

    def __init__(self, relay: CastRelay, way: Way, near: int, far: int, *, ours: bool) -> None:
        super().__init__(relay, way, near, far, ours=ours)
        self.holds: list[bool] = []

    def write(self, data: Any) -> None: ...

    def write_cast(self, cast: Cast, rank: int) -> bool:
        return not self.full

    def hold(self, *, on: bool) -> None:
        self.holds.append(on)


class Host:
    """A relay, and its session with the other host."""

    def __init__(self, name: str, other: str) -> None:
        self.coming: set[tuple[int, int]] = set()
        self.flow: list[tuple[int, bool]] = []  # FLOW to procs here
        self.answers: list[tuple[list[tuple[int, bytes]], bool]] = []  # to procs, and whether all
        self.timers: list[Callable[[], None]] = []
        self.relay = CastRelay(self, name)
        self.peer = Peer()
        self.relay_way = self.relay.way(other, self.peer)  # type: ignore[arg-type]
        self.way: Way | None = self.relay_way

    def cast_way(self, host: str, *, dial: bool) -> Way | None:
        return self.way

    def cast_comes(self, near: int, far: int) -> bool:
        return (near, far) in self.coming

    def cast_tell(self, proc: int, frame: bytes) -> None:
        (told,) = FrameReader(1 << 20, "").feed(memoryview(frame))
        if told.kind == ANSWERS:
            self.answers.append((list(answers_in(told)), bool(told.flags)))
        else:
            assert told.kind == FLOW
            self.flow.append((proc, bool(told.flags)))

    def cast_at(self, when: float, action: Callable[[], None]) -> Timer:
        self.timers.append(action)
        return Timer(when, action)

    def run(self) -> None:
        """Call what is due later."""
        timers, self.timers = self.timers, []
        for action in timers:
            action()

    @property
    def left(self) -> dict[str, Any]:
        """Entries that the relay keeps."""
        relay, way = vars(self.relay), self.relay_way
        kept = {
            name: relay[name] for name in ("_casts", "_ends", "_queues", "_over_early", "_full")
        }
        for name in ("tunnel_ends", "coming", "last", "lines", "blocked", "tunnels", "gone"):
            kept[name] = getattr(way, name)
        return {name: value for name, value in kept.items() if value}

    def cast_now(self) -> float:
        return 0.0

    def open(self, near: int, far: int, *, ours: bool) -> End:
        assert self.way is not None
        end = End(self.relay, self.way, near, far, ours=ours)
        self.relay.opened(end)
        self.relay.attached(end)
        return end

    def cast(
        self,
        number: int,
        *,
        gathers: bool = False,
        rank: int = 0,
        tied: bool = False,
        stream: bytes = b"",
        content: bytes | None = None,
    ) -> None:
        """Cast to the receiver, which is on the other host."""
        new = json.dumps([number, int(gathers), 2, [rank] if tied else [], []]).encode()
        plan = json.dumps([["there", [[RECEIVER, 1, rank, 1]]]]).encode()
        body = HEADS.pack(len(new), len(plan)) + new + plan + stream
        self.relay.begin(CALLER, Frame(CAST, 0, 0, PORT, CALL, 0, b"", body), content)


@pytest.fixture
def here() -> Host:
    return Host("here", "there")


@pytest.fixture
def there(here: Host) -> Host:
    """The other host, with the receiver; what one of them sends arrives at the other at once."""
    there = Host("there", "here")
    here.peer.deliver = lambda lane, data: there.relay.received(there.relay_way, lane, data)
    there.peer.deliver = lambda lane, data: here.relay.received(here.relay_way, lane, data)
    return there


def test_a_cast_that_waits_for_its_tunnel_leaves_when_its_caller_exits(here: Host) -> None:
    here.coming.add((CALLER, RECEIVER))
    here.cast(1)
    assert here.peer.tunnels == []
    here.relay.caller_gone(CALLER, for_good=True)
    assert len(here.peer.tunnels) == 1


def test_a_plan_follows_a_tunnel_that_was_opened_anew(here: Host) -> None:
    first = here.open(CALLER, RECEIVER, ours=True)
    here.cast(1)
    here.cast(2)
    here.relay.closed(first)
    here.open(CALLER, RECEIVER, ours=True)
    here.cast(3)
    assert here.peer.tunnels == [[1], [1], [2]]


@pytest.mark.parametrize("how", ["drained", "closed"])
def test_casters_go_on_when_a_full_receiver_has_read_or_is_lost(
    here: Host, there: Host, how: str
) -> None:
    here.open(CALLER, RECEIVER, ours=True)
    receiver = there.open(RECEIVER, CALLER, ours=False)
    receiver.full = True
    here.cast(1)
    assert there.peer.told == [True]
    getattr(there.relay, how)(receiver)
    assert there.peer.told == [True, False]


def test_a_caller_goes_on_when_the_host_that_holds_it_back_is_lost(here: Host) -> None:
    here.open(CALLER, RECEIVER, ours=True)
    here.peer.takes = False
    here.cast(1)
    assert here.flow == [(CALLER, True)]
    way, here.way = here.way, None
    assert way is not None
    here.relay.way_over(way, "it is lost")
    assert here.flow == [(CALLER, True), (CALLER, False)]


@pytest.mark.parametrize("end", ["answer", "big answer", "receiver", "caller", "not wanted"])
def test_a_gathered_cast_ends_and_nothing_of_it_is_kept(here: Host, there: Host, end: str) -> None:
    near = here.open(CALLER, RECEIVER, ours=True)
    receiver = there.open(RECEIVER, CALLER, ours=False)
    here.cast(1, gathers=True)
    assert here.answers == []
    answer = Frame(POST, 0, PORT, 0, 0, 0, b"", bytes(1 << 17) if "big" in end else b"yes")
    if "answer" in end:
        assert there.relay.answer(receiver, answer) is (end == "answer")
    elif end == "not wanted":
        here.relay.over(CALLER, 1)
    assert ("_casts" in here.left) == (end in ("receiver", "caller"))
    assert (receiver.expected == {}) == (end == "big answer")
    if end != "caller":
        there.relay.closed(receiver)
        here.relay.closed(near)
    here.relay.caller_gone(CALLER, for_good=True)
    there.relay.caller_left(there.relay_way, CALLER)
    here.relay.caller_left(here.relay_way, RECEIVER)
    here.run()
    if end == "caller":
        there.relay.closed(receiver)
        here.relay.closed(near)
    told: Any = {"answer": [([(0, b"yes")], True)], "caller": [], "not wanted": []}
    assert here.answers == told.get(end, [([], True)])
    assert (here.left, there.left) == ({}, {})
    assert receiver.expected == {}


def test_a_cast_that_is_not_wanted_any_more_is_sent_and_forgotten(here: Host) -> None:
    """It waits for its tunnel when its caller ends the call: the message is not recalled."""
    here.coming.add((CALLER, RECEIVER))
    here.cast(1, gathers=True)
    here.relay.over(CALLER, 1)
    near = here.open(CALLER, RECEIVER, ours=True)
    assert here.peer.tunnels == [[1]]
    assert "_casts" not in here.left
    assert "_over_early" not in here.left
    here.relay.closed(near)
    here.relay.caller_gone(CALLER, for_good=True)
    here.relay.caller_left(here.relay_way, RECEIVER)
    assert here.left == {}


def test_a_tunnel_whose_mark_is_ahead_of_its_cast_is_held_until_that_comes(
    here: Host, there: Host
) -> None:
    here.open(CALLER, RECEIVER, ours=True)
    receiver = there.open(RECEIVER, CALLER, ours=False)
    there.relay.arrived(receiver, pack(MARK, 1, 0, 0, b"", b""))
    assert receiver.holds == [True]
    assert list(there.relay_way.blocked[CALLER]) == [receiver]
    here.cast(1, tied=True)
    assert receiver.holds == [True, False]
    assert there.relay_way.blocked[CALLER] == {}
    there.relay.arrived(receiver, pack(MARK, 2, 0, 0, b"", b""))
    there.relay.closed(receiver)
    assert there.relay_way.blocked[CALLER] == {}


@pytest.mark.parametrize(("stream", "content"), [(b"the content", None), (b"", b"the content")])
def test_the_content_goes_to_the_other_host_from_the_frame_or_from_its_segment(
    here: Host, stream: bytes, content: bytes | None
) -> None:
    sent: list[bytes] = []
    here.peer.deliver = lambda lane, data: sent.append(data)
    here.open(CALLER, RECEIVER, ours=True)
    here.cast(1, stream=stream, content=content)
    (data,) = sent
    assert data.endswith(b"the content")


def test_plans_are_bounded(here: Host) -> None:
    here.open(CALLER, RECEIVER, ours=True)
    for number in range(1, 301):
        here.cast(number, rank=number)
    assert len(here.relay._plans) == 256
