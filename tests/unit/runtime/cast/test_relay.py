"""The casts at one host, with a carrier made of lists: none is lost, and nobody waits forever."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from monarch._engine.runtime.cast.relay import CastRelay
from monarch._engine.runtime.cast.sender import HEADS
from monarch._engine.runtime.cast.tunnel_end import Cast, TunnelEnd, Way
from monarch._engine.runtime.io.reactor import Timer
from monarch._engine.wire.frame import CALL, CAST, FLOW, Frame, FrameReader

CALLER, RECEIVER = 11, 22


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

    def write_cast(self, cast: Cast, rank: int) -> bool:
        return not self.full


class Host:
    """A relay, and its session with the other host."""

    def __init__(self, name: str, other: str) -> None:
        self.coming: set[tuple[int, int]] = set()
        self.flow: list[tuple[int, bool]] = []  # FLOW to procs here
        self.relay = CastRelay(self, name)
        self.peer = Peer()
        self.way: Way | None = self.relay.way(other, self.peer)  # type: ignore[arg-type]

    def cast_way(self, host: str, *, dial: bool) -> Way | None:
        return self.way

    def cast_comes(self, near: int, far: int) -> bool:
        return (near, far) in self.coming

    def cast_tell(self, proc: int, frame: bytes) -> None:
        (told,) = FrameReader(1 << 20, "").feed(memoryview(frame))
        assert told.kind == FLOW
        self.flow.append((proc, bool(told.flags)))

    def cast_at(self, when: float, action: Callable[[], None]) -> Timer:
        return Timer(when, action)

    def cast_now(self) -> float:
        return 0.0

    def open(self, near: int, far: int, *, ours: bool) -> End:
        assert self.way is not None
        end = End(self.relay, self.way, near, far, ours=ours)
        self.relay.opened(end)
        self.relay.attached(end)
        return end

    def cast(self, number: int) -> None:
        """Cast to rank 0, the receiver, which is on the other host."""
        new = json.dumps([number, 0, 2, [], []]).encode()
        plan = json.dumps([["there", [[RECEIVER, 1, 0, 1]]]]).encode()
        body = HEADS.pack(len(new), len(plan)) + new + plan
        self.relay.begin(CALLER, Frame(CAST, 0, 0, 0, CALL, 0, b"", body))


@pytest.fixture
def here() -> Host:
    return Host("here", "there")


@pytest.fixture
def there(here: Host) -> Host:
    """The other host, with the receiver; what is sent from here arrives at once."""
    there = Host("there", "here")
    here.peer.deliver = lambda lane, data: there.relay.received(there.way, lane, data)  # type: ignore[arg-type]
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
