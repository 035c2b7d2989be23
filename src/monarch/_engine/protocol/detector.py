"""Is that host still there? Heartbeats between hosts, and a verdict when they stay away.

On one host the kernel says who is gone. Between hosts there is only silence, and no algorithm can
tell a dead host from a slow network (Chandra and Toueg, *Unreliable failure detectors for reliable
distributed systems*, JACM 1996). So the detector gives bounds instead of certainty:

- a peer from which something arrives at least every `minimum` seconds is never given up;
- a peer from which nothing arrives for `maximum` seconds always is;
- in between it depends on the rhythm in which its heartbeats arrived before. Its longest ordinary
  gap is estimated as TCP estimates round trips (RFC 6298: mean and deviation, each a moving
  average); three of them in silence are too much. On a quiet network that detects early, on one
  that loses and delays it waits. A distribution fitted to a window of samples (Hayashibara et al.,
  *The phi accrual failure detector*, SRDS 2004) does the same with more state and a threshold that
  is harder to explain.

**One outcome per peer.** The verdict comes once, and the peer is forgotten with it; whoever
returns does so as a new incarnation (`add`). A silence that ends before the verdict is no event,
except that `Suspect` was said when it exceeded the ordinary gap: reason enough to try a new
connection, since this one may be half-open, or asleep between two attempts.

**One-way partitions.** I hear him, he does not hear me: his calls reach me and my replies are
lost. Every heartbeat says for how long its sender has heard nothing. So each side learns that it is
not heard, can try another connection, and gives up a peer that is `deaf` to it for too long. Both
sides of any partition come to their verdict, without having to agree. TCP makes half of a partition
a whole one before long, since acknowledgements are lost as well; so a peer that falls silent after
having said that it does not hear us is out of reach since then, and not since its last word.

It is the other's measure, by the other's clock, and anything that arrives there counts. Rejected:
to number the heartbeats and have the other say which it got. Heartbeats wait with everything else
in the buffers of the kernel, in both directions; on a slow network behind a big payload for
seconds, while the other side hears from us all the time.

**Sleep is no silence.** A process that was stopped, starved or suspended hears nothing meanwhile,
and would give everybody up when it wakes. The detector knows when it asked to be called; what it
was called late, beyond one interval, is taken off every silence. (Lifeguard, Dadgar et al., DSN-W
2018, has the general idea: mistrust yourself first.)

Every peer is due at least once an interval, for its heartbeat, so one heap entry each is enough
and hearing from a peer touches no heap. First heartbeats are spread over the interval, so that a
thousand peers are no burst.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

from monarch._engine.base.errors import ProtocolError

__all__ = ["Detector", "Effect", "Peer", "SendHeartbeat", "Suspect", "Unreachable"]

Peer: TypeAlias = Hashable
"""Names one incarnation of one host."""

_PAYLOAD = struct.Struct("<QQ")  # the heartbeat's number; us since anything was heard of the peer
_MICROSECONDS = 1e6

_GOLDEN = 0.618034  # multiples of it, modulo 1, fill the interval evenly


class SendHeartbeat(NamedTuple):
    """Send `payload` to the peer, ahead of everything; or drop it if there is no link."""

    peer: Peer
    payload: bytes


class Suspect(NamedTuple):
    """The peer is silent for longer than usual, since that time: its link may be dead.

    `deaf`: it is heard, but it has not heard us; told with each of its heartbeats that says so.
    """

    peer: Peer
    since: float
    deaf: bool = False


class Unreachable(NamedTuple):
    """The peer is given up. `deaf`: it is heard, but says that it has not heard us since."""

    peer: Peer
    since: float
    deaf: bool


Effect: TypeAlias = SendHeartbeat | Suspect | Unreachable


class _Rhythm:
    """The longest gap that is ordinary: mean and four deviations, as RFC 6298 has it."""

    __slots__ = ("_deviation", "_mean")

    def __init__(self, mean: float) -> None:
        self._mean = mean
        self._deviation = mean / 2

    def sample(self, gap: float) -> None:
        off = gap - self._mean
        self._mean += off / 8
        self._deviation += (abs(off) - self._deviation) / 4

    @property
    def ordinary(self) -> float:
        return self._mean + 4 * self._deviation


class _Watch:
    """What is known of one peer. Times are waking time, except where it says real."""

    __slots__ = (
        "arrived",
        "deaf_since",
        "gaps",
        "heard",
        "heard_real",
        "number",
        "peer",
        "send_at",
        "suspected",
        "theirs",
    )

    def __init__(self, peer: Peer, now: float, real: float, interval: float) -> None:
        self.peer = peer
        self.heard = now  # anything from it
        self.heard_real = real
        self.arrived = now  # a heartbeat of it
        self.theirs = 0  # the highest number of those
        self.deaf_since: float | None = None  # as it said in the last of those
        self.gaps = _Rhythm(interval)  # between those
        self.number = 0  # of our last heartbeat
        self.send_at = now
        self.suspected = False


class Detector:
    """Watches the peers it is given. See the module.

    Args:
        interval: seconds between heartbeats to each peer.
        minimum: no shorter silence is held against a peer; at least three intervals.
        maximum: no longer silence is tolerated.

    >>> detector = Detector(interval=0.25, minimum=1.0, maximum=3.0)
    >>> detector.add("host b", now=100.0)
    >>> detector.tick(100.0)[0].peer
    'host b'
    >>> detector.heard("host b", now=102.0)
    >>> effects = []
    >>> while detector.deadline is not None:
    ...     effects += detector.tick(detector.deadline)
    >>> effects[-1]
    Unreachable(peer='host b', since=102.0, deaf=False)
    """

    __slots__ = (
        "_count",
        "_heap",
        "_interval",
        "_maximum",
        "_minimum",
        "_slept",
        "_watches",
    )

    def __init__(self, interval: float = 0.25, minimum: float = 1.5, maximum: float = 3.0) -> None:
        self.set_bounds(interval, minimum, maximum)
        self._watches: dict[Peer, _Watch] = {}
        self._heap: list[tuple[float, int, _Watch]] = []  # when each is looked at next
        self._count = 0
        self._slept = 0.0  # how much real time is ahead of waking time

    def set_bounds(self, interval: float, minimum: float, maximum: float) -> None:
        """Other bounds from now on, see the class; what was due before is still looked at then."""
        if not 0 < 3 * interval <= minimum <= maximum:
            raise ValueError(
                "expected 0 < 3 * interval <= minimum <= maximum, got "
                f"interval={interval}, minimum={minimum}, maximum={maximum}"
            )
        self._interval = interval
        self._minimum = minimum
        self._maximum = maximum

    @property
    def deadline(self) -> float | None:
        """When `tick` may have something to do; None if there are no peers."""
        return self._heap[0][0] + self._slept if self._heap else None

    def add(self, peer: Peer, now: float) -> None:
        """Watch a peer from now on, as if it had just been heard."""
        assert peer not in self._watches, "one watch for each incarnation"
        awake = self._awake(now)
        watch = _Watch(peer, awake, now, self._interval)
        self._watches[peer] = watch
        self._count += 1
        if len(self._watches) > 1:
            watch.send_at += self._interval * (self._count * _GOLDEN % 1.0)
        heapq.heappush(self._heap, (watch.send_at, self._count, watch))

    def remove(self, peer: Peer) -> None:
        """Forget a peer, if it is watched; nothing is said about it any more."""
        self._watches.pop(peer, None)

    def heard(self, peer: Peer, now: float) -> None:
        """Something arrived from the peer. News of one that was given up is ignored."""
        watch = self._watches.get(peer)
        if watch is not None:
            watch.heard = self._awake(now)
            watch.heard_real = now
            watch.suspected = False

    def on_heartbeat(self, peer: Peer, payload: bytes, now: float) -> list[Effect]:
        """A heartbeat arrived from the peer. Raises ProtocolError if it is none."""
        watch = self._watches.get(peer)
        if watch is None:
            return []
        if len(payload) != _PAYLOAD.size:
            raise ProtocolError(f"protocol error from {peer}: a heartbeat of {len(payload)} bytes")
        self.heard(peer, now)
        number, age = _PAYLOAD.unpack(payload)
        if number <= watch.theirs:
            return []  # overtaken on the way
        awake = watch.heard
        watch.theirs = number
        watch.gaps.sample(awake - watch.arrived)
        watch.arrived = awake
        unheard = age / _MICROSECONDS
        ordinary = watch.gaps.ordinary
        # (It hears from us once an interval: so old its last news of us may be without a fault.)
        watch.deaf_since = awake - unheard + self._interval if unheard > self._interval else None
        if unheard < max(ordinary, 2 * self._interval):
            return []
        since = now - unheard
        if unheard < self._bounded(3 * ordinary):
            return [Suspect(peer, since, deaf=True)]
        del self._watches[peer]
        return [Unreachable(peer, since, deaf=True)]

    def tick(self, now: float) -> list[Effect]:
        """Send what is due, and judge."""
        awake = self._awake(now)
        effects: list[Effect] = []
        while (deadline := self.deadline) is not None and deadline <= now:
            when, count, watch = heapq.heappop(self._heap)
            if self._watches.get(watch.peer) is watch:
                # What `deadline` said is reached, whatever the rounding.
                due = self._look(watch, max(when, awake), effects)
                if due is not None:
                    heapq.heappush(self._heap, (due, count, watch))
        return effects

    def _look(self, watch: _Watch, awake: float, effects: list[Effect]) -> float | None:
        """Do what is due for one peer; gives when it is due next, None if it was given up."""
        ordinary = watch.gaps.ordinary
        patience = self._bounded(3 * ordinary)
        silent_at = watch.heard + patience
        suspect_at = watch.heard + max(ordinary, 2 * self._interval)
        if watch.deaf_since is not None:
            silent_at = min(silent_at, max(suspect_at, watch.deaf_since + patience))
        if awake >= silent_at:
            del self._watches[watch.peer]
            effects.append(Unreachable(watch.peer, watch.heard_real, deaf=False))
            return None
        if awake >= watch.send_at:
            watch.send_at = awake + self._interval
            watch.number += 1
            # (Heard after the moment to which a sleep has taken us back: just now.)
            unheard = max(0, int((awake - watch.heard) * _MICROSECONDS))
            payload = _PAYLOAD.pack(watch.number, unheard)
            effects.append(SendHeartbeat(watch.peer, payload))
        due = min(watch.send_at, silent_at)
        if not watch.suspected:
            if awake >= suspect_at:
                watch.suspected = True
                effects.append(Suspect(watch.peer, watch.heard_real))
            else:
                due = min(due, suspect_at)
        return due

    def _bounded(self, silence: float) -> float:
        return min(max(silence, self._minimum), self._maximum)

    def _awake(self, now: float) -> float:
        """Waking time: `now` less what we slept."""
        deadline = self.deadline
        if deadline is not None and now > deadline + self._interval:
            self._slept += now - deadline
        return now - self._slept
