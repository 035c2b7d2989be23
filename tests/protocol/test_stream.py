"""Channels over byte streams: any cut, any break, any restart; no copies of large payloads."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarch._engine.base.errors import ProtocolError
from monarch._engine.protocol.session.channel import (
    Acknowledged,
    Channel,
    Connected,
    Deliver,
    Dial,
    Ended,
    Heartbeat,
    Room,
    Terms,
)
from monarch._engine.protocol.session.lanes import CONTROL, OVERHEAD
from monarch._engine.protocol.session.stream import PacketStream
from monarch._engine.wire import packet as wire
from monarch._engine.wire.packet import ACK, BYE, DATA, FLOW, HEADER, HELLO, MAX_PIECE, PING

TERMS = Terms(piece=10_000, window=40_000, lane_limit=100_000, patience=10.0)
SESSIONS = count(1)


class Side:
    """A channel with its end of a connection, and the effects so far."""

    def __init__(self, *, dials: bool, terms: Terms = TERMS, **options) -> None:
        self.name = "ab"[not dials]
        self.channel = Channel(
            next(SESSIONS), dials=dials, now=0.0, terms=terms, peer="ba"[not dials], **options
        )
        self.effects = self.channel.tick(0.0)
        self.connect()

    def connect(self) -> None:
        self.stream = PacketStream(self.channel, "ba"[self.name == "b"])
        self.channel.opened(0.0)

    def outgoing(self) -> bytes:
        return b"".join(self.stream.gather(0.0, 1 << 40))

    def incoming(self, data: bytes, step: int = 1 << 30) -> None:
        """Read as a link does: into `target` while there is one, else `feed`."""
        at = 0
        while at < len(data):
            target = self.stream.target()
            piece = data[at : at + min(step, len(data) if target is None else len(target))]
            if target is None:
                scratch = bytearray(piece)
                self.effects += self.stream.feed(memoryview(scratch), 0.0)
                scratch[:] = bytes(len(scratch))  # the driver reuses its buffer
            else:
                target[: len(piece)] = piece
                self.effects += self.stream.filled(len(piece), 0.0)
            at += len(piece)

    def delivered(self) -> list[tuple[int, bytes]]:
        return [(lane, bytes(data)) for effect in self.of(Deliver) for lane, data in [effect]]

    def of(self, kind):
        return [effect for effect in self.effects if isinstance(effect, kind)]


def pair(**options) -> tuple[Side, Side]:
    a, b = Side(dials=True, **options), Side(dials=False, **options)
    assert [Dial()] == a.effects
    exchange(a, b)
    assert a.channel.up
    assert b.channel.up
    a.effects.clear()
    b.effects.clear()
    return a, b


def exchange(a: Side, b: Side, step: int = 1 << 30) -> None:
    """Carry bytes until neither side has any."""
    while (there := a.outgoing()) + (back := b.outgoing()):
        b.incoming(there, step)
        a.incoming(back, step)


def acknowledge(side: Side) -> None:
    side.effects += side.channel.tick(side.channel.deadline or 0.0)


MESSAGES = [
    (1, b""),
    (2, b"small"),
    (CONTROL, b"urgent"),
    (1, b"exactly a piece".ljust(10_000)),
    (1, bytes(range(256)) * 100),
    (2, b"after it"),
    (3, b"m" * 30_001),
    (1, b""),
]


def by_lane(messages) -> dict[int, list[bytes]]:
    lanes: dict[int, list[bytes]] = {}
    for lane, data in messages:
        lanes.setdefault(lane, []).append(data)
    return lanes


# --------------------------------------------------------------------------------------------------
# Bytes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 31, 32, 33, 4096, 1 << 30])
def test_cut_anywhere(step) -> None:
    a, b = pair()
    for side in (a, b):
        for lane, data in MESSAGES:
            side.channel.send(lane, [data[:7], data[7:]], token=(lane, data))
    exchange(a, b, step)
    for side in (a, b):
        acknowledge(side)
    exchange(a, b, step)
    for side in (a, b):
        assert by_lane(MESSAGES) == by_lane(side.delivered())
        told = [token for effect in side.of(Acknowledged) for token in effect.tokens]
        assert by_lane(MESSAGES) == by_lane(told)
        assert side.channel.idle
        assert side.channel.deadline is None
        assert side.channel.replayed == side.channel.duplicates == 0


def test_big_payloads_are_neither_copied_nor_joined() -> None:
    """Outgoing chunks are views of the sender's buffer; input is read into the given buffer."""
    given_out = []

    def allocate(lane, size):
        given_out.append(memoryview(bytearray(size)))
        return given_out[-1]

    a, b = Side(dials=True), Side(dials=False, allocate=allocate)
    exchange(a, b)
    body = bytearray(b"x" * 35_000)
    a.channel.send(1, [b"head", body])
    buffers = a.stream.gather(0.0, 1 << 40)
    assert sum(len(view) for view in buffers if getattr(view, "obj", None) is body) == 35_000
    b.incoming(b"".join(buffers), 1000)
    assert [Deliver(1, given_out[0])] == b.of(Deliver)
    assert b.of(Deliver)[0].data is given_out[0]
    assert b"head" + body == given_out[0]


