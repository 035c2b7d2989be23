"""Failure detector: heartbeats between hosts, and a verdict on a host that falls silent.

On one host the kernel reports which processes have exited. Between hosts there is only silence, and
no algorithm can distinguish a dead host from a slow network (Chandra and Toueg, *Unreliable failure
detectors for reliable distributed systems*, JACM 1996). So the detector gives bounds instead of
certainty:

- A peer from which something arrives at least every `minimum` seconds is never given up.
- A peer from which nothing arrives for `maximum` seconds is always given up.
- Between the two, the decision depends on the rhythm in which its heartbeats arrived before. The
  longest ordinary gap is estimated as TCP estimates round trips (RFC 6298: mean and deviation, each
  a moving average); a silence of three such gaps is too long. This detects early on a quiet
  network, and waits on one that loses and delays packets. A distribution fitted to a window of
  samples (Hayashibara et al., *The phi accrual failure detector*, SRDS 2004) does the same with
  more state and a threshold that is harder to explain.

The engine sets both bounds to one number (`HeartbeatMonitor`), and the simulator runs the same
code. So there the third case does not occur: the rhythm decides when a silence is suspected, and
delays the verdict on a deaf peer until then.

**One outcome per peer.** The verdict is given once, and the detector forgets the peer with it; a
peer that returns does so as a new incarnation (`add`). A silence that ends before the verdict is
not an event. Only `Suspect` was emitted when the silence exceeded the ordinary gap: reason enough
to try a new connection, since the present one may be half-open, or its sender may be waiting to
retransmit.

**One-way partitions.** A receives from B, but B does not receive from A: B's calls reach A, and A's
replies are lost. Every heartbeat carries the time since its sender last received anything. So each
side learns that the other does not receive, can try another connection, and gives up a peer that is
`deaf` (does not receive) for too long. Both sides of any partition reach their verdict without
having to agree. TCP soon turns half of a partition into a whole one, since acknowledgements are
lost as well. Therefore a peer that falls silent after it reported that it receives nothing counts
as unreachable from that time, not from its last message.

The peer measures this time by its own clock, and anything that arrives there counts. Rejected:
numbering the heartbeats and letting the peer report which ones it got. Heartbeats wait with
everything else in the kernel's buffers, in both directions; on a slow network they wait behind a
big payload for seconds, while the other side receives data all the time.

**Time asleep is not silence.** A process that was stopped, starved or suspended receives nothing
meanwhile, and would give up all peers when it resumes. The detector knows when it asked to be
called; the time by which the call is late, beyond one interval, is subtracted from every silence.
(The general idea is in Lifeguard, Dadgar et al., DSN-W 2018: first mistrust your own process.)

Every peer is due at least once an interval, for its heartbeat. So one heap entry per peer is
enough, and receiving from a peer does not touch the heap. First heartbeats are spread over the
interval, so that a thousand peers do not cause a burst.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

from monarch._engine.base.errors import ProtocolError

__all__ = ["Detector", "Effect", "Peer", "SendHeartbeat", "Suspect", "Unreachable"]

Peer: TypeAlias = Hashable
"""Identifies one incarnation of one host."""

_PAYLOAD = struct.Struct("<QQ")  # the heartbeat's number; microseconds since anything was received
_MICROSECONDS = 1e6

_GOLDEN = 0.618034  # multiples of it, modulo 1, fill the interval evenly


class SendHeartbeat(NamedTuple):
    """Effect: send `payload` to the peer ahead of everything else; drop it if there is no link."""

    peer: Peer
    payload: bytes


class Suspect(NamedTuple):
    """Effect: the peer has been silent for longer than usual, since `since`; its link may be dead.

    With `deaf`, data arrives from the peer, but the peer reports that it has received nothing since
    then; emitted for each heartbeat that reports it.
    """

    peer: Peer
    since: float
    deaf: bool = False


class Unreachable(NamedTuple):
    """Effect: the peer is given up.

    With `deaf`, data arrives from the peer, but the peer reports that it has received nothing since
    `since`.
    """

    peer: Peer
    since: float
    deaf: bool


Effect: TypeAlias = SendHeartbeat | Suspect | Unreachable


class _Rhythm:
    """An estimate of the longest ordinary gap: the mean plus four deviations, as in RFC 6298."""

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
    """The state of one peer. Times are waking time (`Detector._awake`), except `heard_real`."""

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
        self.heard = now  # when anything last arrived from the peer
        self.heard_real = real
        self.arrived = now  # when its last heartbeat arrived
        self.theirs = 0  # the highest number of its heartbeats
        self.deaf_since: float | None = None  # as its last heartbeat reports
        self.gaps = _Rhythm(interval)  # the gaps between its heartbeats
        self.number = 0  # the number of our last heartbeat
        self.send_at = now
        self.suspected = False


class Detector:
    """Watches the peers that are added. See the module.

    Args:
        interval: seconds between heartbeats to each peer.
        minimum: a shorter silence is never held against a peer; at least three intervals; seconds.
        maximum: a longer silence is never tolerated; seconds.

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
        self._heap: list[tuple[float, int, _Watch]] = []  # when each peer is examined next
        self._count = 0
        self._slept = 0.0  # real time minus waking time

    def set_bounds(self, interval: float, minimum: float, maximum: float) -> None:
        """Change the bounds, see the class; checks already scheduled keep their time.

        Raises ValueError if the bounds contradict each other.
        """
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
        """The time at which `tick` may have something to do; None if there are no peers."""
        return self._heap[0][0] + self._slept if self._heap else None

    def add(self, peer: Peer, now: float) -> None:
        """Watch a peer from now on, as if something had just arrived from it."""
        assert peer not in self._watches, "one watch for each incarnation"
        awake = self._awake(now)
        watch = _Watch(peer, awake, now, self._interval)
        self._watches[peer] = watch
        self._count += 1
        if len(self._watches) > 1:
            watch.send_at += self._interval * (self._count * _GOLDEN % 1.0)
        heapq.heappush(self._heap, (watch.send_at, self._count, watch))

    def remove(self, peer: Peer) -> None:
        """Forget a peer, if it is watched; no more effects concern it."""
        self._watches.pop(peer, None)

    def heard(self, peer: Peer, now: float) -> None:
        """Record that something arrived from the peer. Ignored for a peer that was given up."""
        watch = self._watches.get(peer)
        if watch is not None:
            watch.heard = self._awake(now)
            watch.heard_real = now
            watch.suspected = False

    def on_heartbeat(self, peer: Peer, payload: bytes, now: float) -> list[Effect]:
        """Handle a heartbeat from the peer. Raises ProtocolError if its size is wrong."""
        watch = self._watches.get(peer)
        if watch is None:
            return []
        if len(payload) != _PAYLOAD.size:
            raise ProtocolError(f"protocol error from {peer}: a heartbeat of {len(payload)} bytes")
        self.heard(peer, now)
        number, age = _PAYLOAD.unpack(payload)
        if number <= watch.theirs:
            return []  # a later heartbeat overtook it
        awake = watch.heard
        watch.theirs = number
        watch.gaps.sample(awake - watch.arrived)
        watch.arrived = awake
        unheard = age / _MICROSECONDS
        ordinary = watch.gaps.ordinary
        # The peer receives from us once an interval, so an age of up to one interval is normal.
        watch.deaf_since = awake - unheard + self._interval if unheard > self._interval else None
        if unheard < max(ordinary, 2 * self._interval):
            return []
        since = now - unheard
        if unheard < self._bounded(3 * ordinary):
            return [Suspect(peer, since, deaf=True)]
        del self._watches[peer]
        return [Unreachable(peer, since, deaf=True)]

    def tick(self, now: float) -> list[Effect]:
        """Send the heartbeats that are due, and judge the peers."""
        awake = self._awake(now)
        effects: list[Effect] = []
        while (deadline := self.deadline) is not None and deadline <= now:
            when, count, watch = heapq.heappop(self._heap)
            if self._watches.get(watch.peer) is watch:
                # Rounding must not make an entry that `deadline` reported appear to be early.
                due = self._look(watch, max(when, awake), effects)
                if due is not None:
                    heapq.heappush(self._heap, (due, count, watch))
        return effects

    def _look(self, watch: _Watch, awake: float, effects: list[Effect]) -> float | None:
        """Perform what is due for one peer; return when it is due next, None if it was given up."""
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
            # Waking time can step back behind the last arrival after a sleep; then the age is 0.
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
        """Return the waking time: `now` less the time asleep, which a late call reveals."""
        deadline = self.deadline
        if deadline is not None and now > deadline + self._interval:
            self._slept += now - deadline
        return now - self._slept
