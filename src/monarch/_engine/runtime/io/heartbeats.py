"""Send heartbeats to the agents of other hosts, and act when a host is silent.

It drives `protocol.session.detector`. The bound is one number, `host_timeout`: a host that is
silent (or does not receive) for less time is never given up, and for more time always is. Before
that, as soon as the silence is longer than usual, the dialing side tries new connections, again and
again: the present one may be half-open, or TCP may have doubled its pauses so often that it sleeps
past the end of an outage.

The number of heartbeats is fixed per timeout, not per second. So a program that drives thousands of
hosts, and accepts that it learns of a loss a little later, pays less for heartbeats.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from monarch._engine.protocol.session.detector import Detector, Effect, SendHeartbeat, Suspect
from monarch._engine.runtime.io import environment as environments
from monarch._engine.runtime.io.alarm import Alarm, CallAt

__all__ = ["HeartbeatMonitor", "Watched"]

_BEATS = 12  # heartbeats per timeout


class Watched(Hashable, Protocol):
    """A session with another host, as the heartbeat monitor sees it."""

    def send_heartbeat(self, payload: bytes) -> None:
        """Send a heartbeat if there is a connection."""
        ...

    def suspect(self) -> None:
        """React to a silence that is longer than usual."""
        ...

    def suspect_deaf(self) -> None:
        """React to a peer that sends, but has not received from us for longer than usual.

        Called repeatedly.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Give the peer up: it has been silent, or has not received, for too long."""
        ...


class HeartbeatMonitor:
    """Watches sessions with other hosts; see the module.

    Args:
        call_at: sets timers, on the thread on which all methods run.
        timeout: seconds of silence after which a host is given up.
    """

    def __init__(self, call_at: CallAt, timeout: float) -> None:
        self._detector = Detector(timeout / _BEATS, minimum=timeout, maximum=timeout)
        self._peers: set[Watched] = set()
        self._alarm = Alarm(call_at, self._tick)

    def be_patient(self, timeout: float) -> None:
        """Change the timeout, from now on."""
        self._detector.set_bounds(timeout / _BEATS, timeout, timeout)

    def watch(self, peer: Watched) -> None:
        """Watch a session that has just begun."""
        if peer not in self._peers:
            self._peers.add(peer)
            self._detector.add(peer, environments.current.now())
            self._alarm.set(self._detector.deadline)

    def forget(self, peer: Watched) -> None:
        """Stop watching a session that is over."""
        self._peers.discard(peer)
        self._detector.remove(peer)

    def close(self) -> None:
        """Stop watching all sessions."""
        for peer in list(self._peers):
            self.forget(peer)
        self._alarm.cancel()

    def heard(self, peer: Watched) -> None:
        """Note that bytes arrived from a peer."""
        self._detector.heard(peer, environments.current.now())

    def on_heartbeat(self, peer: Watched, payload: bytes) -> None:
        """Handle a heartbeat of a peer. Raises ProtocolError if it is invalid."""
        self._perform(self._detector.on_heartbeat(peer, payload, environments.current.now()))

    def _tick(self) -> None:
        self._perform(self._detector.tick(environments.current.now()))
        self._alarm.set(self._detector.deadline)

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            peer: Any = effect.peer  # always a `Watched`, as only such are added
            if peer not in self._peers:
                continue  # forgotten through an earlier effect
            if isinstance(effect, SendHeartbeat):
                peer.send_heartbeat(effect.payload)
            elif isinstance(effect, Suspect):
                if effect.deaf:
                    peer.suspect_deaf()
                else:
                    peer.suspect()
            else:
                self._peers.discard(peer)
                seconds = environments.current.now() - effect.since
                what = (
                    "it received nothing from this host"
                    if effect.deaf
                    else "nothing arrived from it"
                )
                peer.give_up(f"{what} for {seconds:.1f} s")
