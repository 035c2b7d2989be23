"""The links of simulated processes: real ones, with hooks for faults and invariants.

A `SimLink` is a `Link` over a stream in memory (`stream`). Before a frame is sent, the invariants
and the injector of faults see it, outside of the link's lock, since a fault may suspend or end the
sender there. A sender that waits for room waits in virtual time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from monarch._engine.runtime.cast.sender import HEADS
from monarch._engine.runtime.direct.link import DirectLink, FarLink
from monarch._engine.transport.link import CastLink, Link
from monarch._engine.wire.frame import CALL, CAST, HEADER
from monarch.testing.scheduler import Place, Scheduler, Wait

__all__ = ["SimLink", "calls_in"]


class SimLink(Link):
    """One end of a link of a simulated process, which is at `place`."""

    __slots__ = ("place", "scheduler")

    place: Place | None

    def __init__(
        self,
        sock: Any,
        peer: str,
        want_write: Callable[[Link, bool], None] | None,
        frame_limit: int,
        queue_limit: int,
    ) -> None:
        super().__init__(sock, peer, want_write, frame_limit, queue_limit)
        self.scheduler: Scheduler = sock.streams.scheduler
        self.place = None

    def send(self, data: bytes, fds: list[int] | None = None) -> bool:
        """See `Link.send`."""
        scheduler = self.scheduler
        strand = scheduler.strand
        if strand is not None and strand.doom is not None:
            scheduler.strike(strand)
        if scheduler.on_send is not None:
            scheduler.on_send(self, data)
        if scheduler.books is not None:
            scheduler.books(self, data)
        return super().send(data, fds)

    def _new_waiter(self) -> Any:
        return Wait(self.scheduler)


class SimCastLink(SimLink, CastLink):
    """A link to a process that casts also reach."""

    __slots__ = ()


class SimFarLink(SimLink, FarLink):
    """A link to a process of another host that counts messages."""

    __slots__ = ()


class SimDirectLink(SimLink, DirectLink):
    """A link to a process of another host with a direct connection."""

    __slots__ = ()


SimLink.cast_type = SimCastLink
SimLink.far_type = SimFarLink
SimLink.direct_type = SimDirectLink


class SentCall(NamedTuple):
    """A call that is being sent."""

    to: int
    actor: int
    port: int
    rank: int
    size: int
    flags: int


def calls_in(link: SimLink, data: bytes) -> Iterator[SentCall]:
    """Yield the calls in a frame: one in a CALL, one for each rank in a CAST of calls."""
    kind = data[4]
    if kind not in (CALL, CAST):
        return
    size, _, flags, meta_size, dest, port, rank, _, _ = HEADER.unpack_from(data)
    if kind == CALL:
        yield SentCall(link.uid, dest, port, rank, size, flags)
    elif rank == CALL:
        start = HEADER.size + meta_size
        new_size, plan_size = HEADS.unpack_from(data, start)
        at = start + HEADS.size
        *_, skip = json.loads(data[at : at + new_size])
        plan = json.loads(data[at + new_size : at + new_size + plan_size])
        sender: Any = link.place
        links = {each.born: each.uid for each in sender.proc.ends}
        size -= HEADS.size + new_size + plan_size
        for _, runs in plan:
            for uid, ours, first, count in runs:
                for step in range(count):
                    if first + step not in skip:
                        to = links[uid + step, bool(ours)]
                        yield SentCall(to, dest, port, first + step, size, flags)
