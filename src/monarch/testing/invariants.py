"""The invariants of the runtime, checked while a simulation runs.

* *Order*: the calls that one process sends to another reach the mailboxes in sending order, without
  gaps and without duplicates.
* *One reply*: a port that expects one reply per rank gets at most one. When the script has ended,
  every call has an outcome.
* *Ownership*: ten seconds after a process has exited, none that it spawned runs. Once the script
  has ended, no process runs at all.
* *Bounds*: a sender's queue and a mailbox hold no more than their limits, plus what was in transit.

Each invariant is checked where it could be broken. That is cheaper than a check of the whole state
after each step, and it stops at the step that breaks the invariant. A program's own invariants are
called after each step with a `View`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._engine.base.settings import settings
from monarch._engine.mesh.results.future import PENDING, Future
from monarch._engine.wire.frame import HEADER_SIZE, ONCE, Frame
from monarch.testing.errors import InvariantError
from monarch.testing.link import calls_in
from monarch.testing.stream import CAPACITY

if TYPE_CHECKING:
    from monarch.testing.link import SimLink
    from monarch.testing.proc import SimProc
    from monarch.testing.world import World

__all__ = ["Invariant", "Invariants", "View"]

_ORPHAN_TIME = 10.0
_SLACK = 1 << 20


class View:
    """The simulation as an invariant sees it, between two steps.

    >>> from monarch.testing import simulate
    >>> def time_passes(view): assert view.now >= 0
    >>> simulate(lambda: None, invariants=[time_passes]).value
    """

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def now(self) -> float:
        """The virtual time, in seconds since the start."""
        return self._world.scheduler.now

    @property
    def procs(self) -> list[str]:
        """The labels of the processes that have not exited, in spawn order."""
        return [proc.label for proc in self._world.procs if not proc.place.dead]

    def actors(self, name: str) -> list[Any]:
        """Return the objects of the live actors that were spawned as `name`; do not change them."""
        return [
            cell.behaviour.actor
            for proc in self._world.procs
            if not proc.place.dead
            for cell in proc.cells.values()
            if cell.identity.name == name and cell.behaviour is not None
        ]


Invariant = Callable[[View], object]
"""Raises an exception, such as AssertionError, when the invariant does not hold."""


class Invariants:
    """The invariants of one simulation; the methods are called where one could be broken."""

    def __init__(self, world: World) -> None:
        self._world = world
        # By sender and receiver: the calls in transit, oldest first.
        self._calls: dict[tuple[int, int], deque[tuple[int, int, int, int]]] = {}
        self._once: dict[tuple[int, int], set[int]] = {}  # (process, port): ranks that replied
        self._gathered: dict[tuple[int, int], set[int]] = {}  # (process, port): ranks in ANSWERS
        self._names: dict[int, int] = {}  # by a proc that replaced another: the one it replaced

    # -- checks while the script runs ------------------------------------------------------------

    def on_send(self, link: SimLink, data: bytes) -> None:
        """Record the calls of a frame that a process sends, and check the sender's queue."""
        place = link.place
        if place is None or place.proc is None:
            return
        sender = place.proc.uid
        for call in calls_in(link, data):
            calls = self._calls.get((sender, call.to))
            if calls is None:
                calls = self._calls[sender, call.to] = deque()
            calls.append((call.actor, call.port, call.rank, call.size))
            if call.flags & ONCE:
                self._once.setdefault((sender, call.port), set())
        if link.queued > link.queue_limit + _SLACK and link.queued > 2 * link.queue_limit:
            self._broken(
                f"{place.name} has {link.queued} bytes waiting for {link.peer}, more than twice "
                f"the limit of {link.queue_limit}"
            )

    def on_gathered(self, proc: SimProc, port: int, rank: int) -> None:
        """Check a reply that arrived in an ANSWERS frame.

        The same reply may arrive once more on its own, see `CastRelay`.
        """
        gathered = self._gathered.setdefault((proc.uid, port), set())
        if rank in gathered:
            self._broken(f"port {port} of {proc.label} got two gathered answers of {rank}")
        gathered.add(rank)

    def on_call(self, proc: SimProc, link: SimLink, frame: Frame) -> None:
        """Check the order of a call that has arrived at `proc`, and the mailbox it goes to."""
        size = len(frame.meta) + len(frame.body)
        calls = self._calls.get((link.uid, proc.uid))
        if calls is None:  # the call was sent to the process that `proc` replaced
            return
        arrived = (frame.dest, frame.port, frame.rank, size)
        expected = calls.popleft() if calls else None
        if arrived != expected:
            self._broken(
                f"calls from process {link.uid:x} to {proc.label} are out of order, lost or "
                f"doubled: {arrived} arrived (mesh, port, rank, size), {expected} was sent next"
            )
        cell = proc.cells.get(frame.dest)
        if cell is not None:
            most = settings.mailbox_limit + (CAPACITY // HEADER_SIZE) * len(proc.links)
            if cell.depth() > most:
                self._broken(f"the mailbox of {cell.identity.display} holds {cell.depth()}")

    def on_post(self, proc: SimProc, frame: Frame) -> None:
        """Check a reply, or a message of a channel, that has arrived at `proc`."""
        answered = self._once.get((proc.uid, frame.dest))
        if answered is not None:
            if frame.rank in answered:
                self._broken(f"port {frame.dest} of {proc.label} got two answers of {frame.rank}")
            answered.add(frame.rank)

    def on_exit(self, proc: SimProc) -> None:
        """Schedule a check for orphans of a process that has exited."""
        scheduler = self._world.scheduler
        when = scheduler.now + _ORPHAN_TIME
        scheduler.aside(when, None, self._check_orphans, proc)

    # -- checks at the end -----------------------------------------------------------------------

    def at_end(self, client: SimProc) -> None:
        """Check calls and processes when the script has ended and no step is left."""
        for sink in client.ports.values():
            if isinstance(sink, Future) and sink._phase == PENDING:
                endpoint = getattr(sink, "_endpoint", None)
                what = endpoint.name if endpoint is not None else type(sink).__name__
                self._broken(f"a call of the script never had an outcome: {what}")
        left = [proc.label for proc in self._world.procs[1:] if not proc.place.dead]
        if left:
            self._broken(f"the script is over, and these processes still run: {left}")

    def _check_orphans(self, proc: SimProc) -> None:
        left = [
            child.label
            for child in self._world.procs
            if child.spec.get("parent") == proc.uid and not child.place.dead
        ]
        if left:
            self._broken(f"{proc.label} ended {_ORPHAN_TIME:g} s ago, and it left {left} behind")

    def _broken(self, text: str) -> None:
        error = InvariantError(f"at {self._world.scheduler.now:.6f} s: {text}")
        self._world.scheduler.fail(error)


View.__module__ = "monarch.testing"
