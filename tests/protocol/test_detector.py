"""The failure detector: neither early nor late, once per peer, and on both sides of a cut."""

from __future__ import annotations

import heapq
import random
import struct
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._engine.base.errors import ProtocolError
from monarch._engine.protocol.session.detector import Detector, SendHeartbeat, Suspect, Unreachable

INTERVAL, MINIMUM, MAXIMUM = 0.25, 1.5, 3.0


def detector(maximum: float = MAXIMUM) -> Detector:
    return Detector(INTERVAL, MINIMUM, maximum)


def until(watcher: Detector, end: float):
    """Tick the detector at each deadline up to `end`; return its effects with their times."""
    said = []
    while watcher.deadline is not None and watcher.deadline <= end:
        now = watcher.deadline
        said += [(now, effect) for effect in watcher.tick(now)]
    return said


def verdicts(said):
    return [(now, effect) for now, effect in said if isinstance(effect, Unreachable)]


# --------------------------------------------------------------------------------------------------
# One side
# --------------------------------------------------------------------------------------------------


def test_silence_from_the_beginning() -> None:
    watcher = detector()
    watcher.add("b", 100.0)
    said = until(watcher, 1000.0)
    assert isinstance(said[0][1], SendHeartbeat)
    [(suspected, _)] = [entry for entry in said if isinstance(entry[1], Suspect)]
    [(given_up, verdict)] = verdicts(said)
    assert 100.0 + 2 * INTERVAL <= suspected < given_up
    assert 100.0 + MINIMUM <= given_up <= 100.0 + MAXIMUM
    assert verdict == Unreachable("b", 100.0, deaf=False)
    assert watcher.deadline is None


def test_heartbeats_are_regular() -> None:
    watcher = detector()
    watcher.add("b", 0.0)
    times = []
    for step in range(100):
        watcher.heard("b", step / 10)
        times += [now for now, effect in until(watcher, step / 10 + 0.1)]
    times += [now for now, effect in until(watcher, 11.0) if isinstance(effect, SendHeartbeat)]
    gaps = {round(after - before, 6) for before, after in pairwise(times)}
    assert {INTERVAL} == gaps


def test_many_peers_are_no_burst() -> None:
    watcher = detector()
    for peer in range(1000):
        watcher.add(peer, 0.0)
    sent = [now for now, effect in until(watcher, INTERVAL) if isinstance(effect, SendHeartbeat)]
    assert len(sent) >= 1000
    slots = [sum(slot <= now / INTERVAL * 10 < slot + 1 for now in sent) for slot in range(10)]
    assert max(slots) < 2 * len(sent) / 10
    watcher = detector()
    watcher.add("b", 0.0)
    watcher.add("c", 0.0)
    assert len(watcher.tick(0.0)) == 1, "nor are two due at once"


gaps = st.lists(st.floats(0.0, MINIMUM - 0.01), min_size=1, max_size=40)


@settings(deadline=None)
@given(gaps=gaps, beats=st.booleans())
def test_bounds(gaps, beats) -> None:
    """No verdict while packets arrive often enough; always one after a long enough silence."""
    watcher = detector()
    watcher.add("b", 0.0)
    now = 0.0
    number = count(1)
    for gap in gaps:
        now += gap
        assert verdicts(until(watcher, now)) == []
        if beats:
            assert watcher.on_heartbeat("b", struct.pack("<QQ", next(number), 0), now) == []
        else:
            watcher.heard("b", now)
    [(given_up, verdict)] = verdicts(until(watcher, now + 100))
    assert MINIMUM - 1e-9 <= given_up - now <= MAXIMUM + 1e-9
    assert verdict == Unreachable("b", now, deaf=False)


def test_it_adapts() -> None:
    """A regular network is judged sooner than an irregular one."""
    took = []
    for spread in (0.0, 0.25, 0.5):
        watcher = detector()
        watcher.add("b", 0.0)
        now = 0.0
        for number in range(1, 100):
            now += INTERVAL + (spread if number % 2 else -spread / 2)
            assert verdicts(until(watcher, now)) == []
            assert watcher.on_heartbeat("b", struct.pack("<QQ", number, 0), now) == []
        [(given_up, _)] = verdicts(until(watcher, now + 100))
        took.append(given_up - now)
    assert sorted(took) == took
    assert pytest.approx(took[0]) == MINIMUM
    assert pytest.approx(took[-1]) == MAXIMUM


