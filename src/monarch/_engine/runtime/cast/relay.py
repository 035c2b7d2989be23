"""Casts at a host agent: down the tree of hosts, into the tunnels, and the answers back up.

Pure cores make the decisions. `protocol.cast` decides which host passes a cast on to which, what
becomes of a cast when a host is lost, and which answers are gathered. `protocol.order_merge`
decides in which order casts and other messages reach a proc. This module is what agents and the
simulator's hosts share around the cores: it turns messages into bytes and back, and has the
*tunnel ends*, the ends of tunnels, where casts join the tunnels' own messages.

Procs see no difference. The agent of a proc's host writes an ordinary frame to it, at the end of
the tunnel to the caller, and reads the answer there. A small plain value is gathered. Anything else
(errors, values in a segment) goes through the tunnel as usual, in order with the reports of exits.

The agent at one end of a tunnel may not know yet, or no longer, that the other end opened one. So
the caller's agent names the tunnels of a cast: by the side that opened the tunnel, and by a number
that counts the tunnels of that side. By that number the other host can tell a tunnel that is yet to
be opened, for which the cast waits, from one that is closed.

On a link between hosts casts have lanes of their own: one for the casts of a caller, another for
answers. A full lane, or a proc that does not read, puts back-pressure on the source: on the lane by
which the casts arrive, or, by FLOW frames, on a caller of this host.

Messages (a length, a JSON head of that length, and bytes)::

    cast      the core's message, the shares of the hosts in the stretch, the frame for the procs
    answers   values, rank by rank
    over      casts whose answers are no longer wanted

An agent that starts procs on many hosts casts to the agents themselves: the frame is a control
message, and the share of a host is its order (`SpawnShare`). A host answers when it has the order.
`protocol.spawn_orders` keeps orders and the direct messages of the agents in one order.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._engine.base.errors import ProtocolError
from monarch._engine.base.failure import Failure
from monarch._engine.base.settings import settings
from monarch._engine.base.verdict import FAILED, INFRASTRUCTURE, Verdict
from monarch._engine.protocol.cast import (
    Answer,
    Casts,
    Deliver,
    Effect,
    Forward,
    Loss,
    Outcomes,
    Release,
    Reply,
    Route,
)
from monarch._engine.protocol.order_merge import Line, OrderMerge
from monarch._engine.runtime.cast.sender import ANSWER, HEADS, heads_size
from monarch._engine.runtime.cast.tunnel_end import (
    BACK,
    Cast,
    Expected,
    HostPeer,
    Joining,
    Share,
    SpawnShare,
    TunnelEnd,
    Way,
)
from monarch._engine.runtime.io.alarm import Alarm
from monarch._engine.wire.frame import (
    ANSWERS,
    CALL,
    CONTROL,
    FAILURE,
    FIRST,
    FLOW,
    HEADER,
    MARK,
    POST,
    Frame,
    pack,
)

if TYPE_CHECKING:
    from monarch._engine.runtime.io.reactor import Timer

__all__ = ["Carrier", "CastRelay"]

_HOLD = 0.002  # seconds that an answer may wait for others of its host
_HOLD_ALL = 0.02  # the same, for callers that look at answers only when all have arrived
_PATIENCE = 30.0
_OVER_WAIT = 0.02
_GATHERED = 64 << 10  # bytes; gathering a larger answer gains nothing
_PLANS = 256
_HEAD = struct.Struct("<I")

_Key = tuple[str, int]  # a host, and the number that the caller's host gave its session
_Part = tuple[str, list[int], str]  # part of a plan: a host, ranks there, their tunnels (JSON)

_Source = int | tuple[Way, int]  # a caller of this host, or the way and lane by which casts arrive
_Cause = TunnelEnd | tuple[Way, int]

_JSON = json.JSONEncoder(separators=(",", ":")).encode


class Carrier(Protocol):
    """The interface to its agent that the relay needs."""

    def cast_way(self, host: str, *, dial: bool) -> Way | None:
        """Return the way to `host`; None if there is none, or only one that was given up."""
        ...

    def cast_comes(self, near: int, far: int) -> bool:
        """Whether the tunnel from `near` to `far` was asked for, and not yet opened or refused."""
        ...

    def cast_tell(self, proc: int, frame: bytes) -> None:
        """Send a frame to a proc of this host, over its control link."""
        ...

    def cast_at(self, when: float, action: Callable[[], None]) -> Timer:
        """Call `action()` at the time `when`."""
        ...

    def cast_now(self) -> float:
        """Return the current time."""
        ...


def _hold(frame: bytes) -> float:
    """Return for how many seconds answers to this message may wait."""
    return _HOLD if frame[4] == CALL and frame[5] & FIRST else _HOLD_ALL


def _without(tunnels: str, ranks: Sequence[int], skip: frozenset[int]) -> str:
    """Return the tunnels (JSON) with 0 in place of those of the ranks in `skip`."""
    pairs = zip(json.loads(tunnels), ranks, strict=True)
    return _JSON([0 if rank in skip else tunnel for tunnel, rank in pairs])


class CastRelay:
    """Passes casts on and gathers answers at one host; see the module.

    Args:
        carrier: the agent.
        here: the name of its host.
    """

    def __init__(self, carrier: Carrier, here: str) -> None:
        self._carrier = carrier
        self._here = here
        self._core = Casts(here, hold=_HOLD, patience=_PATIENCE)
        self._casts: dict[Any, Cast] = {}
        self._ways: dict[Way, None] = {}
        self._ends: dict[tuple[int, int, bool], TunnelEnd] = {}  # by near, far, whether ours
        self._changes = 0  # of tunnels; plans made before the last change are outdated
        self._queues: dict[int, deque[tuple[Frame, Any]]] = {}  # by caller: casts that wait
        self._over_early: set[tuple[int, int]] = set()  # waiting casts: no answers are wanted
        self._plans: dict[tuple[int, bytes], tuple[int, list[_Part]]] = {}
        # Casts received before the session with their origin host was established.
        self._strange: dict[_Key, list[tuple[Cast, int]]] = {}
        self._keys: dict[str, dict[_Key, None]] = {}  # by host: its keys in others' casts
        self._full: dict[_Source, dict[_Cause, None]] = {}  # held-back sources, and why
        self._overs: dict[Way, None] = {}  # with ends of casts to send
        self._alarm = Alarm(carrier.cast_at, self._tick)

    def way(self, host: str, peer: HostPeer) -> Way:
        """Begin a session with `host`; return its way."""
        way = Way(host, peer)
        self._ways[way] = None
        return way

    def met(self, way: Way) -> None:
        """Handle casts of that host that came by other hosts before this session was up."""
        for cast, first in self._strange.pop((way.host, way.peer.sessions[1]), ()):
            self._accept(way, cast, first)

    # -- tunnels ---------------------------------------------------------------------------------

    def opened(self, tunnel_end: TunnelEnd) -> None:
        """Add a new tunnel. Must be called in the order in which tunnels are opened."""
        way = tunnel_end.way
        self._ends[tunnel_end.near, tunnel_end.far, tunnel_end.ours] = tunnel_end
        self._changes += 1
        way.tunnels[tunnel_end.far] = way.tunnels.get(tunnel_end.far, 0) + 1
        if tunnel_end.ours:
            tunnel_end.number = way.opened = way.opened + 1
            way.tunnel_ends[True, tunnel_end.number] = tunnel_end
            self.settled(tunnel_end.near)
        else:
            tunnel_end.number = way.accepted = way.accepted + 1
            way.tunnel_ends[False, tunnel_end.number] = tunnel_end

    def attached(self, tunnel_end: TunnelEnd) -> None:
        """Write the casts that came before a new tunnel, which has its socket now."""
        if not tunnel_end.ours:
            for joining in tunnel_end.way.coming.pop(tunnel_end.number, ()):
                self._join(tunnel_end, joining)

    def closed(self, tunnel_end: TunnelEnd) -> None:
        """Remove a closed tunnel; stop waiting for answers that its proc still owes."""
        way = tunnel_end.way
        way.tunnel_ends.pop((tunnel_end.ours, tunnel_end.number), None)
        if self._ends.get((tunnel_end.near, tunnel_end.far, tunnel_end.ours)) is tunnel_end:
            del self._ends[tunnel_end.near, tunnel_end.far, tunnel_end.ours]
        self._changes += 1
        self._let_on(tunnel_end)
        way.blocked.get(tunnel_end.far, {}).pop(tunnel_end, None)
        way.tunnels[tunnel_end.far] -= 1
        way.forget(tunnel_end.far)
        expected, tunnel_end.expected = tunnel_end.expected, {}
        for owed in expected.values():
            if owed.body is None:
                self._answered(owed.cast, owed.index, None)

    def arrived(self, tunnel_end: TunnelEnd, data: Any) -> None:
        """Handle a message from a tunnel that also takes casts."""
        merge = tunnel_end.merge
        if merge is None:
            merge = tunnel_end.merge = OrderMerge()
        if len(data) and data[4] == MARK:
            line = tunnel_end.way.lines.get(tunnel_end.far)
            reached = 0 if line is None else line.reached
            self._write(tunnel_end, merge.mark(HEADER.unpack_from(data)[4], reached))
        else:
            self._write(tunnel_end, merge.message(data))

    def _write(self, tunnel_end: TunnelEnd, items: Sequence[Any]) -> None:
        for item in items:
            if isinstance(item, Joining):
                self._write_cast(tunnel_end, item)
            else:
                tunnel_end.write(item)
        merge = tunnel_end.merge
        assert merge is not None
        if merge.blocked != tunnel_end.held:
            tunnel_end.held = merge.blocked
            tunnel_end.hold(on=tunnel_end.held)
            blocked = tunnel_end.way.blocked.setdefault(tunnel_end.far, {})
            if tunnel_end.held:
                blocked[tunnel_end] = None
            else:
                blocked.pop(tunnel_end, None)

    def answer(self, tunnel_end: TunnelEnd, frame: Frame) -> bool:
        """Whether a POST of a proc was an answer to a cast and is gathered here."""
        owed = tunnel_end.expected.get((frame.dest, frame.rank))
        if owed is None or owed.body is not None:
            return False
        if frame.flags or len(frame.body) > _GATHERED:
            del tunnel_end.expected[frame.dest, frame.rank]
            self._answered(owed.cast, owed.index, None)
            return False
        owed.body = bytes(frame.body)
        self._answered(owed.cast, owed.index, (frame.rank, owed.body))
        return True

    def repeated(self, tunnel_end: TunnelEnd) -> list[bytes]:
        """Return the gathered answers of a proc, as frames for the tunnel.

        Neither the next message of the proc nor the report of its exit may overtake its answers, so
        the answers are sent by the tunnel as well. Answers that arrive twice count once.
        """
        return [
            pack(POST, port, 0, rank, b"", owed.body)
            for (port, rank), owed in tunnel_end.expected.items()
            if owed.body is not None
        ]

    def drained(self, tunnel_end: TunnelEnd) -> None:
        """Resume what was held back: the proc at `tunnel_end` has read what waited for it."""
        self._let_on(tunnel_end)

    # -- callers of this host --------------------------------------------------------------------

    def begin(self, caller: int, frame: Frame, content: Any = None) -> None:
        """Begin the cast in a CAST frame of a proc here; `content` is that of its segment.

        Raises ValueError for an invalid frame.
        """
        queue = self._queues.get(caller)
        if queue is not None or not self._begin(caller, frame, content):
            self._queues.setdefault(caller, deque()).append((frame, content))

    def settled(self, caller: int, *, final: bool = False) -> None:
        """Retry waiting casts: a requested tunnel is opened or refused; `final`: all are."""
        queue = self._queues.get(caller)
        while queue and self._begin(caller, *queue[0], final=final):
            queue.popleft()
        if queue is not None and not queue:
            del self._queues[caller]

    def _begin(self, caller: int, frame: Frame, content: Any, *, final: bool = False) -> bool:
        """Send a cast on its way; return False if a tunnel that it needs is yet to be opened."""
        body = frame.body
        end = heads_size(body)
        new_size, _ = HEADS.unpack_from(body)
        at = HEADS.size + new_size
        number, gathers, fanout, *marked = json.loads(body[HEADS.size : at])
        tied, skip = map(frozenset, marked)
        static = self._plan(caller, bytes(body[at:end]), final=final)
        if static is None:
            return False
        stream = bytes(body[end:])
        kind, flags = frame.rank, frame.flags
        inner = pack(kind, frame.dest, frame.port, 0, frame.meta, stream, flags, frame.nfd)
        cast = Cast((self._here, caller, number), inner, content)
        cast.gathers = bool(gathers)
        cast.port = frame.port
        cast.source = caller
        hosts: list[_Key] = []
        starts = [0]
        for name, ranks, tunnels in static:
            way = self._carrier.cast_way(name, dial=False)
            if way is None:
                continue  # its tunnels are closed, or will be, which the caller notices
            key = way.key
            previous, way.last[caller] = way.last.get(caller, 0), number
            those = _JSON(sorted(tied.intersection(ranks))) if tied else "[]"
            text = tunnels if skip.isdisjoint(ranks) else _without(tunnels, ranks, skip)
            cast.shares[key] = f"[{previous},{those},{text},{_JSON(ranks)}]"
            hosts.append(key)
            starts.append(starts[-1] + (len(ranks) if gathers else 1))
            cast.ranks += ranks
        self._casts[cast.ident] = cast
        now = self._carrier.cast_now()
        self._do(self._core.cast(cast.ident, hosts, starts, max(1, fanout), now, _hold(inner)))
        if len(hosts) <= fanout:  # no host passes it on, so none has to send it again
            cast.frame, cast.content = b"", None
        if (caller, number) in self._over_early:
            self.over(caller, number)
            self._over_early.discard((caller, number))
        return True

    def over(self, caller: int, number: int) -> None:
        """Stop gathering answers to the cast of a proc here."""
        ident = (self._here, caller, number)
        if caller in self._queues and ident not in self._casts:
            self._over_early.add((caller, number))
        self._do(self._core.release(ident))
        self._forget(ident)

    def caller_gone(self, caller: int, *, for_good: bool) -> None:
        """End the casts of a proc here that exited; `for_good`: none takes over its uid."""
        self.settled(caller, final=True)  # casts that it sent before still count
        if for_good:
            for way in self._ways:
                way.last.pop(caller, None)
        self._over_early = {early for early in self._over_early if early[0] != caller}
        for ident in [ident for ident in self._casts if ident[:2] == (self._here, caller)]:
            self._do(self._core.release(ident))
            self._forget(ident)

    # -- orders of this host ---------------------------------------------------------------------

    def order(
        self,
        asker: int,
        spec: dict[str, Any],
        shares: Sequence[tuple[Way, SpawnShare]],
        fanout: int,
    ) -> None:
        """Send orders to start procs of member `asker` here to the agents of other hosts."""
        frame = pack(CONTROL, 0, 0, 0, b"", _JSON({"parent": asker, "spec": spec}).encode())
        # No two orders start the same proc, so its uid names the cast, also after a restart here.
        cast = Cast((self._here, 0, shares[0][1].procs[0]["uid"]), frame, None)
        cast.is_order = True
        cast.source = asker
        for place, (way, share) in enumerate(shares):
            cast.shares[way.key] = _JSON(share)
            cast.orders[place] = way, share.number
        self._casts[cast.ident] = cast
        now = self._carrier.cast_now()
        hosts, starts = list(cast.shares), range(len(shares) + 1)
        self._do(self._core.cast(cast.ident, hosts, starts, fanout, now, _HOLD_ALL))
        self._carrier.cast_at(now + settings.host_timeout / 2, lambda: self._insist(cast))

    def _insist(self, cast: Cast) -> None:
        """Send what is left of an order directly: a host in the middle may be slow, or lost."""
        for way, _ in list(cast.orders.values()):
            way.peer.insist()

    def _plan(self, caller: int, data: bytes, *, final: bool) -> list[_Part] | None:
        """Return the plan with tunnels in place of uids; None if a tunnel is yet to be opened."""
        known = self._plans.get((caller, data))
        if known is not None and known[0] == self._changes:
            return known[1]
        parts: list[_Part] = []
        for host, runs in json.loads(data):
            tunnels: list[int] = []
            ranks: list[int] = []
            for uid, ours, rank, count in runs:
                for step in range(count):
                    tunnel_end = self._ends.get((caller, uid + step, bool(ours)))
                    waits = tunnel_end is None and ours and not final
                    if waits and self._carrier.cast_comes(caller, uid + step):
                        return None
                    number = (
                        0
                        if tunnel_end is None or tunnel_end.way.host != host
                        else tunnel_end.number
                    )
                    tunnels.append(number if ours else -number)
                    ranks.append(rank + step)
            parts.append((host, ranks, _JSON(tunnels)))
        if len(self._plans) >= _PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[caller, data] = self._changes, parts
        return parts

    # -- effects of the core ---------------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Deliver):
                self._deliver(effect)
            elif isinstance(effect, Forward):
                self._forward(effect)
            elif isinstance(effect, Reply):
                self._reply(effect)
            elif isinstance(effect, Outcomes):
                self._outcomes(effect)
            else:
                self._release(effect)
        self._alarm.set(self._core.deadline)

    def _tick(self) -> None:
        self._do(self._core.tick(self._carrier.cast_now()))
        for ident in [ident for ident in self._casts if ident not in self._core]:
            self._forget(ident)

    def _forward(self, effect: Forward) -> None:
        cast = self._casts[effect.cast]
        route = effect.route
        key: Any = effect.to
        name = key[0]
        mine = cast.ident[0] == self._here
        way = self._carrier.cast_way(name, dial=not mine)
        if way is None or (mine and way.key != key):
            return  # the core will be notified of the loss
        shares = ",".join(cast.shares[host] for host in route.hosts)
        what = [cast.ident, int(cast.gathers), effect.level, route.hosts, route.starts]
        head = f"[{_JSON([*what, route.fanout])},[{shares}]]".encode()
        buffers = [_HEAD.pack(len(head)), head, cast.frame]
        if cast.content is not None:
            buffers.append(cast.content)
        if not way.peer.cast(cast.lane, buffers):
            self._hold_back(cast.source, (way, cast.lane))

    def _reply(self, effect: Reply) -> None:
        answers: list[list[int]] = []
        losses: list[Any] = []
        bodies: list[bytes] = []
        for answer in effect.answers:
            if isinstance(answer, Loss):
                losses.append(answer)
            elif answer.outcome is None:
                answers.append([answer.rank])
            else:
                outcome: Any = answer.outcome
                rank, body = outcome
                answers.append([answer.rank, rank, len(body)])
                bodies.append(body)
        head = _JSON([0, effect.cast, answers, losses]).encode()
        key: Any = effect.to
        way = self._carrier.cast_way(key[0], dial=False)
        if way is not None and way.key == key:  # otherwise the core will be notified of the loss
            way.peer.cast(BACK, [_HEAD.pack(len(head)), head, *bodies])

    def _release(self, effect: Release) -> None:
        key: Any = effect.to
        way = self._carrier.cast_way(key[0], dial=False)
        if way is None:
            return
        if not self._overs:
            self._carrier.cast_at(self._carrier.cast_now() + _OVER_WAIT, self._tell_overs)
        self._overs[way] = None
        way.overs.append([effect.cast, int(effect.done)])

    def _tell_overs(self) -> None:
        ways, self._overs = self._overs, {}
        for way in ways:
            overs, way.overs = way.overs, []
            head = _JSON([1, overs]).encode()
            way.peer.cast(BACK, [_HEAD.pack(len(head)), head])

    def _outcomes(self, effect: Outcomes) -> None:
        cast = self._casts[effect.cast]
        if effect.done:
            self._forget(effect.cast)
        for answer in effect.answers if cast.is_order else ():
            if isinstance(answer, Answer):
                way, number = cast.orders.pop(answer.rank)
                way.peer.confirmed(number)
        if not cast.gathers:
            return
        caller, port = cast.ident[1], cast.port
        parts: list[bytes] = []
        for answer in effect.answers:
            if isinstance(answer, Answer):
                if answer.outcome is not None:
                    outcome: Any = answer.outcome
                    rank, body = outcome
                    parts += (ANSWER.pack(rank, len(body)), body)
            elif answer.dropped:
                text = (
                    f"the answer to this call is lost: host {answer.host} discarded it, since no "
                    "other host collected it in time; the actor may have handled the call"
                )
                failure = Failure("<unknown>", Verdict(FAILED, text, INFRASTRUCTURE)).to_bytes()
                for index in answer.ranks:
                    rank = cast.ranks[index]
                    frame = pack(POST, port, 0, rank, b"", failure, FAILURE)
                    self._carrier.cast_tell(caller, frame)
            # The caller's links report all other losses.
        if parts or effect.done:
            body = b"".join(parts)
            frame = pack(ANSWERS, port, 0, 0, b"", body, int(effect.done))
            self._carrier.cast_tell(caller, frame)

    # -- casts that arrive -----------------------------------------------------------------------

    def received(self, way: Way, lane: int, data: Any) -> None:
        """Handle a message of the other host's relay. Raises ProtocolError if it is invalid."""
        view = memoryview(data)
        try:
            (size,) = _HEAD.unpack_from(view)
            start = _HEAD.size + size
            head = json.loads(bytes(view[_HEAD.size : start]))
            if lane != BACK:
                self._on_cast(way, lane, head, view[start:])
            elif head[0]:
                for ident, done in head[1]:
                    self._on_over(way, tuple(ident), bool(done))
            else:
                self._on_answers(head, view[start:])
        except (ValueError, TypeError, LookupError, struct.error) as error:
            text = f"protocol error from host {way.host}: {type(error).__name__}: {error}"
            raise ProtocolError(text) from None

    def _on_cast(self, way: Way, lane: int, head: Any, rest: memoryview) -> None:
        (ident, gathers, level, hosts, starts, fanout), shares = head
        ident = tuple(ident)
        route = Route(tuple((name, session) for name, session in hosts), tuple(starts), fanout)
        cast = self._casts.get(ident)
        if cast is None:
            end = HEADER.size + HEADER.unpack_from(rest)[0]
            cast = Cast(ident, bytes(rest[:end]), rest[end:] if len(rest) > end else None)
            cast.port = HEADER.unpack_from(rest)[5]
            cast.is_order = cast.frame[4] == CONTROL
            cast.gathers = bool(gathers)
            cast.source = (way, lane)
            self._casts[ident] = cast
        cast.key = route.hosts[0]
        key: Any
        for key, share in zip(route.hosts, shares, strict=True):
            cast.shares[key] = _JSON(share)
            self._keys.setdefault(key[0], {})[key] = None
        now = self._carrier.cast_now()
        self._do(self._core.on_forward(way.key, ident, level, route, now, _hold(cast.frame)))

    def _on_answers(self, head: Any, rest: memoryview) -> None:
        _, ident, rows, losses = head
        answers: list[Answer | Loss] = []
        at = 0
        for index, *value in rows:
            if value:
                rank, size = value
                answers.append(Answer(index, (rank, bytes(rest[at : at + size]))))
                at += size
            else:
                answers.append(Answer(index, None))
        for each in losses:
            lost, ranks, reason, dropped = each
            host = lost if isinstance(lost, str) else tuple(lost)
            answers.append(Loss(host, tuple(ranks), reason, dropped))
        self._do(self._core.on_reply(tuple(ident), answers, self._carrier.cast_now()))

    def _on_over(self, way: Way, ident: Any, done: bool) -> None:
        self._do(self._core.on_release(way.key, ident, done, self._carrier.cast_now()))
        if ident not in self._core:
            self._forget(ident)

    def _forget(self, ident: Any) -> None:
        cast = self._casts.pop(ident, None)
        if cast is not None:
            cast.over = True
            for tunnel_end, key in cast.expected:
                tunnel_end.expected.pop(key, None)
            cast.expected.clear()

    # -- into the tunnels ------------------------------------------------------------------------

    def _deliver(self, effect: Deliver) -> None:
        cast = self._casts[effect.cast]
        host, session = cast.ident[0], cast.key[1]
        way = self._carrier.cast_way(host, dial=False)
        if way is None or way.peer.sessions[1] != session:
            self._strange.setdefault((host, session), []).append((cast, effect.first))
        else:
            self._accept(way, cast, effect.first)

    def _accept(self, way: Way, cast: Cast, first: int) -> None:
        """Accept a cast from where `way` leads; its first rank here has the number `first`."""
        text = cast.shares[cast.key]
        if not cast.is_order:
            self._line_up(way, cast, Share(text, first))
            return
        share = SpawnShare(*json.loads(text))
        order = json.loads(cast.frame[HEADER.size :])
        way.peer.ordered(share, {**order, "op": "spawn", "procs": share.procs})
        self._answered(cast, first, None)

    def _line_up(self, way: Way, cast: Cast, share: Share) -> None:
        """Put a cast in its place among those of its caller, which lives where `way` leads."""
        _, caller, number = cast.ident
        line = way.lines.get(caller)
        if line is None:
            line = way.lines[caller] = Line()
        for _, (ready, its_share) in line.cast(number, share.previous, (cast, share)):
            self._spread(way, ready, its_share)
        for tunnel_end in list(way.blocked.get(caller, ())):
            assert tunnel_end.merge is not None
            self._write(tunnel_end, tunnel_end.merge.advance(line.reached))

    def _spread(self, way: Way, cast: Cast, share: Share) -> None:
        """Pass a cast, whose turn it is, to each of its tunnels."""
        place = share.first
        if not cast.gathers:
            self._answered(cast, place, None)
        for tunnel, rank in zip(share.tunnels, share.ranks, strict=True):
            joining = Joining(cast, place, rank, rank in share.tied)
            place += 1
            tunnel_end = way.tunnel_ends.get((tunnel < 0, abs(tunnel)))
            if tunnel_end is not None:
                self._join(tunnel_end, joining)
            elif tunnel > way.accepted:
                way.coming.setdefault(tunnel, []).append(joining)
            elif cast.gathers:
                self._answered(cast, joining.place, None)

    def _join(self, tunnel_end: TunnelEnd, joining: Joining) -> None:
        cast, index, rank, tied = joining
        if cast.gathers and not cast.over:
            key = (cast.port, rank)
            tunnel_end.expected[key] = Expected(cast, index)
            cast.expected.append((tunnel_end, key))
        if tunnel_end.merge is None:
            if not tied:
                self._write_cast(tunnel_end, joining)
                return
            tunnel_end.merge = OrderMerge()
        self._write(tunnel_end, tunnel_end.merge.cast(cast.ident[2], tied=tied, item=joining))

    def _write_cast(self, tunnel_end: TunnelEnd, joining: Joining) -> None:
        cast = joining.cast
        if not tunnel_end.write_cast(cast, joining.rank):
            self._hold_back(cast.source, tunnel_end)

    def _answered(self, cast: Cast, index: int, outcome: Any) -> None:
        self._do(self._core.answered(cast.ident, index, outcome, self._carrier.cast_now()))

    def caller_left(self, way: Way, caller: int) -> None:
        """Note that a proc of that host exited. Some of its tunnels may still be open."""
        way.gone.add(caller)
        way.forget(caller)

    # -- back-pressure ---------------------------------------------------------------------------

    def _hold_back(self, source: _Source, cause: _Cause) -> None:
        """Let a caller here, or a lane of another host, send no more casts for now."""
        causes = self._full.setdefault(source, {})
        causes[cause] = None
        if len(causes) == 1:
            self._tell_source(source, full=True)

    def _let_on(self, cause: _Cause) -> None:
        """Remove a cause of back-pressure; resume the sources that have no other."""
        for source in [source for source, causes in self._full.items() if cause in causes]:
            self._full[source].pop(cause, None)
            if not self._full[source]:
                del self._full[source]
                self._tell_source(source, full=False)

    def _tell_source(self, source: _Source, *, full: bool) -> None:
        if isinstance(source, int):
            self._carrier.cast_tell(source, pack(FLOW, 0, 0, 0, b"", b"", int(full)))
        else:
            way, lane = source
            way.peer.hold(lane, on=full)

    def room(self, way: Way, lane: int) -> None:
        """Resume what was held back: a lane that was full takes messages again."""
        self._let_on((way, lane))

    # -- the end of a session --------------------------------------------------------------------

    def way_over(self, way: Way, reason: str) -> None:
        """Handle the end of a session, whose tunnels are `closed` already."""
        self._ways.pop(way, None)
        self._overs.pop(way, None)
        known = self._carrier.cast_way(way.host, dial=False)
        again = known is not None and known is not way
        keys: dict[_Key, None] = {} if again else self._keys.pop(way.host, {})
        now = self._carrier.cast_now()
        for key in (way.key, *keys):
            self._do(self._core.host_lost(key, reason, now))
        for source in [source for source in self._full if _of_way(source, way)]:
            del self._full[source]
        causes = [cause for causes in self._full.values() for cause in causes]
        for cause in causes:
            if _of_way(cause, way):
                self._let_on(cause)


def _of_way(thing: _Source | _Cause, way: Way) -> bool:
    return isinstance(thing, tuple) and thing[0] is way