def test_the_last_decision_is_the_latest() -> None:
    """A transfer that is taken in small pieces is overtaken at the next piece."""
    a, _ = pair()
    a.channel.send(1, [bytes(100_000)])
    a.stream.gather(0.0, 1)
    a.channel.send(2, [b"call"])
    a.channel.send(CONTROL, [b"control"])
    a.channel.heartbeat(b"first of all")
    packets = [a.channel.next_packet(0.0) for _ in range(4)]
    assert [payload for _, payload in packets[:3]] == [b"first of all", b"control", b"call"]
    assert len(packets[3][1]) == 10_000


def test_control_is_not_held_up_by_the_window() -> None:
    a, b = pair()
    a.channel.send(1, [bytes(100_000)])
    a.outgoing()
    assert a.channel.next_packet(0.0) is None
    assert a.channel._in_flight <= TERMS.window + TERMS.piece + OVERHEAD
    a.channel.send(2, [b"not yet"])
    a.channel.send(CONTROL, [b"now"])
    assert a.channel.next_packet(0.0)[1] == b"now"
    assert a.channel.next_packet(0.0) is None
    assert b.effects == []


def test_heartbeats_are_not_kept() -> None:
    a, b = pair()
    a.channel.heartbeat(b"1")
    a.channel.heartbeat(b"2")
    exchange(a, b)
    assert [Heartbeat(b"2")] == b.effects
    a.channel.heartbeat(b"3")
    a.channel.lost(1.0, 0.0)
    a.channel.heartbeat(b"4")
    a.connect(), b.connect()
    a.channel.heartbeat(b"5")
    exchange(a, b)
    assert [effect.payload for effect in b.of(Heartbeat)] == [b"2"]


# --------------------------------------------------------------------------------------------------
# Connections that break
# --------------------------------------------------------------------------------------------------

SCENARIO = [(1, b"one"), (2, b"t" * 25_000), (1, b"three"), (CONTROL, b"four"), (2, b"five")]


def scenario(a: Side, b: Side) -> bytes:
    for lane, data in SCENARIO:
        a.channel.send(lane, [data], token=data)
        b.channel.send(lane, [data], token=data)
    return a.outgoing()


def points(total: int) -> list[int]:
    """Return the offsets at which a connection is cut: around each header, and some between."""
    a, b = pair()
    scenario(a, b)
    edges, at = {0}, 0
    for sent in a.channel._unacked.values():
        edges |= {at, at + 1, at + 31, at + 32, at + 33}
        at += 32 + sent.size
    assert at == total
    return sorted({min(edge, total) for edge in edges | set(range(0, total, 1777)) | {total}})


