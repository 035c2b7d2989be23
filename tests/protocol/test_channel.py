"""Channels over connections that are slow and break: above, only delays are visible."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch._engine.protocol.session.channel import Channel, Dial, Ended, Terms
from monarch._engine.protocol.session.lanes import OVERHEAD
from tests.protocol.network import Faults, World

TERMS = Terms(
    piece=100,
    window=1000,
    lane_limit=3000,
    patience=1e6,
    redial=0.05,
    max_redial=1.0,
    ack_delay=0.01,
)
SIZES = [0, 50, 99, 100, 101, 1000, 2500]
BAD = Faults(drop=0.2, delay=0.01, spread=0.1, refuse=0.3)


def test_a_good_network_is_used_once() -> None:
    """No packet is sent again while a connection lasts."""
    world = World(0, Faults(), TERMS)
    for lane in range(4):
        for size in SIZES:
            world.a.send(lane, size)
    world.settle()
    world.check()
    world.check_all_resolved()
    assert world.a.channel.replayed == world.b.channel.duplicates == 0
    assert world.a.lost == []
    world.run(1.0)
    assert world.a.channel.deadline is world.b.channel.deadline is None


faults = st.builds(
    Faults,
    drop=st.sampled_from([0.0, 0.05, 0.3]),
    delay=st.sampled_from([0.0, 0.01]),
    spread=st.sampled_from([0.0, 0.05, 0.5]),
    refuse=st.sampled_from([0.0, 0.5]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.booleans(), st.integers(0, 3), st.sampled_from(SIZES)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.05, 1.0, 20.0])),
        st.tuples(st.just("cut")),
        st.tuples(st.just("pause"), st.booleans(), st.integers(1, 3)),
        st.tuples(st.just("resume"), st.booleans(), st.integers(1, 3)),
    ),
    max_size=40,
)
ends = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.booleans(), st.integers(0, 3), st.sampled_from(SIZES)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.05, 1.0, 20.0])),
        st.tuples(st.just("cut")),
        st.tuples(st.just("restart"), st.booleans()),
        st.tuples(st.just("end"), st.booleans()),
    ),
    max_size=40,
)


def play(world: World, plan) -> None:
    for step in plan:
        match step:
            case ("send", dialer, lane, size):
                end = world.ends[not dialer]
                if lane not in end.full:
                    end.send(lane, size)
            case ("wait", seconds):
                world.run(seconds)
            case ("cut",):
                world.cut()
            case ("pause", dialer, lane):
                world.ends[not dialer].channel.pause(lane)
            case ("resume", dialer, lane):
                world.ends[not dialer].channel.resume(lane)
            case ("restart", dialer):
                world.ends[not dialer].restart()
            case ("end", dialer):
                end = world.ends[not dialer]
                end.carry_out(end.channel.end("enough"))
        world.flush()
        for end in world.ends:
            channel = end.channel
            control = sum(
                sent.size + OVERHEAD for sent in channel._unacked.values() if not sent.lane
            )
            flow = sum(OVERHEAD for sent in channel._unacked.values() if sent.message is None)
            bound = TERMS.window + TERMS.piece + OVERHEAD
            assert channel._in_flight - control - flow <= bound, "more under way than a window"
        world.check()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), faults=faults, plan=steps)
def test_nothing_is_lost_while_the_session_lives(seed, faults, plan) -> None:
    world = World(seed, faults, TERMS)
    play(world, plan)
    for end in world.ends:
        for lane in (1, 2, 3):
            end.channel.resume(lane)
    world.settle()
    world.check()
    world.check_all_resolved()
    for end in world.ends:
        assert [] == end.lost == end.reasons
        assert sorted(end.sent) == sorted(sent for _, sent in end.other().delivered)
        assert end.channel.deadline is None or end.channel._ack_at is not None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), faults=faults, plan=ends)
def test_restarts_and_ends_at_any_time(seed, faults, plan) -> None:
    """Each message is acknowledged or reported lost, and none reaches another incarnation."""
    world = World(seed, faults, TERMS)
    play(world, plan)
    world.settle()
    world.check()
    world.check_all_resolved()


@pytest.mark.parametrize("seed", range(5))
def test_a_transfer_through_a_bad_network(seed) -> None:
    world = World(seed, BAD, TERMS)
    for number in range(300):
        for end in world.ends:
            while number % 3 in end.full:
                assert world.step()
            end.send(number % 3, number * 7 % 900)
        if number % 60 == 59:
            world.cut()
    world.settle()
    world.check()
    world.check_all_resolved()
    assert world.a.channel.replayed > 0


@pytest.mark.parametrize("seed", range(5))
def test_a_partition_longer_than_patience_ends_both_sides(seed) -> None:
    world = World(seed, BAD._replace(refuse=0.0), TERMS._replace(patience=5.0))
    world.run(3.0)
    assert world.a.channel.up
    sessions = [end.channel._session for end in world.ends]
    for end in world.ends:
        end.send(1, 100)
    world.cut()
    world.faults = world.faults._replace(refuse=1.0)
    world.run(20.0)
    for end in world.ends:
        assert "no connection" in end.reasons[0]
        assert end.lost == [sent for sent in end.sent if sent not in end.acknowledged]
        end.send(1, 100)
    world.faults = Faults()
    world.settle()
    assert not {end.channel._session for end in world.ends} & set(sessions)
    world.check()
    world.check_all_resolved()


def test_the_bytes_a_channel_holds_are_bounded() -> None:
    """A sender that heeds `send` makes the channel hold at most a lane's limit and one message."""
    world = World(0, Faults(refuse=1.0), TERMS._replace(patience=1e9))
    end = world.a
    for _ in range(1000):
        if 1 not in end.full:
            end.send(1, 1000)
        world.run(1.0)
    held = sum(message.total + OVERHEAD for message in end.channel._lanes)
    assert held <= TERMS.lane_limit + 1000 + OVERHEAD


@pytest.mark.parametrize("dials", [True, False])
def test_a_machine_that_was_stopped_is_as_patient_as_ever(dials: bool) -> None:
    """During the stop it did not try to connect, and no peer could connect to it."""
    terms = TERMS._replace(patience=5.0)
    channel = Channel(1, dials=dials, now=0.0, terms=terms)
    channel.tick(0.0)
    channel.lost(0.1, 0.5)
    woken = 86_400.0
    assert not any(isinstance(effect, Ended) for effect in channel.tick(woken))
    if dials:
        channel.lost(woken, 0.5)
    said = []
    while (due := channel.deadline) is not None:
        now = due
        said = channel.tick(now)
        if dials and said == [Dial()]:
            channel.lost(now, 0.5)
    assert woken + 5.0 == now
    assert any(isinstance(effect, Ended) for effect in said)
