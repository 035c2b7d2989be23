"""A network between two channels in virtual time, as TCP shows it: packets are late, and in order.

Each end drives its channel as a runtime would: it dials on request, reports lost links, asks for
packets, and makes a new channel when a session ends. A link is a pair of ends; packets in transit
when it breaks are lost.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, NamedTuple

from monarch._engine.protocol.session.channel import (
    Acknowledged,
    Channel,
    Connected,
    Deliver,
    Dial,
    Effect,
    Ended,
    Heartbeat,
    Room,
    Terms,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_RETRY = 0.2  # seconds until a dropped packet is sent again; doubled for each further drop


class Faults(NamedTuple):
    drop: float = 0.0
    delay: float = 0.01
    spread: float = 0.0  # added to the delay at random; later packets wait for earlier ones
    refuse: float = 0.0  # the share of dials that fail


class Sent(NamedTuple):
    """The values that distinguish a message from all others; also its content."""

    session: int
    lane: int
    number: int
    size: int

    def content(self) -> bytes:
        return (repr(tuple(self)).encode() + b"|" + bytes(self.size))[: max(self.size, 40)]


class End:
    """One host: its channel to the other host, and the effects of that channel."""

    def __init__(self, world: World, name: str, *, dials: bool) -> None:
        self.world = world
        self.name = name
        self.dials = dials
        self.link: object = None
        self.arrives = 0.0  # when the last packet of this end arrives
        self.sent: list[Sent] = []
        self.acknowledged: list[object] = []
        self.lost: list[object] = []
        self.delivered: list[tuple[int, Sent]] = []  # with the session that accepted it
        self.heartbeats: list[bytes] = []
        self.reasons: list[str] = []
        self.full: set[int] = set()
        self.channel = self.begin()

    def begin(self) -> Channel:
        self.full.clear()
        self.channel = Channel(
            self.world.random.getrandbits(63) + 1,
            dials=self.dials,
            now=self.world.now,
            terms=self.world.terms,
            peer=f"host {'ab'[self.dials]}",
        )
        return self.channel

    def restart(self) -> None:
        """Replace the process at once by a new one; no loss is reported."""
        old = set(self.acknowledged) | set(self.lost)
        session = self.channel._session
        self.sent = [sent for sent in self.sent if sent.session != session or sent in old]
        self.begin()
        self.world.cut()

    def send(self, lane: int, size: int) -> bool:
        sent = Sent(self.channel._session, lane, len(self.sent), size)
        self.sent.append(sent)
        content = sent.content()
        half = len(content) // 2
        if not self.channel.send(lane, [content[:half], b"", content[half:]], sent):
            self.full.add(lane)
        return lane not in self.full

    def carry_out(self, effects: Sequence[Effect]) -> None:
        session = self.channel._session
        for effect in effects:
            match effect:
                case Deliver(lane, data):
                    fields = bytes(data).split(b"|")[0].strip(b"() ").split(b", ")
                    sent = Sent(*map(int, fields))
                    assert sent.content() == data
                    assert sent.lane == lane
                    self.delivered.append((session, sent))
                case Acknowledged(tokens):
                    self.acknowledged += tokens
                case Room(lane):
                    self.full.remove(lane)
                case Heartbeat(payload):
                    self.heartbeats.append(payload)
                case Dial():
                    self.world.dial(self)
                case Connected():
                    assert self.channel.up
                case Ended(reason, lost):
                    self.reasons.append(reason)
                    self.lost += lost
                    self.flush()  # sends the goodbye
                    self.begin()
                    self.world.cut()

    def flush(self) -> None:
        """Send the packets that are waiting."""
        while (packet := self.channel.next_packet(self.world.now)) is not None:
            self.world.carry(self, [bytes(part) for part in packet])

    def other(self) -> End:
        a, b = self.world.ends
        return b if self is a else a


class World:
    def __init__(self, seed: int, faults: Faults, terms: Terms) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.terms = terms
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.packets = 0
        self.a = End(self, "a", dials=True)
        self.b = End(self, "b", dials=False)
        self.ends = (self.a, self.b)

    def at(self, delay: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, event))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def delay(self) -> float:
        return self.faults.delay + self.random.random() * self.faults.spread

    def dial(self, end: End) -> None:
        channel = end.channel

        def arrive() -> None:
            if end.channel is not channel or end.link is not None:
                return
            if self.chance(self.faults.refuse):
                channel.lost(self.now, self.random.random())
                return
            link = object()
            for one in self.ends:
                one.link = link
                one.arrives = self.now
                one.channel.opened(self.now)

        self.at(self.delay(), arrive)

    def cut(self) -> None:
        """Break the link; both ends are notified."""
        for end in self.ends:
            if end.link is not None:
                end.link = None
                end.channel.lost(self.now, self.random.random())

    def carry(self, end: End, packet: list[bytes]) -> None:
        link, other = end.link, end.other()
        assert link is not None
        self.packets += 1
        delay, retry = self.delay(), _RETRY
        while self.chance(self.faults.drop):
            delay += retry
            retry *= 2
        end.arrives = max(end.arrives, self.now + delay)

        def arrive() -> None:
            if other.link is link:
                other.carry_out(other.channel.on_packet(packet, self.now))

        self.count += 1
        heapq.heappush(self.events, (end.arrives, self.count, arrive))

    def flush(self) -> None:
        for end in self.ends:
            end.flush()

    def step(self, until: float = float("inf")) -> bool:
        """Let the next event happen if it is due before `until`; return whether it did."""
        self.flush()
        times = [end.channel.deadline for end in self.ends]
        due = min((time for time in times if time is not None), default=float("inf"))
        event = self.events[0][0] if self.events else float("inf")
        if min(due, event) > until or min(due, event) == float("inf"):
            return False
        self.now = max(self.now, min(due, event))
        if event <= due:
            heapq.heappop(self.events)[2]()
        else:
            for end in self.ends:
                before = end.channel.deadline
                if before is not None and before <= self.now:
                    channel = end.channel
                    end.carry_out(channel.tick(self.now))
                    after = channel.deadline
                    assert after is None or after > self.now, "due again at once"
        self.flush()
        return True

    def run(self, seconds: float) -> None:
        """Let that many seconds pass."""
        until = self.now + seconds
        while self.step(until):
            pass
        self.now = until

    def settle(self) -> None:
        """Run until no event is left."""
        for _ in range(200_000):
            if all(end.channel.up and end.channel.idle for end in self.ends):
                return
            assert self.step(), "nothing happens any more, but something is not done"
        raise AssertionError("does not come to rest")

    def check(self) -> None:
        """Check the invariants that hold at any time."""
        for end in self.ends:
            taken = [sent for _, sent in end.delivered]
            assert len(taken) == len(set(taken)), "delivered twice"
            latest: dict[tuple[int, int], int] = {}
            by: dict[int, int] = {}
            for session, sent in end.delivered:
                line = sent.session, sent.lane
                assert latest.get(line, -1) < sent.number, "out of order"
                latest[line] = sent.number
                assert by.setdefault(sent.session, session) == session, "another incarnation's"
            other = end.other()
            assert len(set(other.acknowledged)) == len(other.acknowledged)
            assert len(set(other.lost)) == len(other.lost)
            assert not set(other.lost) & set(other.acknowledged)
            assert set(other.acknowledged) <= set(taken), "acknowledged, not delivered"
            assert end.channel._in_flight >= 0

    def check_all_resolved(self) -> None:
        """At rest, check that each message was acknowledged and delivered, or reported lost."""
        for end in self.ends:
            assert set(end.sent) == set(end.acknowledged) | set(end.lost)
            assert not end.full