POINTS = points(len(scenario(*pair())))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("back", [0, 40, 1 << 30], ids=["silent", "half", "answered"])
def test_a_break_loses_and_doubles_nothing(point, back) -> None:
    a, b = pair()
    data = scenario(a, b)
    b.incoming(data[:point])
    for side in (a, b):
        acknowledge(side)
    a.incoming(b.outgoing()[:back])
    a.channel.lost(1.0, 0.5)
    b.channel.lost(1.0, 0.5)
    a.effects += a.channel.tick(a.channel.deadline)
    assert [Dial()] == a.of(Dial)
    a.connect(), b.connect()
    exchange(a, b)
    for side in (a, b):
        acknowledge(side)
    exchange(a, b)
    for side in (a, b):
        assert by_lane(SCENARIO) == by_lane(side.delivered())
        told = [token for effect in side.of(Acknowledged) for token in effect.tokens]
        assert sorted(data for _, data in SCENARIO) == sorted(told)
        assert [Connected(again=True)] == side.of(Connected)
        assert side.channel.duplicates == 0, "the greeting says what is there"
        assert side.channel.idle


@pytest.mark.parametrize("who", ["dialer", "answerer"])
@pytest.mark.parametrize("point", POINTS)
def test_a_restarted_peer_gets_nothing_of_the_old_stream(point, who) -> None:
    a, b = pair()
    data = scenario(a, b)
    b.incoming(data[:point])
    acknowledge(b)
    survivor, dead = (b, a) if who == "dialer" else (a, b)
    successor = Side(dials=dead is a)
    if survivor is a:
        a.incoming(b.outgoing())
    survivor.channel.lost(1.0, 0.5)
    survivor.effects += survivor.channel.tick(2.0)
    survivor.connect()
    exchange(survivor, successor)
    [ended] = survivor.of(Ended)
    assert "new session" in ended.reason
    assert [] == successor.of(Deliver) == successor.of(Connected)
    told = [token for effect in survivor.of(Acknowledged) for token in effect.tokens]
    assert sorted(data for _, data in SCENARIO) == sorted(told + ended.lost)
    if survivor is a:
        assert set(told) <= {data for _, data in dead.delivered()}
    with pytest.raises(RuntimeError, match="new session"):
        survivor.channel.send(1, [b"too late"])

    # The driver makes a new channel and closes the connection.
    again = Side(dials=survivor is a)
    successor.channel.lost(1.0, 0.5)
    successor.connect()
    exchange(again, successor)
    assert again.channel.up
    assert successor.channel.up
    again.channel.send(1, [b"fresh"])
    exchange(again, successor)
    assert successor.delivered() == [(1, b"fresh")]


def test_an_answer_that_was_lost() -> None:
    """The answerer is up and has sent; the answer was lost, so the dialer greets again."""
    a, b = Side(dials=True), Side(dials=False)
    b.incoming(a.outgoing())
    assert b.channel.up
    b.channel.send(1, [b"early"])
    b.outgoing()
    b.channel.lost(1.0, 0.0)
    a.channel.lost(1.0, 0.0)
    a.connect(), b.connect()
    exchange(a, b)
    assert a.delivered() == [(1, b"early")]


def test_a_new_connection_replaces_one_that_seems_to_be_there() -> None:
    a, b = pair()
    a.channel.send(1, [b"on its way"])
    a.outgoing()
    a.channel.lost(1.0, 0.0)  # only the dialer has noticed
    a.connect(), b.connect()
    exchange(a, b)
    assert b.delivered() == [(1, b"on its way")]


# --------------------------------------------------------------------------------------------------
# Time
# --------------------------------------------------------------------------------------------------


def test_dials_back_off_with_jitter() -> None:
    terms = Terms(redial=1.0, max_redial=4.0, patience=1000.0)
    channel = Channel(1, dials=True, now=0.0, terms=terms)
    delays = []
    now = 0.0
    for jitter in (1.0, 1.0, 1.0, 1.0, 0.0):
        assert [Dial()] == channel.tick(now)
        channel.lost(now, jitter)
        assert channel.tick(now) == []
        delays.append(channel.deadline - now)
        now = channel.deadline
    assert delays == [1.0, 2.0, 4.0, 4.0, 2.0]


@pytest.mark.parametrize(("held", "delay"), [(3.9, 1.0), (4.0, 0.0)])
def test_a_link_that_held_is_dialled_again_at_once(held, delay) -> None:
    terms = Terms(redial=1.0, max_redial=4.0)
    a, _ = pair(terms=terms)
    a.channel.lost(held, 1.0)
    assert held + delay == a.channel.deadline


