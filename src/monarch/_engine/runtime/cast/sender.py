"""Casting: one message from this process to procs of many other hosts, sent to the agent once.

A mesh that spans hosts has a `Plan`, made when its links are resolved: which ranks are on which
host. The message then leaves in one CAST frame on the link to the host agent, with the plan, and
the agents distribute it (`relay`). Answers that are small values come back in ANSWERS frames,
many at a time; everything else comes by the links to the procs, as usual.

Marks keep casts in order with what is sent on those links (`protocol.order_merge`). A link writes
marks itself once it has been in a cast (`transport.link.CastLink`). A link that never was has no
part in this, so nothing here adds a call to messages within one host.

Agents hold back a caller (FLOW on the agent link) while the way to some host is full.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from monarch._engine.base.errors import BackpressureError
from monarch._engine.base.settings import settings
from monarch._engine.runtime.proc.time_limit import wait_within
from monarch._engine.transport.frame_link import FrameLink
from monarch._engine.wire.codec import Payload
from monarch._engine.wire.frame import CAST, CONTROL, FIRST, ONCE, SEGMENT, Frame, pack

if TYPE_CHECKING:
    from monarch._engine.runtime.proc.proc import Proc

__all__ = ["ANSWER", "HEADS", "Casting", "Plan", "answers_in", "gathers", "heads_size"]

HEADS = struct.Struct("<II")
"""The start of a CAST's body: the sizes of what is new in each cast, and of the JSON plan."""

ANSWER = struct.Struct("<II")
"""Stands before each answer in the body of ANSWERS: its rank, and its size."""

_JSON = json.JSONEncoder(separators=(",", ":")).encode
_FEWEST = 2  # ranks of a host that justify a cast


class Plan:
    """Which of the ranks behind `links` get a cast, and which are sent to one by one.

    Args:
        links: by rank.
        hosts: the name of the host where each rank lives.
        here: the name of this host.
    """

    __slots__ = ("by_rank", "data", "direct", "forks", "links", "ranks")

    forks_so_far = 0
    """How often this process is a forked child: the links of an inherited plan are other ones."""

    def __init__(self, links: Sequence[FrameLink], hosts: Sequence[str], here: str) -> None:
        self.forks = Plan.forks_so_far
        self.direct: list[int] = []
        self.ranks: list[int] = []
        runs: dict[str, list[list[int]]] = {}
        for rank, (link, host) in enumerate(zip(links, hosts, strict=True)):
            if host == here or link.born is None:
                self.direct.append(rank)
                continue
            self.ranks.append(rank)
            uid, ours = link.born
            known = runs.setdefault(host, [])
            last = known[-1] if known else [0, -1, 0, 0]
            if [last[0] + last[3], last[1], last[2] + last[3]] == [uid, ours, rank]:
                last[3] += 1
            else:
                known.append([uid, int(ours), rank, 1])
        self.by_rank = links
        self.links = [links[rank] for rank in self.ranks]
        self.data = _JSON(list(runs.items())).encode()

    @classmethod
    def of(cls, links: Sequence[FrameLink], hosts: Sequence[str], here: str) -> Plan | None:
        """Return a plan, or None: a cast pays only for many ranks per host, or for many hosts."""
        plan = cls(links, hosts, here)
        reached = len(set(hosts) - {here})
        pays = len(plan.ranks) >= _FEWEST * reached or reached > settings.max_cast_fanout
        return plan if plan.ranks and pays else None


