"""Ways and tunnel ends: an agent's state for casts, per session with a host, and per tunnel.

All state of one session is in its `Way` and is dropped with it: a host that is attached again, or
restarted, begins a new session under the same name. The `CastRelay` decides what is sent, and when.
A `TunnelEnd`, the end of a tunnel where casts join the tunnel's own messages, moves the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from monarch._engine.protocol.order_merge import Line, OrderMerge

if TYPE_CHECKING:
    from monarch._engine.runtime.cast.relay import CastRelay
    from monarch._engine.wire.packet import Buffer

__all__ = [
    "BACK",
    "CASTS",
    "Cast",
    "Expected",
    "HostPeer",
    "Joining",
    "Share",
    "SpawnShare",
    "TunnelEnd",
    "Way",
    "ranked",
]

CASTS = 0xF000
"""The first lane for casts; lower ones are for tunnels. The casts of one caller share a lane."""

BACK = 0xFFFF
"""The lane of answers and of reports that casts are over."""

_RANK_AT = struct.calcsize("<IBBHQQ")  # in a frame's header


class HostPeer(Protocol):
    """One side of a session with another host, as casts need it."""

    @property
    def sessions(self) -> tuple[int, int]:
        """The numbers of the session: ours, and theirs, which is 0 until the first handshake."""
        ...

    def cast(self, lane: int, buffers: Sequence[Buffer]) -> bool:
        """Send a message to the relay of the other host; return False when the lane is full now."""
        ...

    def hold(self, lane: int, *, on: bool) -> None:
        """Ask the other side to hold back the messages of a lane, or to send them again."""
        ...

    def ordered(self, share: SpawnShare, order: dict[str, Any]) -> None:
        """Carry out an order of the other host to start procs here, which came down the tree."""
        ...

    def confirmed(self, number: int) -> None:
        """Record that an order has arrived at the other host."""
        ...

    def insist(self) -> None:
        """Send the orders that are not confirmed directly."""
        ...


class SpawnShare(NamedTuple):
    """A host's part of an order to start procs; see `protocol.spawn_orders`."""

    number: int
    said: int
    lanes: Sequence[int]
    """The lane of the tunnel to each proc."""
    procs: Sequence[dict[str, Any]]


class Way:
    """The state of casts for one session with another host."""

    __slots__ = (
        "accepted",
        "blocked",
        "coming",
        "gone",
        "host",
        "key",
        "last",
        "lines",
        "opened",
        "overs",
        "peer",
        "tunnel_ends",
        "tunnels",
    )

    def __init__(self, host: str, peer: HostPeer) -> None:
        self.host = host
        self.peer = peer
        self.key = (host, peer.sessions[0])  # the name of the host in the core
        self.opened = 0  # number of tunnels ever opened by us
        self.accepted = 0  # number of tunnels ever opened by the host
        # Of the open tunnels, by whether we opened the tunnel, and its number.
        self.tunnel_ends: dict[tuple[bool, int], TunnelEnd] = {}
        self.coming: dict[int, list[Joining]] = {}  # casts that wait for a tunnel, by its number
        self.last: dict[int, int] = {}  # by caller here: its last cast to that host
        self.overs: list[list[Any]] = []  # ends of casts, to be sent
        # State of callers that live on that host, by uid.
        self.lines: dict[int, Line[tuple[Cast, Share]]] = {}
        # Tunnels that wait for a cast, in order.
        self.blocked: dict[int, dict[TunnelEnd, None]] = {}
        self.tunnels: dict[int, int] = {}  # number of open tunnels
        self.gone: set[int] = set()  # callers that have exited

    def forget(self, caller: int) -> None:
        """Drop the state of a caller there that has exited, once its last tunnel is closed."""
        if caller in self.gone and not self.tunnels.get(caller):
            self.gone.discard(caller)
            self.lines.pop(caller, None)
            self.blocked.pop(caller, None)
            self.tunnels.pop(caller, None)


class TunnelEnd:
    """The end of a tunnel; subclasses move the bytes.

    Args:
        relay: the relay of this agent.
        way: the session that the tunnel belongs to.
        near: the proc at this end.
        far: the proc on the other host.
        ours: whether this agent opened the tunnel.
    """

    def __init__(self, relay: CastRelay, way: Way, near: int, far: int, *, ours: bool) -> None:
        self.relay = relay
        self.way = way
        self.near = near
        self.far = far
        self.ours = ours
        self.number = 0
        self.merge: OrderMerge[Any] | None = None
        self.held = False  # whether the lane is paused until a cast arrives
        self.expected: dict[tuple[int, int], Expected] = {}  # by port and rank

    def write(self, data: Any) -> None:
        """Write what the tunnel brought to the proc."""
        raise NotImplementedError

    def write_cast(self, cast: Cast, rank: int) -> bool:
        """Write a cast to the proc; return False if too much waits for the proc already."""
        raise NotImplementedError

    def hold(self, *, on: bool) -> None:
        """Make the other end of the tunnel stop sending for now, or resume."""
        raise NotImplementedError


class Expected:
    """An answer to a cast that a proc owes."""

    __slots__ = ("body", "cast", "index")

    def __init__(self, cast: Cast, index: int) -> None:
        self.cast = cast
        self.index = index
        self.body: bytes | None = None  # set when the answer is gathered


class Cast:
    """A cast that this host has begun or received."""

    __slots__ = (
        "__weakref__",
        "content",
        "expected",
        "frame",
        "frame_here",
        "gathers",
        "ident",
        "is_order",
        "key",
        "orders",
        "over",
        "port",
        "ranks",
        "segment",
        "shares",
        "source",
    )

    def __init__(self, ident: tuple[str, int, int], frame: bytes, content: Any) -> None:
        self.ident = ident  # host and uid of the caller, number of the cast
        self.frame = frame  # the frame for the procs, but for its rank
        self.content = content  # what its segment contains, if there is one
        self.segment: Any = None  # a segment of this host that contains `content`
        self.frame_here: bytes | None = None  # the frame that refers to `segment`
        self.gathers = False
        self.port = 0
        self.shares: dict[Any, str] = {}  # by host, as JSON
        self.key: Any = None  # the name of this host in the core
        self.source: int | tuple[Way, int] = 0  # local caller, or way and lane
        self.ranks: list[int] = []  # at the root: by the core's numbering
        self.expected: list[tuple[TunnelEnd, tuple[int, int]]] = []
        self.over = False
        self.is_order = False  # an order for agents to start procs, no message for procs
        # At the root of an order: by the core's numbering, where it is not confirmed yet.
        self.orders: dict[int, tuple[Way, int]] = {}

    @property
    def lane(self) -> int:
        return CASTS + self.ident[1] % (BACK - CASTS)


class Joining(NamedTuple):
    """A cast on its way into a tunnel: its place in the core, its rank; see `OrderMerge`."""

    cast: Cast
    place: int
    rank: int
    tied: bool


class Share:
    """The part of a cast that concerns this host."""

    __slots__ = ("first", "previous", "ranks", "tied", "tunnels")

    def __init__(self, text: str, first: int) -> None:
        self.previous, tied, self.tunnels, self.ranks = json.loads(text)
        self.tied = frozenset(tied)
        self.first = first  # in the core's numbering


def ranked(frame: bytes, rank: int) -> bytes:
    """Return the frame of a cast for one rank."""
    at = _RANK_AT
    return frame[:at] + rank.to_bytes(4, "little") + frame[at + 4 :]