def test_patience_ends() -> None:
    a, b = pair()
    a.channel.send(1, [b"x"], token="x")
    for side in (a, b):
        side.channel.lost(5.0, 0.0)
    assert b.channel.deadline == 15.0
    assert b.channel.tick(14.9) == []
    [ended] = b.channel.tick(15.0)
    assert ended == Ended("no connection to a for 10 s", [])
    while (due := a.channel.deadline) is not None and due < 15.0:
        assert a.channel.tick(due) == [Dial()]
    assert [Ended("no connection to b for 10 s", ["x"])] == a.channel.tick(15.0)
    assert a.channel.deadline is None
    assert [] == a.channel.tick(99.0) == a.channel.end("again")
    a.channel.opened(99.0)
    a.channel.lost(99.0, 0.0)
    assert a.channel.next_packet(99.0) is None
    assert a.channel.deadline is None


def test_acknowledgements_wait_for_a_ride() -> None:
    a, b = pair()
    a.channel.send(1, [b"x"], token="x")
    b.incoming(a.outgoing())
    assert b.outgoing() == b""
    assert b.channel.deadline == TERMS.ack_delay
    b.channel.tick(TERMS.ack_delay / 2)
    assert b.outgoing() == b""
    b.channel.send(1, [b"y"])
    a.incoming(b.outgoing())
    assert [Acknowledged(["x"])] == a.of(Acknowledged)
    assert b.channel.deadline is None


def test_acknowledgements_of_a_transfer_do_not_wait() -> None:
    """With no data sent back and no time passing, any amount of data gets through."""
    a, b = pair()
    a.channel.send(1, [bytes(1_000_000)], token="x")
    exchange(a, b)
    assert len(b.of(Deliver)[0].data) == 1_000_000


# --------------------------------------------------------------------------------------------------
# Limits
# --------------------------------------------------------------------------------------------------


def test_a_full_lane_says_so_and_says_when_it_is_not() -> None:
    a, b = pair()
    assert a.channel.send(1, [bytes(90_000)])
    assert not a.channel.send(1, [bytes(20_000)])
    assert a.channel.send(2, [b"another lane"])
    b.incoming(a.outgoing())
    assert a.of(Room) == []
    exchange(a, b)
    assert [Room(1)] == a.of(Room)


def test_a_receiver_pauses_a_lane() -> None:
    a, b = pair()
    b.channel.pause(1)
    exchange(a, b)
    a.channel.send(1, [b"held"])
    a.channel.send(2, [b"not held"])
    exchange(a, b)
    assert b.delivered() == [(2, b"not held")]
    a.channel.lost(0.0, 0.0)  # a pause outlives the connection
    a.connect(), b.connect()
    exchange(a, b)
    assert not a.channel.idle
    b.channel.resume(1)
    exchange(a, b)
    assert b.delivered() == [(2, b"not held"), (1, b"held")]


# --------------------------------------------------------------------------------------------------
# Ends of sessions, and violations
# --------------------------------------------------------------------------------------------------


def test_the_peer_is_told_why() -> None:
    a, b = pair()
    a.channel.send(1, [b"x"], token="x")
    assert [Ended("out of memory", ["x"])] == a.channel.end("out of memory")
    b.incoming(a.outgoing())
    assert [Ended("a ended the session: out of memory", [])] == b.effects
    assert a.outgoing() == b.outgoing() == b""