class Casting:
    """The casts of one process, numbered from `first`."""

    def __init__(self, proc: Proc, first: int) -> None:
        self._proc = proc
        self._lock = threading.Lock()  # casts leave in the order of their numbers
        self._number = first
        self.open: dict[int, int] = {}  # by port that awaits answers: number of the cast

    def send(
        self,
        plan: Plan,
        kind: int,
        dest: int,
        port: int,
        meta: bytes,
        payload: Payload,
        flags: int,
        who: str | None,
        patience: float | None = None,
        *,
        gathers: bool,
    ) -> list[int]:
        """Send one message to all ranks of `plan`; return the ranks whose link was already lost.

        `gathers`: each rank answers once, at `port`. If `who` is given, first waits while agents
        hold this caller back, for `patience` or `backpressure_timeout` seconds at most, and then
        raises BackpressureError, which names `who`. Afterwards waits for room as any send does.
        """
        proc = self._proc
        agent: Any = proc.agent
        if agent is None or plan.forks != Plan.forks_so_far:
            return plan.ranks
        if who is not None:
            self._wait_for_gate(agent, who, patience)
        segment = None
        if payload.stream is None:
            segment = proc.segments.store(payload)
            proc.segments.hold(agent, segment)
        with self._lock:
            self._number = number = self._number + 1
            ranks, links = plan.ranks, plan.links
            skip = [r for r, link in zip(ranks, links, strict=True) if link.lost is not None]
            tied = [r for r, link in zip(ranks, links, strict=True) if link.used]
            if gathers:
                self.open[port] = number
            new = _JSON([number, int(gathers), settings.max_cast_fanout, tied, skip]).encode()
            heads = b"".join((HEADS.pack(len(new), len(plan.data)), new, plan.data))
            if segment is None:
                body = heads + (payload.stream or b"")
                sent = agent.send(pack(CAST, dest, port, kind, meta, body, flags))
            else:
                body = heads + segment.table
                frame = pack(CAST, dest, port, kind, meta, body, flags | SEGMENT, 1)
                sent = agent.send(frame, [segment.fd])
                if not sent:
                    proc.segments.release(agent, segment.id)
            # Marks go last. A mark of a cast that was never sent would block its tunnel.
            for link in links:
                link.casts = number
                if link.direct is not None:  # what others send there now must follow the cast
                    link.turn_back()
            for rank in tied:
                plan.by_rank[rank].mark(number)
        if who is not None and agent.queued > agent.queue_limit:
            proc.wait_room(agent)
        return skip if sent else plan.ranks

    def _wait_for_gate(self, agent: Any, who: str, patience: float | None) -> None:
        gate = agent.paused.get(0) if agent.paused else None
        if gate is None:
            return
        most = settings.backpressure_timeout
        patience = most if patience is None else min(patience, most)
        if not wait_within(patience, gate.wait):
            raise BackpressureError(
                f"{who}: the way to other hosts stayed full for {patience:g} s (configuration key "
                "backpressure_timeout); the network, or a receiver, is too slow"
            )

    def say(self, plan: Plan, kind: int, dest: int, port: int, body: bytes = b"") -> list[int]:
        """Send a short message that is no pickle, as `send` does, but without waiting.

        If `port` is not 0 each rank answers once, at that port.
        """
        payload = Payload([body], [], len(body) + 1)
        return self.send(plan, kind, dest, port, b"", payload, 0, None, gathers=port > 0)

    def on_answers(self, link: FrameLink, frame: Frame) -> None:
        """Deliver the answers in an ANSWERS frame of the agent."""
        port = frame.dest
        if frame.flags:
            self.open.pop(port, None)
        sink = self._proc.ports.get(port)
        if sink is not None:
            for rank, answer in answers_in(frame):
                sink.deliver(rank, 0, answer, link)

    def closed(self, port: int) -> None:
        """Tell the agent that the port wants no more answers."""
        number = self.open.pop(port, None)
        agent = self._proc.agent
        if number is not None and agent is not None:
            body = json.dumps({"op": "cast_over", "number": number}).encode()
            agent.send(pack(CONTROL, 0, 0, 0, b"", body))


def heads_size(body: bytes | bytearray) -> int:
    """Return where the payload begins in a CAST's body. Raises ValueError for an invalid body."""
    if len(body) < HEADS.size:
        raise ValueError("a cast without its sizes")
    new, plan = HEADS.unpack_from(body)
    size: int = HEADS.size + new + plan
    return size


def answers_in(frame: Frame) -> Iterator[tuple[int, bytes]]:
    """Yield the rank and the bytes of each answer in an ANSWERS frame."""
    body = memoryview(frame.body)
    at, end = 0, len(body)
    while at < end:
        rank, size = ANSWER.unpack_from(body, at)
        at += ANSWER.size + size
        yield rank, bytes(body[at - size : at])


def gathers(port: int, flags: int) -> bool:
    """Whether each rank answers such a CALL once."""
    return bool(port and flags & (ONCE | FIRST))