def test_recovery_is_no_event() -> None:
    watcher = detector()
    watcher.add("b", 0.0)
    said = until(watcher, MINIMUM - 0.01)
    watcher.heard("b", MINIMUM - 0.01)
    said += until(watcher, MINIMUM)
    assert [Suspect("b", 0.0, deaf=False)] == [
        e for _, e in said if not isinstance(e, SendHeartbeat)
    ]
    said = until(watcher, 100.0)
    assert [Suspect, Unreachable] == [
        type(effect) for _, effect in said if not isinstance(effect, SendHeartbeat)
    ]


def test_a_peer_is_suspected_as_soon_as_its_silence_is_not_ordinary() -> None:
    watcher = detector()
    watcher.add("b", 0.0)
    until(watcher, 0.1)
    watcher.heard("b", 0.1)
    [suspected] = [now for now, effect in until(watcher, MINIMUM) if isinstance(effect, Suspect)]
    assert suspected == pytest.approx(0.1 + 3 * INTERVAL)


@pytest.mark.parametrize(("gap", "ordinary"), [(0.25, 0.625), (0.45, 0.85), (1.25, 1.75)])
def test_the_ordinary_gap_is_estimated_as_in_rfc_6298(gap: float, ordinary: float) -> None:
    """A peer is suspected after a longer silence, and given up after three times the gap."""
    for age, expected in [
        (ordinary - 1e-4, []),
        (ordinary + 1e-4, [Suspect]),
        (min(3 * ordinary, MAXIMUM) - 1e-4, [Suspect]),
        (min(3 * ordinary, MAXIMUM) + 1e-4, [Unreachable]),
    ]:
        watcher = detector()
        watcher.add("b", 0.0)
        until(watcher, gap)
        said = watcher.on_heartbeat("b", struct.pack("<QQ", 1, int(age * 1e6)), gap)
        assert [type(effect) for effect in said] == expected
    watcher = detector()
    watcher.add("b", 0.0)
    until(watcher, gap)
    assert watcher.on_heartbeat("b", struct.pack("<QQ", 1, 0), gap) == []
    said = [entry for entry in until(watcher, 100.0) if not isinstance(entry[1], SendHeartbeat)]
    assert [type(effect) for _, effect in said] == [Suspect, Unreachable]
    times = [gap + ordinary, gap + min(3 * ordinary, MAXIMUM)]
    assert [now for now, _ in said] == pytest.approx(times)


def test_a_peer_of_which_anything_arrives_in_time_is_not_given_up() -> None:
    """Heartbeats wait behind other data; the last of them reported that it receives ours."""
    watcher = detector()
    watcher.add("b", 0.0)
    for number in range(1, 100):
        until(watcher, number * INTERVAL)
        watcher.on_heartbeat("b", struct.pack("<QQ", number, 0), number * INTERVAL)
    now = 99 * INTERVAL
    for _ in range(10):
        now += MINIMUM - 0.1
        assert verdicts(until(watcher, now)) == []
        watcher.heard("b", now)


def test_a_verdict_is_the_last_that_is_said_of_a_peer() -> None:
    """This holds for a late tick, and when a heartbeat to the peer is due, too."""
    watcher = detector()
    watcher.add("b", 0.0)
    while not verdicts(said := [(0.0, effect) for effect in watcher.tick(watcher.deadline + 0.2)]):
        pass
    assert len(said) == 1
    assert watcher.deadline is None


def test_each_incarnation_is_given_up_once() -> None:
    watcher = detector()
    for incarnation in range(3):
        watcher.add(("b", incarnation), 100.0 * incarnation)
        said = until(watcher, 100.0 * incarnation + 50)
        assert [("b", incarnation)] == [verdict.peer for _, verdict in verdicts(said)]
        watcher.heard(("b", incarnation), 100.0 * incarnation + 60)  # too late, and without effect
        assert watcher.on_heartbeat(("b", incarnation), b"", 100.0 * incarnation + 61) == []
        assert watcher.deadline is None


