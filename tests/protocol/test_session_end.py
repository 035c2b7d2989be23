"""The end of a session between two hosts: each cause, by either side, up or down.

Of two channels one dials. A session ends once at each side that still runs, a farewell is reported
only where one was said in this session, and unacknowledged messages are reported as lost.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import pytest

from monarch._engine.protocol.session.channel import (
    Acknowledged,
    Channel,
    Connected,
    Deliver,
    Ended,
    Terms,
)
from monarch._engine.protocol.session.lanes import CONTROL
from monarch._engine.wire.packet import BYE, HEADER

PATIENCE = 5.0
NUMBERS: Iterator[int] = itertools.count(1)


class Side:
    """A host: its channel, and what the channel has reported."""

    def __init__(self, *, dials: bool) -> None:
        self.dials = dials
        self.reports: list[object] = []
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Begin another session."""
        terms = Terms(patience=PATIENCE)
        self.channel = Channel(next(NUMBERS), dials=self.dials, now=now, terms=terms)

    def ends(self) -> list[bool]:
        """Return for each end of a session whether it was a farewell."""
        return [report.farewell for report in self.reports if isinstance(report, Ended)]


class Pair:
    """Two hosts; `one` is the side that a cause strikes."""

    def __init__(self, *, one_dials: bool) -> None:
        self.now = 0.0
        self.one, self.other = Side(dials=one_dials), Side(dials=not one_dials)
        self.sides = self.one, self.other

    def connect(self) -> None:
        for side in self.sides:
            side.channel.tick(self.now)
            side.channel.opened(self.now)
        self.exchange()

    def disconnect(self) -> None:
        for side in self.sides:
            side.channel.lost(self.now, 0.0)

    def exchange(self) -> None:
        """Carry packets until no side has any."""
        moved = True
        while moved:
            moved = False
            for side, peer in (self.sides, self.sides[::-1]):
                while (packet := side.channel.next_packet(self.now)) is not None:
                    moved = True
                    received = [bytes(part) for part in packet]
                    peer.reports += peer.channel.on_packet(received, self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass, without a connection."""
        until = self.now + seconds
        while True:
            due = [side.channel.deadline for side in self.sides]
            self.now = min((when for when in due if when is not None), default=until)
            if self.now > until:
                self.now = until
                return
            if self.now == until:
                return
            for side in self.sides:
                for report in side.channel.tick(self.now):
                    if isinstance(report, Ended):
                        side.reports.append(report)
                    else:
                        side.channel.lost(self.now, 0.0)  # the dial fails


@pytest.fixture(params=[True, False], ids=["the dialer", "the answerer"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Make two hosts with a session, and a message of each that has not left yet."""
    made = Pair(one_dials=request.param)
    made.connect()
    assert [side.reports for side in made.sides] == [[Connected(again=False)]] * 2
    return made


def queue(pair: Pair) -> None:
    for side in pair.sides:
        side.channel.send(1, [b"late"], token=side)


def check_next_session(pair: Pair) -> None:
    """Check that the successors meet, and that no message of the old session reaches them."""
    for side in pair.sides:
        side.reports.clear()
        if side.channel.ended is not None:
            side.begin(pair.now)
    pair.connect()
    if not all(side.channel.up for side in pair.sides):  # one had to learn that the other is new
        for side in pair.sides:
            if side.channel.ended is not None:
                side.begin(pair.now)
        pair.disconnect()
        pair.connect()
    for side in pair.sides:
        assert side.channel.up
        assert not [report for report in side.reports if isinstance(report, Deliver)]
        assert not [report for report in side.reports if isinstance(report, Acknowledged)]


@pytest.mark.parametrize("farewell", [True, False])
def test_both_sides_report_the_end_that_one_side_says(pair: Pair, farewell: bool) -> None:
    pair.one.reports += pair.one.channel.end("enough", farewell=farewell)
    pair.exchange()
    assert pair.one.ends() == pair.other.ends() == [farewell]
    pair.disconnect()
    pair.wait(2 * PATIENCE)
    assert pair.one.ends() == pair.other.ends() == [farewell]
    check_next_session(pair)


@pytest.mark.parametrize("farewell", [True, False])
def test_an_end_that_is_said_without_a_connection_is_a_loss_for_the_other(
    pair: Pair, farewell: bool
) -> None:
    pair.disconnect()
    queue(pair)
    pair.one.reports += pair.one.channel.end("enough", farewell=farewell)
    pair.wait(2 * PATIENCE)
    assert [farewell] == pair.one.ends()
    assert pair.other.ends() == [False]
    for side in pair.sides:
        ((end),) = [report for report in side.reports if isinstance(report, Ended)]
        assert end.lost == [side]
    check_next_session(pair)


@pytest.mark.parametrize("first", [True, False], ids=["a farewell", "a failure"])
def test_each_side_keeps_its_own_reason_if_both_end_at_once(pair: Pair, first: bool) -> None:
    pair.one.reports += pair.one.channel.end("enough", farewell=first)
    pair.other.reports += pair.other.channel.end("broken", farewell=not first)
    pair.exchange()
    assert [first] == pair.one.ends()
    assert [not first] == pair.other.ends()
    check_next_session(pair)


def test_a_connection_that_stays_away_is_a_loss_for_both(pair: Pair) -> None:
    pair.disconnect()
    queue(pair)
    pair.wait(2 * PATIENCE)
    assert pair.one.ends() == pair.other.ends() == [False]
    check_next_session(pair)


@pytest.mark.parametrize("connected", [True, False])
def test_a_side_that_was_replaced_is_a_loss_for_the_other(pair: Pair, connected: bool) -> None:
    """The successor says nothing about the session of its predecessor, which it does not know."""
    queue(pair)
    if connected:  # the other side has not noticed that the connection broke
        pair.one.channel.lost(pair.now, 0.0)
    else:
        pair.disconnect()
    pair.one.begin(pair.now)
    pair.connect()
    assert pair.one.ends() == []
    assert pair.other.ends() == [False]
    ((end),) = [report for report in pair.other.reports if isinstance(report, Ended)]
    assert "began a new session" in end.reason
    assert end.lost == [pair.other]
    check_next_session(pair)


@pytest.mark.parametrize("farewell", [True, False])
def test_a_farewell_of_the_successor_does_not_end_the_session_before(
    pair: Pair, farewell: bool
) -> None:
    """Whatever a successor says before both have met, the old session is a lost one."""
    queue(pair)
    pair.disconnect()
    pair.one.begin(pair.now)
    for side in pair.sides:
        side.channel.tick(pair.now + 1.0)
        side.channel.opened(pair.now + 1.0)
    pair.one.reports += pair.one.channel.end("enough", farewell=farewell)
    pair.exchange()
    assert [farewell] == pair.one.ends()
    assert pair.other.ends() == [False]


def test_a_release_that_does_not_name_the_session_says_farewell(pair: Pair) -> None:
    bye = HEADER.pack(BYE, CONTROL, 2, 0, 0, 1)
    pair.other.reports += pair.other.channel.on_packet([bye, b"ok"], pair.now)
    assert pair.other.ends() == [True]


class Token:
    """What the sender of a message is told by; here it shows whether the message is kept."""


@pytest.mark.parametrize("has_left", [False, True])
def test_a_session_that_has_ended_keeps_none_of_its_messages(pair: Pair, has_left: bool) -> None:
    token = Token()
    kept = weakref.ref(token)
    channel = pair.one.channel
    channel.send(1, [b"late"], token)
    if has_left:
        assert channel.next_packet(pair.now) is not None
    (end,) = channel.end("enough")
    assert end == Ended("enough", [token], False)
    del token, end
    assert kept() is None