def header(kind, lane=1, size=0, seq=0, ack=0, total=0) -> bytes:
    return HEADER.pack(kind, lane, size, seq, ack, total)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", "does not contain packets"),
        (header(0x6D07), "unknown packet kind 7"),
        (header(DATA, size=5, total=4), "5 bytes of 4"),
        (header(DATA, size=MAX_PIECE + 1, total=1 << 40), "bytes of"),
        (header(PING, size=5000), "5000 bytes"),
        (header(DATA, seq=1), "packet 1 came when 0 was due"),
        (header(ACK, ack=1), "never sent"),
        (header(DATA, size=1, total=1 << 41) + b"x", "more than the limit"),
        (header(DATA, size=8000, total=1 << 41), "more than the limit"),
        (header(DATA, total=5), "does not fit"),
        (header(DATA, size=1, total=5) + b"x" + header(DATA, size=1, seq=1, total=6) + b"x", "fit"),
        (
            header(DATA, size=3, total=5) + b"xxx" + header(DATA, size=3, seq=1, total=5) + b"xxx",
            "fit",
        ),
        (
            header(DATA, size=1, total=9000) + b"x" + header(DATA, size=9000, seq=1, total=9000),
            "fit",
        ),
        (header(FLOW, lane=CONTROL, total=1), "control lane"),
        (header(HELLO, lane=99), "version 99"),
    ],
)
def test_violations_end_the_session(data, words) -> None:
    a, b = pair()
    b.channel.send(1, [b"lost"], token="lost")
    b.incoming(data.ljust(40_000, b"\0") if len(data) > 100 or words == "fit" else data)
    if not b.of(Ended):  # a big payload is in transit
        b.incoming(bytes(40_000))
    [ended] = b.of(Ended)
    assert ended.reason.startswith("protocol error from a: ")
    assert words in ended.reason
    assert ended.lost == ["lost"]
    a.incoming(b.outgoing())
    assert "protocol error from a" in a.of(Ended)[0].reason


def test_what_came_before_a_violation_counts() -> None:
    a, b = pair()
    a.channel.send(1, [b"counts"])
    b.incoming(a.outgoing() + b"\xff" * 32)
    assert [Deliver(1, b"counts"), Ended] == [b.effects[0], type(b.effects[1])]


def test_a_message_that_is_not_wanted() -> None:
    def refuse(lane, size):
        raise ProtocolError(f"no room for {size} bytes")

    a, b = Side(dials=True), Side(dials=False, allocate=refuse)
    exchange(a, b)
    a.channel.send(1, [bytes(20_000)])
    b.incoming(a.outgoing(), 1000)
    assert [Ended("no room for 20000 bytes", [])] == b.of(Ended)


def test_an_answer_to_another_greeting() -> None:
    a = Side(dials=True)
    a.outgoing()
    a.incoming(header(HELLO, lane=wire.VERSION, seq=77, total=78))
    assert "did not send" in a.of(Ended)[0].reason


@given(st.binary(max_size=200), st.booleans())
@example(header(BYE, size=2) + b"\xff\xff", True)
def test_garbage(data, met) -> None:
    """Any bytes lead at most to the end of the session, and claimed sizes allocate no memory."""
    side = pair()[1] if met else Side(dials=False)
    before = len(side.effects)
    side.incoming(data)
    assert all(type(effect) in (Ended, Deliver, Heartbeat) for effect in side.effects[before:])


@given(
    st.lists(
        st.tuples(st.sampled_from([HELLO, DATA, FLOW, ACK, PING, BYE]), *[st.integers(0, 3)] * 5)
    )
)
def test_valid_packets_in_any_order(heads) -> None:
    side = pair()[1]
    for kind, lane, size, seq, ack, total in heads:
        side.incoming(header(kind, lane, size, seq, ack, total) + b"xyz"[:size])
    assert len(side.of(Ended)) <= 1


# --------------------------------------------------------------------------------------------------
# Before and after a session
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dials", [True, False])
def test_a_channel_that_meets_nobody_ends_when_its_patience_does(dials) -> None:
    channel = Channel(1, dials=dials, now=5.0, terms=TERMS, peer="b")
    assert channel.tick(5.0) == [Dial()] * dials, "only one side dials"
    assert channel.deadline == 15.0
    assert channel.tick(14.9) == []
    assert not channel.met
    assert [Ended("no connection to b for 10 s", [])] == channel.tick(15.0)
    assert channel.deadline is None


def test_who_dials_can_leave_that_to_the_other() -> None:
    channel = Channel(1, dials=True, now=0.0, terms=TERMS)
    channel.answer()
    assert channel.deadline == TERMS.patience
    assert channel.tick(1.0) == []
    channel.opened(1.0)
    assert channel.next_packet(1.0) is None, "it greets second"
    channel.lost(2.0, 0.0)
    assert channel.tick(3.0) == [], "nor does it dial again"