def test_the_same_name_again() -> None:
    watcher = detector()
    watcher.add("b", 0.0)
    watcher.remove("b")
    watcher.remove("b")
    watcher.add("b", 0.1)
    [(_, verdict)] = verdicts(until(watcher, 100.0))
    assert verdict.since == 0.1


@pytest.mark.parametrize("by", ["tick", "heard", "heartbeat", "add"])
def test_sleep_is_no_silence(by) -> None:
    """A process that was stopped grants its peers the time during which it did not listen."""
    watcher = detector()
    watcher.add("b", 0.0)
    watcher.add("c", 0.0)
    until(watcher, 1.0)
    woken = 1000.0
    match by:
        case "tick":
            said = [(woken, effect) for effect in watcher.tick(woken)]
        case "heard":
            watcher.heard("b", woken)
            said = []
        case "heartbeat":
            said = [(woken, e) for e in watcher.on_heartbeat("b", struct.pack("<QQ", 1, 1), woken)]
        case "add":
            watcher.add("d", woken)
            said = []
    assert verdicts(said + until(watcher, woken + 0.1)) == []
    late = [(now, verdict.peer) for now, verdict in verdicts(until(watcher, woken + 100))]
    assert {"b", "c"} <= {peer for _, peer in late}
    assert all(woken < now <= woken + MAXIMUM + INTERVAL for now, _ in late)


def test_a_moderate_delay_is_no_sleep() -> None:
    watcher = detector()
    watcher.add("b", 0.0)
    now = 0.0
    said = []
    while watcher.deadline is not None:
        now = watcher.deadline + 0.9 * INTERVAL
        said += [(now, effect) for effect in watcher.tick(now)]
    assert MINIMUM <= verdicts(said)[0][0] <= MAXIMUM + INTERVAL


@pytest.mark.parametrize("payload", [b"", b"x" * 15, b"x" * 17])
def test_no_heartbeats(payload) -> None:
    watcher = detector()
    watcher.add("b", 0.0)
    with pytest.raises(ProtocolError, match="from b"):
        watcher.on_heartbeat("b", payload, 0.1)


def test_three_intervals_are_enough() -> None:
    assert Detector(0.5, 1.5, 1.5).deadline is None


@pytest.mark.parametrize("bounds", [(0, 1, 2), (0.5, 1, 2), (0.1, 2, 1)])
def test_nonsense_is_refused(bounds) -> None:
    with pytest.raises(ValueError, match="interval"):
        Detector(*bounds)


# --------------------------------------------------------------------------------------------------
# Two sides
# --------------------------------------------------------------------------------------------------

HEALED = float("inf")


class Pair:
    """Two detectors that watch each other over a network that drops and delays."""

    def __init__(self, seed: int, drop: float, delay: float, spread: float) -> None:
        self.random = random.Random(seed)
        self.drop, self.delay, self.spread = drop, delay, spread
        self.sides = {"a": detector(), "b": detector()}
        self.cut: dict[str, tuple[float, float]] = {}  # sender -> (from, until)
        self.mail: list[tuple[float, int, str, bytes]] = []
        self.count = count()
        self.said: list[tuple[float, str, object]] = []
        for side, other in ("ab", "ba"):
            self.sides[side].add(other, self.random.random() * INTERVAL)

    def carry_out(self, side: str, effects, now: float) -> None:
        other = "ba"[side == "b"]
        for effect in effects:
            if not isinstance(effect, SendHeartbeat):
                self.said.append((now, side, effect))
                continue
            begin, end = self.cut.get(side, (HEALED, HEALED))
            if self.random.random() >= self.drop and not begin <= now < end:
                arrives = now + self.delay + self.random.random() * self.spread
                heapq.heappush(self.mail, (arrives, next(self.count), other, effect.payload))

    def run(self, end: float) -> None:
        while True:
            due = [
                (side.deadline, name)
                for name, side in self.sides.items()
                if side.deadline is not None
            ]
            now = min([time for time, _ in due] + [entry[0] for entry in self.mail[:1]] + [HEALED])
            if now > end or now == HEALED:
                return
            if self.mail and self.mail[0][0] == now:
                _, _, name, payload = heapq.heappop(self.mail)
                other = "ba"[name == "b"]
                self.carry_out(name, self.sides[name].on_heartbeat(other, payload, now), now)
            else:
                name = min(due)[1]
                self.carry_out(name, self.sides[name].tick(now), now)

    def verdicts(self) -> dict[str, tuple[float, bool]]:
        found = [entry for entry in self.said if isinstance(entry[2], Unreachable)]
        assert len(found) == len({side for _, side, _ in found}), "said twice"
        return {side: (now, verdict.deaf) for now, side, verdict in found}


