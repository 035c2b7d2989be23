"""The sentinel: heartbeats to the agents of other hosts, and what follows from silence.

It drives `protocol.detector`. The bound is one number, `host_timeout`: a host that is silent (or
deaf) for less is never given up, one that is for longer always is. In between, as soon as the
silence is longer than usual, the side that dials tries new connections, again and again: this one
may be half-open, or TCP may have doubled its pauses so often that it sleeps past the end of an
outage.

Heartbeats are so many within the timeout, not so many within a second: who drives thousands of
hosts, and can wait a little longer for the news that one is gone, pays less for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from monarch._engine.protocol.detector import Detector, Effect, SendHeartbeat, Suspect
from monarch._engine.runtime import driver as drivers
from monarch._engine.runtime.reactor import Reactor, Timer

__all__ = ["Sentinel", "Watched"]

_BEATS = 12  # within the timeout


class Watched(Hashable, Protocol):
    """Another host, as the sentinel sees it: one object per session."""

    def send_heartbeat(self, payload: bytes) -> None:
        """Send it if there is a connection."""
        ...

    def suspect(self) -> None:
        """It is silent for longer than usual."""
        ...

    def suspect_deaf(self) -> None:
        """It is heard, but for longer than usual it has not heard us. Said again and again."""
        ...

    def give_up(self, reason: str) -> None:
        """It has been silent for too long."""
        ...


class Sentinel:
    """See the module.

    Args:
        reactor: everything here happens on its thread.
        timeout: seconds of silence after which a host is given up.
    """

    def __init__(self, reactor: Reactor, timeout: float) -> None:
        self._reactor = reactor
        self._detector = Detector(timeout / _BEATS, minimum=timeout, maximum=timeout)
        self._peers: set[Watched] = set()
        self._timer: Timer | None = None
        self._timer_at = 0.0

    def be_patient(self, timeout: float) -> None:
        """Another timeout, from now on."""
        self._detector.set_bounds(timeout / _BEATS, timeout, timeout)

    def watch(self, peer: Watched) -> None:
        """There is a session with it, from now on."""
        if peer not in self._peers:
            self._peers.add(peer)
            self._detector.add(peer, drivers.current.now())
            self._set_timer()

    def forget(self, peer: Watched) -> None:
        """The session is over."""
        self._peers.discard(peer)
        self._detector.remove(peer)

    def close(self) -> None:
        """Forget all, now."""
        for peer in list(self._peers):
            self.forget(peer)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self, peer: Watched) -> None:
        """Bytes came from it."""
        self._detector.heard(peer, drivers.current.now())

    def on_heartbeat(self, peer: Watched, payload: bytes) -> None:
        """A heartbeat came from it. Raises ProtocolError if it is none."""
        self._perform(self._detector.on_heartbeat(peer, payload, drivers.current.now()))

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._detector.tick(drivers.current.now()))
        self._set_timer()

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            peer: Any = effect.peer  # a `Watched`: only such are added
            if peer not in self._peers:
                continue  # forgotten by an effect before this one
            if isinstance(effect, SendHeartbeat):
                peer.send_heartbeat(effect.payload)
            elif isinstance(effect, Suspect):
                if effect.deaf:
                    peer.suspect_deaf()
                else:
                    peer.suspect()
            else:
                self._peers.discard(peer)
                seconds = drivers.current.now() - effect.since
                what = "it has not heard us" if effect.deaf else "nothing was heard from it"
                peer.give_up(f"{what} for {seconds:.1f} s")

    def _set_timer(self) -> None:
        deadline = self._detector.deadline
        if deadline is None:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        delay = max(0.0, deadline - drivers.current.now())
        self._timer = self._reactor.call_later(delay, self._tick)