def test_sessions_have_numbers() -> None:
    a, b = Channel(3, dials=True, now=0.0), Channel(4, dials=False, now=0.0)
    assert a.sessions == (3, 0)
    assert not a.met
    assert not a.up
    a.opened(0.0), b.opened(0.0)
    assert b.on_packet(a.next_packet(0.0), 0.0) == [Connected(again=False)]
    assert a.on_packet(b.next_packet(0.0), 0.0) == [Connected(again=False)]
    assert a.sessions == (3, 4)
    assert b.sessions == (4, 3)
    assert a.met is b.met is a.up is b.up is True


def test_other_patience_counts_from_the_next_break() -> None:
    a, _ = pair()
    a.channel.be_patient(50.0)
    a.channel.lost(1.0, 0.0)
    while (due := a.channel.deadline) < 51.0:
        assert a.channel.tick(due) == [Dial()]
        a.channel.lost(due, 1.0)
    assert [Ended("no connection to b for 50 s", [])] == a.channel.tick(51.0)


@pytest.mark.parametrize("farewell", [False, True])
def test_a_farewell_is_no_matter_of_the_text(farewell) -> None:
    a, b = pair()
    assert [Ended("over", [], farewell)] == a.channel.end("over", farewell=farewell)
    b.incoming(a.outgoing())
    assert [Ended("a ended the session: over", [], farewell)] == b.effects


def test_a_long_reason_is_cut() -> None:
    a, b = pair()
    a.channel.end("x" * 5000)
    b.incoming(a.outgoing())
    assert [Ended("a ended the session: " + "x" * 1000, [])] == b.effects


@pytest.mark.parametrize("when", ["greeting", "up", "over"])
def test_an_end_is_reported_once(when) -> None:
    a, b = pair() if when != "greeting" else (Side(dials=True), Side(dials=False))
    assert a.channel.ended is None
    if when == "over":
        a.channel.end("first")
        a.outgoing()
    assert [Ended("why", [])] * (when != "over") == a.channel.end("why")
    assert a.channel.ended == ("first" if when == "over" else "why")
    bye = header(BYE, CONTROL, size=3, seq=a.channel.sessions[0]) + b"why"
    assert a.outgoing() == (b"" if when == "over" else bye)
    assert a.outgoing() == b""
    assert not a.channel.up
    assert a.channel.tick(1000.0) == []
    b.effects.clear()
    if when != "over":
        data = HEADER.pack(BYE, CONTROL, 2, 0, 0, 0) + b"ok"
        b.incoming(data)
        assert [Ended("a ended the session: ok", [])] == b.effects
        b.incoming(data)
        assert len(b.effects) == 1


def test_what_is_idle() -> None:
    a, b = pair()
    assert a.channel.idle
    a.channel.send(1, [b"x"])
    assert not a.channel.idle, "it waits"
    b.incoming(a.outgoing())
    assert not a.channel.idle, "it is not acknowledged"
    acknowledge(b)
    a.incoming(b.outgoing())
    assert a.channel.idle
    a.channel.pause(1)
    assert not a.channel.idle
    exchange(a, b)
    acknowledge(b)
    exchange(a, b)
    assert a.channel.idle


def test_a_tick_may_be_a_second_late() -> None:
    """A later tick means that the process did not run in time; the channel then tries again."""
    for late, ends in ((1.0, True), (1.1, False)):
        channel = Channel(1, dials=False, now=0.0, terms=TERMS)
        assert bool(channel.tick(TERMS.patience + late)) == ends


def test_a_connection_for_which_another_is_given_up_is_one_that_broke() -> None:
    _, b = pair()
    b.channel.heartbeat(b"over the old one")
    b.channel.opened(5.0)
    assert b.channel.deadline == 15.0
    assert b.outgoing() == b""
    assert len(b.channel.tick(15.0)) == 1, "nobody has greeted"