def slack(pair: Pair) -> float:
    return INTERVAL + 2 * (pair.delay + pair.spread)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    begin=st.floats(1.0, 30.0),
    spread=st.sampled_from([0.0, 0.03, 0.1]),
    cut=st.sampled_from(["a", "b", "ab"]),
)
def test_a_cut_is_noticed_by_both_sides_in_time(seed, begin, spread, cut) -> None:
    pair = Pair(seed, 0.0, 0.01, spread)
    pair.cut = dict.fromkeys(cut, (begin, HEALED))
    pair.run(100.0)
    found = pair.verdicts()
    assert {"a", "b"} == set(found)
    for side, (now, deaf) in found.items():
        assert begin + MINIMUM - 2 * slack(pair) <= now <= begin + MAXIMUM + slack(pair)
        assert not (deaf and side not in cut), "what it sent did arrive"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    begin=st.floats(1.0, 30.0),
    spread=st.sampled_from([0.0, 0.03]),
    cut=st.sampled_from(["a", "b", "ab"]),
)
def test_a_cut_that_heals_in_time_is_no_event(seed, begin, spread, cut) -> None:
    pair = Pair(seed, 0.0, 0.01, spread)
    pair.cut = dict.fromkeys(cut, (begin, begin + MINIMUM - 2 * slack(pair)))
    pair.run(60.0)
    assert pair.verdicts() == {}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("drop", [0.01, 0.05])
def test_no_false_alarm_when_some_are_lost(seed, drop) -> None:
    pair = Pair(seed, drop, 0.05, 0.02)
    pair.run(600.0)
    assert pair.verdicts() == {}


@pytest.mark.parametrize(("minimum", "maximum"), [(MINIMUM, MAXIMUM), (MAXIMUM, MAXIMUM)])
def test_deaf(minimum, maximum) -> None:
    """a receives nothing from b, but never gives up b; so b must detect it alone."""
    pair = Pair(0, 0.0, 0.01, 0.0)
    begin = 39 * INTERVAL + 0.01  # one of b's heartbeats has just left; those of a fall in between
    pair.cut = {"b": (begin, HEALED)}
    pair.sides["a"] = Detector(INTERVAL, 100.0, 100.0)
    pair.sides["a"].add("b", 0.8 * INTERVAL)
    pair.sides["b"] = Detector(INTERVAL, minimum, maximum)
    pair.sides["b"].add("a", 0.0)
    pair.run(50.0)
    [(now, side, verdict)] = [entry for entry in pair.said if isinstance(entry[2], Unreachable)]
    assert side == "b"
    assert verdict.deaf
    assert begin + minimum <= now <= begin + maximum + 3 * INTERVAL + 2 * pair.delay
    assert begin - INTERVAL <= verdict.since <= begin + 2 * pair.delay


def test_slow_heartbeats_are_no_deafness() -> None:
    """Heartbeats wait seconds behind a big payload, in both directions; what b received counts."""
    watcher = detector()
    watcher.add("b", 0.0)
    for number in range(1, 100):
        now = number * INTERVAL
        assert verdicts(until(watcher, now)) == []
        # This heartbeat was sent long ago, before any of ours can have arrived.
        assert watcher.on_heartbeat("b", struct.pack("<QQ", number, 100_000), now) == []