def test_packets_of_a_channel_byte_for_byte() -> None:
    """Fields that a kind of packet does not use are 0; a later release may use them."""
    a, b = Channel(3, dials=True, now=0.0), Channel(4, dials=False, now=0.0)
    a.opened(0.0), b.opened(0.0)
    hello = a.next_packet(0.0)
    assert hello == [header(HELLO, 1, seq=3)]
    b.on_packet(hello, 0.0)
    hello = b.next_packet(0.0)
    assert hello == [header(HELLO, 1, seq=4, total=3)]
    a.on_packet(hello, 0.0)
    a.heartbeat(b"beat")
    assert a.next_packet(0.0) == [header(PING, CONTROL, size=4), b"beat"]
    a.send(5, [b"one", b"two"])
    data = a.next_packet(0.0)
    assert data == [header(DATA, 5, size=6, total=6), b"one", b"two"]
    b.on_packet(data, 0.0)
    b.tick(b.deadline)
    assert b.next_packet(0.0) == [header(ACK, CONTROL, ack=1)]
    b.pause(7)
    flow = b.next_packet(0.0)
    assert flow == [header(FLOW, 7, ack=1, total=1)]
    a.on_packet(flow, 0.0)
    b.resume(7)
    assert b.next_packet(0.0) == [header(FLOW, 7, seq=1, ack=1)]
    a.end("over")
    assert a.next_packet(0.0) == [header(BYE, CONTROL, size=4, seq=3), b"over"]


def test_a_greeting_goes_out_while_there_is_a_connection() -> None:
    a = Side(dials=True)
    a.channel.lost(0.0, 0.0)
    assert a.channel.next_packet(0.0) is None


def test_how_long_a_link_held_counts_from_its_greeting() -> None:
    terms = Terms(redial=1.0, max_redial=4.0)
    a, b = Channel(3, dials=True, now=0.0, terms=terms), Channel(4, dials=False, now=0.0)
    for now, held, delay in ((100.0, 1.0, 1.0), (200.0, 1.0, 2.0), (300.0, 4.0, 0.0)):
        a.opened(now), b.opened(now)
        b.on_packet(a.next_packet(now), now)
        a.on_packet(b.next_packet(now), now)
        assert a.up
        a.lost(now + held, 1.0)
        b.lost(now + held, 1.0)
        assert a.deadline == now + held + delay


@pytest.mark.parametrize("dialer_sends", [True, False])
def test_a_link_that_brought_progress_is_dialled_again_at_once(dialer_sends) -> None:
    """However short it was: bytes that are altered again and again end one link after the other."""
    a, b = two()
    sender, receiver = (a, b) if dialer_sends else (b, a)
    for now in range(1, 20):
        sender.send(1, [b"x"])
        receiver.on_packet(sender.next_packet(now), now)
        receiver.tick(receiver.deadline)
        if dialer_sends:
            sender.on_packet(receiver.next_packet(now), now)
        for side in (a, b):
            side.lost(now, 1.0)
        assert a.deadline == now
        assert [Dial()] == a.tick(now)
        meet(a, b, now)


def test_many_dials_fit_into_patience() -> None:
    channel = Channel(3, dials=True, now=0.0, terms=Terms(patience=5.0))
    dials: list[float] = []
    now = 0.0
    while channel.tick(now) == [Dial()]:
        dials.append(now)
        channel.lost(now, 1.0)
        now = channel.deadline
    assert now == 5.0
    assert max(later - earlier for earlier, later in pairwise(dials)) <= 0.5


def meet(a: Channel, b: Channel, now: float = 0.0) -> None:
    """Connect two channels by a new link."""
    a.opened(now), b.opened(now)
    b.on_packet(a.next_packet(now), now)
    a.on_packet(b.next_packet(now), now)
    assert a.up
    assert b.up


def two(**options) -> tuple[Channel, Channel]:
    """Return channels 3 and 4, connected directly, without streams."""
    a, b = Channel(3, dials=True, now=0.0, **options), Channel(4, dials=False, now=0.0, **options)
    meet(a, b)
    return a, b


def fields(*data, **more) -> tuple:
    return HEADER.unpack(header(*data, **more))