def test_who_is_not_heard_says_so_and_is_suspected() -> None:
    watcher = detector()
    watcher.add("b", 0.0)
    said = []
    for number in range(1, 100):
        now = number * INTERVAL
        until(watcher, now)
        age = struct.pack("<QQ", number, int(now * 1e6))
        said += [(now, effect) for effect in watcher.on_heartbeat("b", age, now)]
    *suspicions, (given_up, verdict) = said
    assert all(isinstance(effect, Suspect) and effect.deaf for _, effect in suspicions)
    assert len(suspicions) > 2
    assert suspicions[0][0] <= MINIMUM
    assert verdict == Unreachable("b", 0.0, deaf=True)
    assert MINIMUM <= given_up <= MAXIMUM


def test_deaf_then_silent_is_one_outage() -> None:
    """The peer receives nothing; soon its TCP stops sending, for lack of acknowledgements."""
    watcher = Detector(INTERVAL, MAXIMUM, MAXIMUM)
    watcher.add("b", 0.0)
    for number in range(1, 41):
        until(watcher, number * INTERVAL)
        watcher.on_heartbeat("b", struct.pack("<QQ", number, 0), number * INTERVAL)
    cut = 10.0
    for number in range(41, 47):
        now = number * INTERVAL
        until(watcher, now)
        watcher.on_heartbeat("b", struct.pack("<QQ", number, int((now - cut) * 1e6)), now)
    watcher.heard("b", 11.55)  # and another packet arrives
    [(given_up, verdict)] = verdicts(until(watcher, 100.0))
    assert cut + MAXIMUM <= given_up <= cut + MAXIMUM + INTERVAL
    assert verdict == Unreachable("b", 11.55, deaf=False)


def test_an_overtaken_heartbeat_takes_nothing_back() -> None:
    watcher = detector()
    watcher.add("b", 0.0)
    watcher.tick(0.0)
    assert watcher.on_heartbeat("b", struct.pack("<QQ", 2, 0), 0.1) == []
    assert watcher.on_heartbeat("b", struct.pack("<QQ", 1, 10_000_000), 0.1) == []
    [sent] = watcher.tick(INTERVAL)
    assert struct.unpack("<QQ", sent.payload) == (2, 150_000)


def test_a_heartbeat_that_arrives_twice_counts_once() -> None:
    """The duplicate changes neither the time of the last heartbeat nor the estimated gap."""
    payload = struct.pack("<QQ", 1, 2_000_000)
    once, twice = detector(), detector()
    for watcher, times in ((once, 1), (twice, 2)):
        watcher.add("b", 0.0)
        said = [watcher.on_heartbeat("b", payload, 3 * INTERVAL) for _ in range(times)]
        assert [bool(effects) for effects in said] == [True, False][:times]
        assert watcher.on_heartbeat("b", payload[:8] + bytes(8), 4 * INTERVAL) == []
        watcher.heard("b", 4 * INTERVAL)
    assert until(once, 100.0) == until(twice, 100.0)


@pytest.mark.parametrize("seed", range(50))
def test_one_that_oversleeps_goes_on(seed: int) -> None:
    """However late the process runs, none of the recorded times lies in the future."""
    chance = random.Random(seed)
    detector = Detector()
    now = 0.0
    for peer in "pq":
        detector.add(peer, now)
    for _ in range(60):
        now += chance.choice([0.01, 0.1, 0.4, 1.0, 3.0])
        if chance.random() < 0.5:
            detector.heard(chance.choice("pq"), now)
        else:
            beats = [e for e in detector.tick(now) if isinstance(e, SendHeartbeat)]
            assert all(len(beat.payload) == 16 for beat in beats)


def test_other_bounds_count_from_then_on() -> None:
    watcher = detector()
    watcher.add("b", 100.0)
    watcher.set_bounds(INTERVAL / 4, MINIMUM / 4, MAXIMUM / 4)
    [(given_up, _)] = verdicts(until(watcher, 1000.0))
    assert given_up <= 100.0 + max(MAXIMUM / 4, INTERVAL) + INTERVAL / 4
    with pytest.raises(ValueError, match="interval"):
        watcher.set_bounds(1.0, 2.0, 3.0)