def test_a_piece_is_read_into_its_place() -> None:
    given_out = []

    def allocate(lane, size):
        given_out.append((lane, bytearray(size)))
        return given_out[-1][1]

    _, b = two(allocate=allocate, terms=TERMS._replace(message_limit=10))
    first = fields(DATA, 1, size=4, total=10)
    assert b.place(fields(FLOW, 1, size=4, total=10)) is None
    assert b.place(fields(DATA, 1, size=4, seq=1, total=10)) is None, "it is not due"
    assert b.place(fields(DATA, 1, size=4, total=11)) is None, "it is too large"
    assert given_out == []
    b.place(first)[:] = b"0123"
    assert b.receive(first, None, 0.0) == []
    assert b.place(fields(DATA, 1, size=4, seq=1, total=9)) is None, "of another message"
    assert b.place(fields(DATA, 1, size=7, seq=1, total=10)) is None, "more than is left"
    assert b.place(first) is None, "it was here"
    last = fields(DATA, 1, size=6, seq=1, total=10)
    b.place(last)[:] = b"456789"
    [(lane, data)] = b.receive(last, None, 0.0)
    assert (lane, data) == (1, b"0123456789")
    assert given_out == [(1, data)]
    assert data is given_out[0][1]
    third = fields(DATA, 1, size=4, seq=2, total=10)
    b.lost(0.0, 0.0)
    assert b.place(third) is None
    b.opened(0.0)
    assert b.place(third) is None, "it has not been greeted"
    assert len(given_out) == 1


@pytest.mark.parametrize("state", ["down", "over"])
@pytest.mark.parametrize("who", ["dialer", "answerer"])
def test_what_comes_without_a_connection_is_dropped(state, who) -> None:
    a, b = two()
    channel, other = (a, b) if who == "dialer" else (b, a)
    hello = header(HELLO, 1, seq=other.sessions[0], total=channel.sessions[0])
    if state == "down":
        channel.lost(0.0, 0.0)
    else:
        channel.end("over")
    for packet in ([hello], [header(DATA, size=1, total=1), b"x"], [header(BYE)]):
        assert channel.on_packet(packet, 0.0) == []
        assert not channel.up
    assert (channel.ended is None) == (state == "down")


@pytest.mark.parametrize("known", [0, 3])
def test_a_session_that_is_over_does_not_come_back(known) -> None:
    a, _ = two()
    [ended] = a.on_packet([header(HELLO, 1, seq=77, total=known)], 0.0)
    assert "new session" in ended.reason
    assert not a.up
    assert a.next_packet(0.0) is None


@pytest.mark.parametrize(
    ("seq", "known", "lives"), [(3, 4, True), (3, 0, True), (3, 5, False), (5, 4, False)]
)
def test_who_greets_a_session_again(seq, known, lives) -> None:
    _, b = two()
    b.send(1, [b"x"])
    b.next_packet(0.0)
    effects = b.on_packet([header(HELLO, 1, seq=seq, total=known)], 0.0)
    assert b.up == lives
    if lives:
        assert effects == [], "it is up already"
        assert b.next_packet(0.0) == [header(HELLO, 1, seq=4, total=3)]
        assert b.next_packet(0.0) is None, "nor is anything sent again"
    else:
        assert "new session" in effects[0].reason


def test_a_message_may_be_as_large_as_the_limit() -> None:
    for size, ends in ((10, False), (11, True)):
        a, b = two(terms=TERMS._replace(message_limit=10))
        a.send(1, [bytes(size)])
        (effect,) = b.on_packet(a.next_packet(0.0), 0.0)
        assert isinstance(effect, Ended) == ends


def test_who_gives_no_token_is_not_informed() -> None:
    a, b = pair()
    a.channel.send(1, [b"x"])
    a.channel.pause(1)
    exchange(a, b)
    acknowledge(b)
    exchange(a, b)
    assert a.channel.idle
    assert a.effects == []


def test_an_acknowledgement_is_not_put_off_by_what_follows() -> None:
    a, b = two(terms=TERMS)
    for now in (0.0, 0.01):
        a.send(1, [b"x"])
        b.on_packet(a.next_packet(now), now)
        assert b.deadline == TERMS.ack_delay


def test_what_a_session_held_is_let_go_with_it() -> None:
    a, b = pair()
    a.channel.send(1, [bytes(100_000)], token="x")
    a.channel.pause(1)
    b.incoming(a.outgoing())
    assert not a.channel.idle
    assert a.channel.end("over")[0].lost == ["x"]
    b.channel.end("over")
    for channel in (a.channel, b.channel):
        assert channel.idle
        assert not channel._partial
        assert not channel._unacked
